"""Checkpoints in the published layout whose weights take no disk: every header, no values.

Owns the list of stored tensors of a published model or draft (names, types, shapes, order, shards)
and writes it as the originals are, but for the values: those are holes in the files and read as
zeros. So names, sharding, planning and reading are rehearsed at full size.

    python -m stagecoach.model.sparse kimi-k3 FOLDER
"""

import argparse
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from stagecoach.config.model import ModelConfig, parse_model_config
from stagecoach.json_file import read_json_object
from stagecoach.kernels.quantization import MXFP4_GROUP_SIZE
from stagecoach.model.checkpoint_reader import INDEX_NAME
from stagecoach.model.kimi_k3 import StageModel
from stagecoach.model.parallel_linear import SingleRank
from stagecoach.model.tiny import write_byte_tokenizer, write_json
from stagecoach.model.weight_formats import packed_names
from stagecoach.model.weight_slots import WeightKind, WeightSlot
from stagecoach.pipeline.stage import Stage
from stagecoach.published import MODELS, published_folder

_ITEM_BYTES = {"BF16": 2, "F32": 4, "U8": 1}
_PADDED_HEADS = 128  # of A_log in Kimi-K3
_NUM_SHARDS = {"kimi_k3": 96, "kimi_linear": 20}
_LONGEST_VISION_POSITION = 64
_LAYER = "layers.*."  # stands for the number of any layer of its kind


class StoredLayout(NamedTuple):
    """One tensor as it stands in a file."""

    name: str
    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * _ITEM_BYTES[self.dtype]


def published_layout(root: dict[str, Any]) -> Iterator[StoredLayout]:
    """Every stored tensor of a model, in the order of its layers.

    Args:
        root: a parsed `config.json`. With a quantization_config experts are packed as MXFP4; with
            a vision_config the vision tower's tensors come last.
    """
    config = parse_model_config(root)
    is_packed = "quantization_config" in root.get("text_config", root)
    yield from _model_layouts(config, is_packed=is_packed)
    if root.get("vision_config"):
        yield from _vision_tower(root["vision_config"])


