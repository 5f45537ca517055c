"""Kimi-K3 logits against mlx-lm's `kimi_k3`, an implementation that nobody here wrote.

Random checkpoints in the published layout go through mlx-lm's own `sanitize` and through our
loader. Tolerance 1e-4 of the largest logit in float32; 6e-6 is reached.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from mlx import nn
from mlx_lm.models import kimi_k3 as mlx_kimi_k3
from safetensors.torch import load_file, save_file
from torch import Tensor

from stagecoach.model.tiny import TinyShape, kimi_k3_config
from stagecoach.model_config import load_model_config
from tests.cpu.model.model_runs import Grid, Part, relative_error, step_tensors

pytestmark = pytest.mark.cpu

TOLERANCE = 1e-4
NUM_TOKENS = 29

SHAPES = {
    "as in the original": TinyShape(),
    "blocks of two, many experts": TinyShape(
        num_layers=7,
        mla_layers=(1, 5, 6),
        block_size=2,
        num_experts=12,
        num_experts_per_token=4,
        num_shared_experts=1,
    ),
    "one block, no latent experts": TinyShape(
        num_layers=4, mla_layers=(3,), block_size=12, latent_size=None
    ),
    "a block a layer, full-rank queries": TinyShape(
        num_layers=4, mla_layers=(0, 2), block_size=1, q_lora_rank=None, num_shared_experts=0
    ),
    "plain residuals, dense layers, tied head": TinyShape(
        num_layers=4, mla_layers=(2,), block_size=None, num_dense_layers=3, is_head_tied=True
    ),
    "wide heads, odd sizes": TinyShape(
        num_layers=3,
        mla_layers=(1,),
        hidden_size=40,
        num_heads=3,
        head_dim=20,
        dense_size=52,
        q_lora_rank=18,
        kv_lora_rank=28,
        nope_dim=10,
        rope_dim=6,
        value_dim=22,
        vocab_size=300,
    ),
}


def tokens(seed: int, count: int = NUM_TOKENS, vocab_size: int = 300) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (count,), generator=generator).tolist()


def mlx_model(folder: Path, config: dict[str, Any]) -> Any:
    """mlx-lm's model of a checkpoint folder, in float32 on the CPU."""
    mx.set_default_device(mx.cpu)
    model = mlx_kimi_k3.Model(mlx_kimi_k3.ModelArgs.from_dict(config))
    weights: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        weights |= mx.load(str(path))
    if "quantization_config" in config["text_config"]:
        nn.quantize(
            model,
            group_size=32,
            bits=4,
            mode="mxfp4",
            class_predicate=lambda path, module: (
                "switch_mlp" in path and hasattr(module, "to_quantized")
            ),
        )
    model.load_weights(list(model.sanitize(weights).items()), strict=True)
    model.set_dtype(mx.float32)
    return model


def mlx_logits(model: Any, token_ids: list[int]) -> Tensor:
    return torch.from_numpy(np.array(model(mx.array([token_ids]))[0]))


@pytest.fixture(scope="session", params=SHAPES, ids=lambda name: name.replace(" ", "-"))
def model_and_oracle(
    request: pytest.FixtureRequest, write_model: Callable[[dict[str, Any]], Path]
) -> tuple[Path, Any]:
    config = kimi_k3_config(SHAPES[request.param])
    folder = write_model(config)
    return folder, mlx_model(folder, config)


def test_prefill_chunks_and_decode_give_the_oracles_logits(
    model_and_oracle: tuple[Path, Any],
) -> None:
    folder, oracle = model_and_oracle
    token_ids = tokens(1)
    expected = mlx_logits(oracle, token_ids)
    grid = Grid(folder, torch.float32)
    whole = grid.prefill(grid.row(NUM_TOKENS), token_ids)
    assert relative_error(whole, expected) < TOLERANCE
    chunked = grid.prefill(grid.row(NUM_TOKENS), token_ids, chunk=7)
    assert relative_error(chunked, expected) < TOLERANCE
    row = grid.row(NUM_TOKENS)
    start = grid.prefill(row, token_ids[:11])
    decoded = torch.cat([start, grid.decode(row, token_ids[11:])])
    assert relative_error(decoded, expected) < TOLERANCE


