"""Linear layers, embedding and output head, split over the tensor-parallel ranks of a stage.

Owns how a weight is split and where the ranks meet: a column split needs nothing, a row
split ends in a sum, the vocabulary in a sum (embedding) or a gather (head). Knows the ranks
only through `TensorParallel`.

Dimensions: T tokens, R rows, I inputs, O outputs, G projections, H hidden size, V vocabulary.
None of the published layers has a bias. Projections may be quantised by name; their inputs are
then quantised token by token, those of a row split over this rank's own columns.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from stagecoach.kernels.linear import float32_sums, grouped_linear, linear
from stagecoach.kernels.quantization import Fp8Weight, LinearWeight
from stagecoach.model.tensor_split import vocab_shard_size
from stagecoach.model.weight_slots import WeightScope


class TensorParallel(Protocol):
    """The ranks of one stage; every rank makes the same calls in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks; the argument may be overwritten, use what is returned."""

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """The ranks' tensors, of one shape, joined along `dim` in rank order."""

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Rank 0's tensor on every rank; the others give one of its shape and type."""


class SingleRank:
    """A stage of one rank."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        return tensor

    def broadcast(self, tensor: Tensor) -> Tensor:
        return tensor


class LinearPart(NamedTuple):
    """One output of a fused matrix: published projections of one width, side by side."""

    names: tuple[str, ...]
    width: int  # of each, on this rank
    is_split: bool  # by output rows; otherwise every rank computes all of it


class FusedLinear:
    """Projections that share an input, as one matrix product, or as two where some are E4M3."""

    def __init__(
        self, weights: WeightScope, num_inputs: int, parts: tuple[LinearPart, ...]
    ) -> None:
        spans: list[_Span] = []
        widths = {False: 0, True: 0}  # of both products
        for number, part in enumerate(parts):
            for name in part.names:
                is_fp8 = weights.becomes_fp8(f"{name}.weight")
                end = widths[is_fp8] + part.width
                spans.append(_Span(name, number, is_fp8, slice(widths[is_fp8], end)))
                widths[is_fp8] = end
        self._products: dict[bool, LinearWeight] = {}
        if widths[False]:
            self._products[False] = weights.matrix(widths[False], num_inputs)
        if widths[True]:
            self._products[True] = weights.fp8_matrix(widths[True], num_inputs)
        for span in spans:
            target = _rows(self._products[span.is_fp8], span.outputs)
            split_dim = 0 if parts[span.part].is_split else None
            weights.bind(f"{span.name}.weight", target, split_dim=split_dim)
        self._sizes = [len(part.names) * part.width for part in parts]
        self._spans = tuple(spans) if len(self._products) > 1 else ()

    @property
    def weight_OI(self) -> LinearWeight:
        """Of all projections, where they are one product."""
        (weight_OI,) = self._products.values()
        return weight_OI

    @property
    def is_one_product(self) -> bool:
        return len(self._products) == 1

    def __call__(self, x_TI: Tensor) -> tuple[Tensor, ...]:
        """[T, I] -> one [T, O] for each part, in their order; views where a part is one product."""
        if not self._spans:
            return linear(x_TI, self.weight_OI).split_with_sizes(self._sizes, dim=-1)
        y_TO = {is_fp8: linear(x_TI, weight) for is_fp8, weight in self._products.items()}
        outputs = []
        for part in range(len(self._sizes)):
            spans = [span for span in self._spans if span.part == part]
            if len({span.is_fp8 for span in spans}) == 1:
                whole = slice(spans[0].outputs.start, spans[-1].outputs.stop)
                outputs.append(y_TO[spans[0].is_fp8][..., whole])
            else:
                outputs.append(
                    torch.cat([y_TO[span.is_fp8][..., span.outputs] for span in spans], dim=-1)
                )
        return tuple(outputs)


class _Span(NamedTuple):
    """Where the outputs of one projection of a FusedLinear are."""

    name: str
    part: int
    is_fp8: bool  # in which of the two products
    outputs: slice


class ColumnLinear:
    """One projection; with `is_split` each rank computes its share of the outputs."""

    def __init__(
        self, weights: WeightScope, name: str, sizes: tuple[int, int], *, is_split: bool
    ) -> None:
        self.weight_OI = _matrix(weights, (name,), sizes)
        weights.bind(f"{name}.weight", self.weight_OI, split_dim=0 if is_split else None)

    def __call__(self, x_TI: Tensor) -> Tensor:
        return linear(x_TI, self.weight_OI)


class GroupedLinear:
    """Projections of one size, each with an input of its own; each rank's share of the outputs."""

    def __init__(
        self, weights: WeightScope, names: tuple[str, ...], sizes: tuple[int, int]
    ) -> None:
        self.weight_GOI = _matrix(weights, names, (len(names), *sizes))
        for group, name in enumerate(names):
            weights.bind(f"{name}.weight", _rows(self.weight_GOI, group), split_dim=0)

    def __call__(self, x_TC: Tensor) -> Tensor:
        """[T, G * I], the inputs side by side -> [G, T, O]."""
        num_groups = self.weight_GOI.shape[0]
        return grouped_linear(x_TC.unflatten(-1, (num_groups, -1)), self.weight_GOI)