def write_sparse_checkpoint(
    folder: Path,
    tensors: Iterable[StoredLayout],
    config: dict[str, Any],
    num_shards: int | None = None,
) -> None:
    """Write shards of about equal size, their index and `config.json`.

    Args:
        folder: made if it is not there.
        num_shards: None: one `model.safetensors` without an index, as drafts have it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    layouts = list(tensors)
    total = sum(item.num_bytes for item in layouts)
    if num_shards is None:
        _write_shard(folder / "model.safetensors", layouts)
        return
    shards: list[list[StoredLayout]] = [[] for _ in range(num_shards)]
    done = 0
    for item in layouts:
        shards[min(num_shards - 1, done * num_shards // total)].append(item)
        done += item.num_bytes
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{num_shards:06d}.safetensors"
        _write_shard(folder / file_name, shard)
        weight_map |= dict.fromkeys((item.name for item in shard), file_name)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX_NAME).write_bytes(msgspec.json.encode(index))


def write_published_model(name: str, folder: Path) -> None:
    """A sparse checkpoint of a published model, with a byte tokenizer of its vocabulary."""
    config = read_json_object(published_folder(name) / "config.json")
    num_shards = _NUM_SHARDS[config["model_type"]]
    write_sparse_checkpoint(folder, published_layout(config), config, num_shards)
    write_byte_tokenizer(folder, config.get("text_config", config)["vocab_size"])


def _write_shard(path: Path, tensors: list[StoredLayout]) -> None:
    entries = ['"__metadata__":{"format":"pt"}']
    end = 0
    for name, dtype, shape in tensors:
        start, end = end, end + prod(shape) * _ITEM_BYTES[dtype]
        entries.append(
            f'"{name}":{{"dtype":"{dtype}","shape":{list(shape)},"data_offsets":[{start},{end}]}}'
        )
    text = ("{" + ",".join(entries) + "}").encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        file.truncate(8 + len(text) + end)


def _model_layouts(config: ModelConfig, *, is_packed: bool) -> Iterator[StoredLayout]:
    """Of the text model: its layers, then its two ends. Layers of one kind are listed once."""
    known: dict[tuple[object, ...], list[StoredLayout]] = {}
    for layer in range(config.num_layers):
        kind = (config.layer_kinds[layer], config.is_moe_layer[layer])
        if kind not in known:
            known[kind] = list(_stage_layouts(config, layer, is_packed=is_packed))
        for name, dtype, shape in known[kind]:
            yield StoredLayout(name.replace(_LAYER, f"layers.{layer}.", 1), dtype, shape)
    last = config.num_layers - 1
    ends = {
        slot.name: slot
        for stage in (
            Stage(index=0, num_stages=3, start=0, end=1),
            Stage(index=2, num_stages=3, start=last, end=last + 1),
        )
        for slot in _meta_slots(config, stage)
        if ".layers." not in slot.name
    }
    for name, slot in ends.items():
        yield from _stored(config, config.tensor_prefix + name, slot, is_packed=False)


def _stage_layouts(config: ModelConfig, layer: int, *, is_packed: bool) -> Iterator[StoredLayout]:
    """Of one layer, which is called `_LAYER`."""
    alone = Stage(index=min(layer, 1), num_stages=3, start=layer, end=layer + 1)
    for slot in _meta_slots(config, alone):
        if ".layers." not in slot.name:
            continue
        name = config.tensor_prefix + slot.name.replace(f"layers.{layer}.", _LAYER, 1)
        yield from _stored(config, name, slot, is_packed=is_packed)


def _meta_slots(config: ModelConfig, stage: Stage) -> list[WeightSlot]:
    return StageModel(config, stage, SingleRank(), torch.float32, device="meta").slots


def _stored(
    config: ModelConfig, name: str, slot: WeightSlot, *, is_packed: bool
) -> Iterator[StoredLayout]:
    if slot.kind is WeightKind.EXPERT and is_packed:
        rows, columns = slot.shape
        codes, scales = packed_names(name)
        yield StoredLayout(codes, "U8", (rows, columns // 2))
        yield StoredLayout(scales, "U8", (rows, columns // MXFP4_GROUP_SIZE))
        return
    shape = slot.shape
    if slot.kind is WeightKind.DECAY:
        is_padded = config.model_type == "kimi_k3"
        shape = (max(_PADDED_HEADS, *shape),) if is_padded else (1, 1, *shape, 1)
    yield StoredLayout(name, "F32" if slot.kind.is_stored_as_float32 else "BF16", shape)


def _vision_tower(vision: Mapping[str, Any]) -> Iterator[StoredLayout]:
    """Tensors that a text engine passes over: their number and the beginnings of their names."""
    hidden, qkv = vision["hidden_size"], vision["qkv_hidden_size"]
    mlp, out = vision["intermediate_size"], vision["text_hidden_size"]
    merged = hidden * prod(vision["merge_kernel_size"])
    shapes: dict[str, tuple[int, ...]] = {
        "vision_tower.patch_embed.proj.weight": (hidden, 3, 14, 14),
        "vision_tower.patch_embed.pos_emb.weight": (*[_LONGEST_VISION_POSITION] * 2, hidden),
        "vision_tower.encoder.final_layernorm.weight": (hidden,),
    }
    for layer in range(vision["num_hidden_layers"]):
        shapes |= {
            f"vision_tower.encoder.blocks.{layer}.{name}.weight": shape
            for name, shape in {
                "norm0": (hidden,),
                "norm1": (hidden,),
                "wqkv": (3 * qkv, hidden),
                "wo": (hidden, qkv),
                "mlp.fc0": (mlp, hidden),
                "mlp.fc1": (hidden, mlp),
            }.items()
        }
    shapes |= {
        "mm_projector.proj.0.weight": (merged, merged),
        "mm_projector.proj.2.weight": (out, merged),
        "mm_projector.post_norm.weight": (out,),
    }
    for name, shape in shapes.items():
        yield StoredLayout(name, "BF16", shape)


def main() -> None:
    """The command line of this module."""
    parser = argparse.ArgumentParser(description="Write a checkpoint of holes in full size.")
    parser.add_argument("name", choices=MODELS)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    if arguments.folder.exists():
        parser.error(f"{arguments.folder} is there already")
    write_published_model(arguments.name, arguments.folder)
    size = sum(path.stat().st_size for path in arguments.folder.iterdir())
    used = sum(512 * path.stat().st_blocks for path in arguments.folder.iterdir())
    free = shutil.disk_usage(arguments.folder).free
    sys.stdout.write(
        f"{arguments.folder}: {size:,} bytes, of which {used:,} on the disk ({free:,} free)\n"
    )


if __name__ == "__main__":
    main()