def test_a_mixed_step_gives_each_row_what_it_gets_alone(
    model_and_oracle: tuple[Path, Any],
) -> None:
    folder, oracle = model_and_oracle
    first, second, third = tokens(2), tokens(3), tokens(4)
    grid = Grid(folder, torch.float32)
    rows = [grid.row(NUM_TOKENS) for _ in range(3)]
    grid.step([Part(rows[0], first[:20]), Part(rows[1], second[:3])])
    # A window of three tokens and one of one beside two chunks.
    mixed = grid.step(
        [
            Part(rows[0], first[20:23], is_window=True),
            Part(rows[2], third[:9]),
            Part(rows[1], second[3:4], is_window=True),
        ]
    )
    expected = torch.cat(
        [
            mlx_logits(oracle, first)[20:23],
            mlx_logits(oracle, second)[3:4],
            mlx_logits(oracle, third)[:9],
        ]
    )
    assert relative_error(mixed, expected) < TOLERANCE


def test_unpacked_experts_names_without_prefix_and_other_spellings(
    write_model: Callable[[dict[str, Any]], Path], tmp_path: Path
) -> None:
    """Unpacked BF16 experts under the alternative names give what the same names give there."""
    config = kimi_k3_config(TinyShape(num_layers=3, mla_layers=(1,), block_size=2))
    del config["text_config"]["quantization_config"]
    folder = write_model(config)
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    respelt = {}
    for name, tensor in tensors.items():
        name = name.removeprefix("language_model.")
        for part in ("proj", "norm"):
            name = name.replace(f"_res_{part}.weight", f"_res.{part}_weight")
        respelt[name] = tensor
    save_file(respelt, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    token_ids = tokens(5)
    expected = mlx_logits(mlx_model(tmp_path, config), token_ids)
    for place in (folder, tmp_path):
        grid = Grid(place, torch.float32)
        assert relative_error(grid.prefill(grid.row(NUM_TOKENS), token_ids), expected) < TOLERANCE


@pytest.mark.parametrize(
    "shape",
    [
        # Without routers: in a random network a rounded router soon chooses other experts.
        TinyShape(num_dense_layers=9),
        TinyShape(num_layers=1, mla_layers=(), num_dense_layers=0),
    ],
    ids=["nine dense layers", "one layer of experts"],
)
def test_bfloat16_stays_near_float32(
    write_model: Callable[[dict[str, Any]], Path], shape: TinyShape
) -> None:
    folder = write_model(kimi_k3_config(shape))
    token_ids = tokens(6)
    exact = Grid(folder, torch.float32)
    expected = exact.prefill(exact.row(NUM_TOKENS), token_ids)
    rounded = Grid(folder, torch.bfloat16)
    row = rounded.row(NUM_TOKENS)
    logits = torch.cat([rounded.prefill(row, token_ids[:20]), rounded.decode(row, token_ids[20:])])
    assert logits.dtype == torch.float32
    error = (logits - expected).abs().mean() / expected.abs().mean()
    assert 1e-4 < error < 0.05


def test_the_head_is_computed_only_for_the_rows_asked_for(k3_folder: Path) -> None:
    config = load_model_config(k3_folder)
    grid = Grid(k3_folder, torch.float64)
    token_ids = tokens(7, count=9)
    every = grid.prefill(grid.row(9), token_ids)
    model, memory = grid.models[0][0], grid.memories[0][0]
    row = grid.row(9)
    step = step_tensors([Part(row, token_ids)])
    stream = model.forward(model.embed(step.token_ids_T), step, memory)
    some = model.logits(stream, torch.tensor([8, 2]))
    assert some.shape == (2, config.vocab_size) and some.dtype == torch.float64
    torch.testing.assert_close(some, every[[8, 2]], rtol=0, atol=1e-12)
    assert model.logits(stream, torch.tensor([], dtype=torch.int64)).shape == (0, 512)
