"""A trained target in the published checkpoint layout: writing it, and reading it back."""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from training.target.configuration import generation_config, root_config, text_config
from training.target.mxfp4 import dequantize, quantize

PREFIX = "language_model."
NUM_SHARDS = 2
PADDED_KDA_HEADS = 8

_FLOAT32_SUFFIXES = (
    "conv1d.weight",
    "A_log",
    "dt_bias",
    "o_norm.weight",
    "e_score_correction_bias",
)


def checkpoint_tensors(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the checkpoint, by their published names and in their published dtypes."""
    tensors: dict[str, Tensor] = {}
    for name, value in state.items():
        value = value.detach().float().cpu()
        stem, _, last = name.rpartition(".")
        if stem.endswith("block_sparse_moe.experts"):
            for expert, weight in enumerate(value):
                packed, scale = quantize(weight)
                tensors[f"{PREFIX}{stem}.{expert}.{last}.weight_packed"] = packed
                tensors[f"{PREFIX}{stem}.{expert}.{last}.weight_scale"] = scale
        elif name.endswith("A_log"):
            padding = torch.zeros(PADDED_KDA_HEADS - value.numel())
            tensors[PREFIX + name] = torch.cat((value, padding))
        elif name.endswith(_FLOAT32_SUFFIXES):
            tensors[PREFIX + name] = value.clone()
        else:
            tensors[PREFIX + name] = value.to(torch.bfloat16)
    return tensors


def shards(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """The tensors in `NUM_SHARDS` parts of about equal size, layers in order."""
    sizes = {name: value.numel() * value.element_size() for name, value in tensors.items()}
    limit = sum(sizes.values()) / NUM_SHARDS
    parts: list[dict[str, Tensor]] = [{} for _ in range(NUM_SHARDS)]
    used = 0
    for name, value in tensors.items():
        parts[min(int(used / limit), NUM_SHARDS - 1)][name] = value
        used += sizes[name]
    return parts


def write_checkpoint(state: dict[str, Tensor], folder: Path) -> None:
    """Write config, shards, and index. The tokenizer's files are `train_tokenizer`'s."""
    folder.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    total_size = 0
    for number, part in enumerate(shards(checkpoint_tensors(state)), start=1):
        file_name = f"model-{number:05}-of-{NUM_SHARDS:05}.safetensors"
        save_file(part, folder / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file_name)
        total_size += sum(value.numel() * value.element_size() for value in part.values())
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(folder / "model.safetensors.index.json", index)
    _write_json(folder / "config.json", root_config())
    _write_json(folder / "generation_config.json", generation_config())


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, by their published names."""
    index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
    tensors: dict[str, Tensor] = {}
    for file_name in sorted(set(index["weight_map"].values())):
        tensors |= load_file(folder / file_name)
    assert sorted(tensors) == sorted(index["weight_map"])
    return tensors


@torch.no_grad()
def load_checkpoint(model: nn.Module, folder: Path) -> None:
    """Give the training model the weights of a checkpoint."""
    tensors = {name.removeprefix(PREFIX): value for name, value in read_tensors(folder).items()}
    for name, value in model.state_dict().items():
        stem, _, last = name.rpartition(".")
        if stem.endswith("block_sparse_moe.experts"):
            for expert in range(value.shape[0]):
                path = f"{stem}.{expert}.{last}"
                packed, scale = tensors[f"{path}.weight_packed"], tensors[f"{path}.weight_scale"]
                value[expert] = dequantize(packed, scale)
        elif name.endswith("A_log"):
            value.copy_(tensors[name][: value.numel()])
        else:
            value.copy_(tensors[name])


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(f"{json.dumps(value, indent=2)}\n", encoding="utf-8")


def random_state(seed: int) -> dict[str, Tensor]:
    """An untrained model whose every part does something, for checking the arithmetic."""
    from training.target.model import Target

    torch.manual_seed(seed)
    model = Target(text_config())
    for name, value in model.named_parameters():
        if "res_proj" in name:
            value.data.normal_(std=0.1)
        elif "norm" in name:
            value.data.uniform_(0.5, 1.5)
    for layer in model.moe_layers():
        layer.gate.e_score_correction_bias.uniform_(-0.1, 0.1)
    return model.state_dict()


def main() -> None:
    """Write an untrained checkpoint, to check the arithmetic before any training."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("out", type=Path, help="the checkpoint folder")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write_checkpoint(random_state(arguments.seed), arguments.out)


if __name__ == "__main__":
    main()