class RowLinear:
    """A projection whose inputs are split. The ranks' results are still to be summed."""

    def __init__(self, weights: WeightScope, name: str, sizes: tuple[int, int]) -> None:
        self.weight_OI = _matrix(weights, (name,), sizes)
        weights.bind(f"{name}.weight", self.weight_OI, split_dim=1)

    def __call__(self, x_TI: Tensor) -> Tensor:
        """[T, I of this rank] -> [T, O], this rank's addend."""
        return linear(x_TI, self.weight_OI)


def _matrix(weights: WeightScope, names: tuple[str, ...], sizes: tuple[int, ...]) -> LinearWeight:
    """E4M3 where that is chosen for every name."""
    if all(weights.becomes_fp8(f"{name}.weight") for name in names):
        return weights.fp8_matrix(*sizes)
    return weights.matrix(*sizes)


def _rows(weight: LinearWeight, index: int | slice) -> LinearWeight:
    return weight.part(index) if isinstance(weight, Fp8Weight) else weight[index]


class VocabShard:
    """This rank's rows of a [V, H] matrix; rows beyond the vocabulary are zero.

    Args:
        is_embedding: rows are looked up, so each lies in one piece; a head alone is a matrix
            like others.
    """

    def __init__(
        self, weights: WeightScope, name: str, sizes: tuple[int, int], *, is_embedding: bool
    ) -> None:
        vocab_size, hidden_size = sizes
        shard = vocab_shard_size(vocab_size, weights.tp_size)
        self.vocab_size = vocab_size
        self.start = min(vocab_size, shard * weights.tp_rank)
        self.num_rows = min(vocab_size, self.start + shard) - self.start
        allocate = weights.parameter if is_embedding else weights.matrix
        self.weight_VH = allocate(shard, hidden_size)
        weights.bind_region(
            f"{name}.weight",
            self.weight_VH[: self.num_rows],
            sizes,
            (slice(self.start, self.start + self.num_rows), slice(0, hidden_size)),
        )
        # Padded, so that all ranks gather one shape.
        weights.pad(self.weight_VH[self.num_rows :])


class VocabEmbedding:
    """Token ids to hidden rows."""

    def __init__(self, shard: VocabShard, tp: TensorParallel) -> None:
        self._shard = shard
        self._tp = tp

    def __call__(self, token_ids_T: Tensor) -> Tensor:
        """Integers [T] -> [T, H]; every id must lie in the vocabulary, nobody's tokens' too."""
        shard = self._shard
        if self._tp.size == 1:
            return functional.embedding(token_ids_T, shard.weight_VH)
        local_T = token_ids_T - shard.start
        is_here_T = (local_T >= 0) & (local_T < shard.num_rows)
        rows_TH = functional.embedding(local_T.where(is_here_T, 0), shard.weight_VH)
        # Not a product: the row that stands in for others may hold NaN.
        return self._tp.all_reduce(rows_TH.masked_fill_(~is_here_T[:, None], 0))


class VocabHead:
    """Hidden rows to logits over the whole vocabulary, on every rank."""

    def __init__(self, shard: VocabShard, tp: TensorParallel) -> None:
        self._shard = shard
        self._tp = tp

    def __call__(self, x_RH: Tensor) -> Tensor:
        """[R, H] -> [R, V], at least float32."""
        if x_RH.is_cuda:
            # Rounded to bfloat16, many of the best would be equal.
            sums_SRV = float32_sums(x_RH, self._shard.weight_VH)
            logits_RV = sums_SRV[0] if len(sums_SRV) == 1 else sums_SRV.sum(0)
        else:
            logits_RV = linear(x_RH, self._shard.weight_VH)
        if self._tp.size > 1:
            logits_RV = self._tp.all_gather(logits_RV, dim=-1)[:, : self._shard.vocab_size]
        return logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32))
