"""Kimi-Linear logits against transformers' `kimi_linear`.

Transformers saves random checkpoints in the original's layout (tensor names, A_log of shape
[1, 1, H, 1]); our loader reads them. Tolerance 1e-4 of the largest logit in float32; 2e-6
is reached.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from stagecoach.model.checkpoint_reader import published_name
from stagecoach.model.tiny import TinyShape, kimi_linear_config, write_json, write_tiny_model
from tests.cpu.model.model_runs import Grid, relative_error

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

TOLERANCE = 1e-4
TOKEN_IDS = torch.randint(0, 300, (27,), generator=torch.Generator().manual_seed(8)).tolist()

SHAPES = {
    "full-rank queries, as published": TinyShape(
        num_layers=5, mla_layers=(2, 4), q_lora_rank=None, num_shared_experts=1
    ),
    "low-rank queries": TinyShape(num_layers=4, mla_layers=(0, 3), num_experts_per_token=3),
}


def transformers_model(config: dict[str, Any]) -> Any:
    """A transformers model of our config.json, randomly filled, in float32."""
    linear = config["linear_attn_config"]
    kwargs = {
        key: value
        for key, value in config.items()
        if key not in ("architectures", "model_type", "dtype", "mla_use_nope")
    }
    hf_config = transformers.KimiLinearConfig(
        **kwargs,
        layer_types=[
            "full_attention" if layer in linear["full_attn_layers"] else "linear_attention"
            for layer in range(1, config["num_hidden_layers"] + 1)
        ],
        attn_implementation="eager",
    )
    model = transformers.KimiLinearForCausalLM(hf_config).float().eval()
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in name:
                tensor.normal_(1.0, 0.1, generator=generator)
            elif name.endswith("e_score_correction_bias"):
                tensor.normal_(0.0, 0.1, generator=generator)
            elif tensor.dim() >= 2 and not name.endswith("A_log"):
                std = 1.0 if "embed" in name else tensor.shape[-1] ** -0.5
                tensor.normal_(0.0, std, generator=generator)
    return model


@pytest.fixture(scope="module", params=SHAPES, ids=lambda name: name.replace(" ", "-"))
def saved_model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    config = kimi_linear_config(SHAPES[request.param])
    model = transformers_model(config)
    folder = tmp_path_factory.mktemp("kimi_linear")
    model.save_pretrained(folder, max_shard_size="300KB")
    write_json(folder / "config.json", config)
    return folder, model


def test_prefill_chunks_and_decode_give_the_oracles_logits(saved_model: tuple[Path, Any]) -> None:
    folder, oracle = saved_model
    with torch.no_grad():
        expected = oracle(torch.tensor([TOKEN_IDS])).logits[0]
    grid = Grid(folder, torch.float32)
    whole = grid.prefill(grid.row(27), TOKEN_IDS)
    assert relative_error(whole, expected) < TOLERANCE
    chunked = grid.prefill(grid.row(27), TOKEN_IDS, chunk=6)
    assert relative_error(chunked, expected) < TOLERANCE
    row = grid.row(27)
    decoded = torch.cat([grid.prefill(row, TOKEN_IDS[:9]), grid.decode(row, TOKEN_IDS[9:])])
    assert relative_error(decoded, expected) < TOLERANCE


def test_the_layout_is_the_one_that_transformers_writes(
    saved_model: tuple[Path, Any], tmp_path: Path
) -> None:
    """Our small checkpoints hold the names and shapes of transformers' saved ones."""
    folder, _ = saved_model
    config = json.loads((folder / "config.json").read_text())
    write_tiny_model(tmp_path, config, seed=4)
    assert names_and_shapes(tmp_path) == names_and_shapes(folder)


def names_and_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for path in folder.glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            shapes[published_name(name)] = tuple(tensor.shape)
    return shapes
