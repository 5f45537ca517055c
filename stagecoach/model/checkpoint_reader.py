"""The safetensors files of a checkpoint folder: which tensors there are, and parts of them.

Owns the index, the published spellings of a target's names, and the rules by which tensors are
passed over. Files are memory-mapped; only the asked-for part of a tensor is read. Knows no module.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor

from stagecoach.errors import CheckpointError
from stagecoach.json_file import read_json_object

TEXT_PREFIX = "language_model."
INDEX_NAME = "model.safetensors.index.json"

_SKIP_RULES: dict[str, tuple[str, ...]] = {
    "vision": ("vision_tower.", "mm_projector."),
    "multi-token prediction": ("mtp", "model.mtp"),
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


class StoredTensor(NamedTuple):
    """Where a tensor lies."""

    path: Path
    raw_name: str


class Naming(NamedTuple):
    """How the tensors of one kind of checkpoint are called."""

    rename: Callable[[str], str]  # a name in the files -> the one spelling that this engine uses
    skip_rules: Mapping[str, tuple[str, ...]]  # rule -> beginnings of the names it passes over


def target_naming(*, has_tied_head: bool) -> Naming:
    """Of a target model.

    Args:
        has_tied_head: an `lm_head.weight` in the files is passed over.
    """
    tied = {TIED_HEAD_RULE: ("lm_head.weight",)} if has_tied_head else {}
    return Naming(published_name, _SKIP_RULES | tied)


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
        self._open_path: Path | None = None
        self._open_file: Any = None
        for raw_name, path in _tensor_paths(folder).items():
            self._indexed.setdefault(path, set()).add(raw_name)
            self._file(raw_name, path)

    @property
    def stored(self) -> Mapping[str, StoredTensor]:
        """Name as this engine spells it -> where the tensor lies; skipped ones left out."""
        return self._stored

    @property
    def summary(self) -> str:
        """One line for the log: how many tensors there are, and how many each rule skipped."""
        rules = self._naming.skip_rules
        counts = ", ".join(f"{self.skipped[rule]} {rule}" for rule in rules if self.skipped[rule])
        return f"{self.folder}: {len(self._stored)} tensors; skipped: {counts or 'none'}"

    def shape_and_dtype(self, name: str) -> tuple[tuple[int, ...], str]:
        """Shape and safetensors dtype of a tensor ("BF16", "F32", "U8", ...)."""
        part = self._slice(name)
        return tuple(part.get_shape()), part.get_dtype()

    def read(self, name: str, region: tuple[slice, ...]) -> Tensor:
        """A part of a tensor in its stored dtype, one slice a dim."""
        try:
            return self._slice(name)[region] if region else self._slice(name)[...]
        except SafetensorError as error:
            raise self.error(name, f"cannot be read ({error})") from None

    def error(self, name: str, text: str) -> CheckpointError:
        """An error that names the file and the tensor."""
        stored = self._stored[name]
        return CheckpointError(f"{stored.path}: {stored.raw_name} {text}")

    def _slice(self, name: str) -> Any:
        stored = self._stored[name]
        if stored.path != self._open_path:
            self._open_file = _open(stored.path, f" (needed for {stored.raw_name})")
            self._open_path = stored.path
            self._check_shard(stored.path, set(self._open_file.keys()))
        return self._open_file.get_slice(stored.raw_name)

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
        for rule, beginnings in self._naming.skip_rules.items():
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
    for other, ours in _SPELLINGS:
        if name.endswith(other):
            return name.removesuffix(other) + ours
    return name


def name_list(names: list[str] | set[str]) -> str:
    """The first 20 names, and how many there are."""
    ordered = sorted(names)
    more = f", ... ({len(ordered)} in all)" if len(ordered) > 20 else f" ({len(ordered)})"
    return ", ".join(ordered[:20]) + more


def read_safetensors_header(path: Path) -> list[str]:
    """Names of the tensors in a file.

    Raises:
        CheckpointError: the file is missing, damaged or cut short.
    """
    with _open(path, "") as file:
        return list(file.keys())


def _tensor_paths(folder: Path) -> dict[str, Path]:
    """Raw name -> file, from the index or else from the files themselves."""
    index = folder / INDEX_NAME
    if index.is_file():
        weight_map = read_json_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(
            isinstance(file_name, str) for file_name in weight_map.values()
        ):
            raise CheckpointError(f"{index}: weight_map must map names of tensors to files")
        return {name: folder / file_name for name, file_name in weight_map.items()}
    paths: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name in read_safetensors_header(path):
            if name in paths:
                raise CheckpointError(f"{path}: {name} is also in {paths[name]}")
            paths[name] = path
    if not paths:
        raise CheckpointError(f"{folder}: no {INDEX_NAME} and no *.safetensors file")
    return paths


def _open(path: Path, purpose: str) -> Any:
    if not path.is_file():
        raise CheckpointError(f"{path}: missing shard{purpose}")
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: damaged or cut short{purpose} ({error})") from None
