"""The safetensors files of a checkpoint folder: which tensors there are, and parts of them.

Owns the index, the published spellings of a target's names, and the rules by which tensors are
passed over. Only the asked-for part of a tensor is read, by as many threads as ask. Knows no
module.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from stagecoach.errors import CheckpointError
from stagecoach.json_file import read_json_object
from stagecoach.model.shard_file import ShardFile, StoredExtent, WantedPart, read_names

TEXT_PREFIX = "language_model."
INDEX_NAME = "model.safetensors.index.json"

_PREDICTION_RULE = "multi-token prediction"
# Joins the hidden state and the next token's embedding: no decoder layer has it.
_PREDICTION_MARK = "eh_proj.weight"
_SKIP_RULES: dict[str, tuple[str, ...]] = {
    "vision": ("vision_tower.", "mm_projector."),
    _PREDICTION_RULE: ("mtp", "model.mtp"),
}
TIED_HEAD_RULE = "tied output head"

# Alternative spellings in published checkpoints, and of dense layers that transformers saved.
_SPELLINGS = (
    ("_res.proj_weight", "_res_proj.weight"),
    ("_res.norm_weight", "_res_norm.weight"),
    ("output_attn_res.proj_weight", "output_attn_res_proj.weight"),
    ("output_attn_res.norm_weight", "output_attn_res_norm.weight"),
    *(
        (f"block_sparse_moe.{part}_proj.weight", f"mlp.{part}_proj.weight")
        for part in ("gate", "up", "down")
    ),
    ("block_sparse_moe.e_score_correction_bias", "block_sparse_moe.gate.e_score_correction_bias"),
)
_OTHER_ENDINGS = tuple(other for other, _ in _SPELLINGS)


class StoredTensor(NamedTuple):
    """Where a tensor lies."""

    path: Path
    raw_name: str


class Naming(NamedTuple):
    """How the tensors of one kind of checkpoint are called."""

    rename: Callable[[str], str]  # a name in the files -> the one spelling that this engine uses
    skip_rules: Mapping[str, tuple[str, ...]]  # rule -> beginnings of the names it passes over
    # Beginning of the names of a layer behind the last: passed over if it predicts a further token.
    extra_layer: str | None = None


def target_naming(*, has_tied_head: bool, num_layers: int | None = None) -> Naming:
    """Of a target model.

    Args:
        has_tied_head: an `lm_head.weight` in the files is passed over.
        num_layers: of the model. Where the files have one layer more, with the projection that
            makes it a multi-token prediction, its tensors are passed over.
    """
    tied = {TIED_HEAD_RULE: ("lm_head.weight",)} if has_tied_head else {}
    extra_layer = None if num_layers is None else f"model.layers.{num_layers}."
    return Naming(published_name, _SKIP_RULES | tied, extra_layer)


class CheckpointReader:
    """Names of a checkpoint, and reads of parts of its tensors.

    Args:
        folder: holds `model.safetensors.index.json` and its shards, or one or more
            `*.safetensors` files without an index.
        naming: of the kind of checkpoint.

    Raises:
        CheckpointError: no files, a missing or damaged shard, an index and a shard that
            disagree, or one tensor under two names.
    """

    def __init__(self, folder: Path, naming: Naming) -> None:
        self.folder = folder
        self._naming = naming
        self.skipped: Counter[str] = Counter()
        self._stored: dict[str, StoredTensor] = {}
        self._indexed: dict[Path, set[str]] = {}
        self._files: dict[Path, ShardFile] = {}
        self._opening = threading.Lock()
        paths = _tensor_paths(folder)
        self._skip_rules = _skip_rules(naming, paths)
        for raw_name, path in paths.items():
            self._indexed.setdefault(path, set()).add(raw_name)
            self._file(raw_name, path)

    @property
    def stored(self) -> Mapping[str, StoredTensor]:
        """Name as this engine spells it -> where the tensor lies; skipped ones left out."""
        return self._stored

    @property
    def summary(self) -> str:
        """One line for the log: how many tensors there are, and how many each rule skipped."""
        rules = self._skip_rules
        counts = ", ".join(f"{self.skipped[rule]} {rule}" for rule in rules if self.skipped[rule])
        return f"{self.folder}: {len(self._stored)} tensors; skipped: {counts or 'none'}"

    @property
    def paths(self) -> tuple[Path, ...]:
        """Every file of the checkpoint, those that hold nothing but skipped tensors too."""
        return tuple(sorted(self._indexed))

    def shape_and_dtype(self, name: str) -> tuple[tuple[int, ...], str]:
        """Shape and safetensors dtype of a tensor ("BF16", "F32", "U8", ...)."""
        extent = self.extent(name)
        return extent.shape, extent.dtype

    def extent(self, name: str) -> StoredExtent:
        """What the header of its file says of a tensor."""
        stored = self._stored[name]
        return self._open(stored).tensors[stored.raw_name]

    def read(self, name: str, region: tuple[slice, ...], into: Tensor | None = None) -> Tensor:
        """As `read_parts`, of one part."""
        return self.read_parts([WantedPart(name, region, into)])[0]

    def read_parts(self, wanted: Sequence[WantedPart]) -> list[Tensor]:
        """Parts of tensors in their stored dtypes, contiguous, as `ShardFile.read_parts`."""
        tensors: list[Tensor] = []
        for path, parts in groupby(wanted, key=lambda part: self._stored[part.name].path):
            named = [part._replace(name=self._stored[part.name].raw_name) for part in parts]
            tensors += self._open(StoredTensor(path, named[0].name)).read_parts(named)
        return tensors

    def open_all(self) -> list[ShardFile]:
        """Every file of the checkpoint, with headers that agree with the index."""
        return [self._open(StoredTensor(path, min(self._indexed[path]))) for path in self.paths]

    def error(self, name: str, text: str) -> CheckpointError:
        """An error that names the file and the tensor."""
        stored = self._stored[name]
        return CheckpointError(f"{stored.path}: {stored.raw_name} {text}")

    def _open(self, stored: StoredTensor) -> ShardFile:
        """Once for all threads."""
        file = self._files.get(stored.path)
        if file is None:
            with self._opening:
                file = self._files.get(stored.path)
                if file is None:
                    file = ShardFile(stored.path, f" (needed for {stored.raw_name})")
                    self._check_shard(stored.path, set(file.tensors))
                    self._files[stored.path] = file
        return file

    def _check_shard(self, path: Path, in_shard: set[str]) -> None:
        indexed = self._indexed[path]
        if lacking := indexed - in_shard:
            raise CheckpointError(
                f"{path}: lacks tensors that {INDEX_NAME} places there: {name_list(lacking)}"
            )
        if unlisted := in_shard - indexed:
            raise CheckpointError(
                f"{path}: holds tensors that {INDEX_NAME} does not list: {name_list(unlisted)}"
            )

    def _file(self, raw_name: str, path: Path) -> None:
        name = self._naming.rename(raw_name)
        for rule, beginnings in self._skip_rules.items():
            if name.startswith(beginnings):
                self.skipped[rule] += 1
                return
        if name in self._stored:
            raise CheckpointError(
                f"{path}: {raw_name} and {self._stored[name].raw_name} are the same tensor {name}"
            )
        self._stored[name] = StoredTensor(path, raw_name)


def published_name(raw_name: str) -> str:
    """The one spelling that this engine uses: no text prefix, `_res_proj.weight` and so on."""
    name = raw_name.removeprefix(TEXT_PREFIX)
    if not name.endswith(_OTHER_ENDINGS):
        return name
    for other, ours in _SPELLINGS:
        if name.endswith(other):
            return name.removesuffix(other) + ours
    return name


def name_list(names: list[str] | set[str], most: int = 20) -> str:
    """The first names, and how many there are."""
    ordered = sorted(names)
    more = f", ... ({len(ordered)} in all)" if len(ordered) > most else f" ({len(ordered)})"
    return ", ".join(ordered[:most]) + more


def _skip_rules(naming: Naming, raw_names: Iterable[str]) -> Mapping[str, tuple[str, ...]]:
    """Those that hold for a checkpoint of these names."""
    extra = naming.extra_layer
    if extra is None or extra + _PREDICTION_MARK not in set(map(naming.rename, raw_names)):
        return naming.skip_rules
    beginnings = naming.skip_rules.get(_PREDICTION_RULE, ())
    return {**naming.skip_rules, _PREDICTION_RULE: (*beginnings, extra)}


def _tensor_paths(folder: Path) -> dict[str, Path]:
    """Raw name -> file, from the index or else from the files themselves."""
    index = folder / INDEX_NAME
    if index.is_file():
        weight_map = read_json_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(
            isinstance(file_name, str) for file_name in weight_map.values()
        ):
            raise CheckpointError(f"{index}: weight_map must map names of tensors to files")
        if not weight_map:
            raise CheckpointError(f"{index}: weight_map names no tensor")
        for name, file_name in weight_map.items():
            path = Path(file_name)
            if path.is_absolute() or ".." in path.parts or not path.parts:
                raise CheckpointError(
                    f"{index}: weight_map places {name} in {file_name!r}, outside the folder"
                )
        files = {file_name: folder / file_name for file_name in set(weight_map.values())}
        return {name: files[file_name] for name, file_name in weight_map.items()}
    paths: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name in read_names(path):
            if name in paths:
                raise CheckpointError(f"{path}: {name} is also in {paths[name]}")
            paths[name] = path
    if not paths:
        raise CheckpointError(f"{folder}: no {INDEX_NAME} and no *.safetensors file")
    return paths
