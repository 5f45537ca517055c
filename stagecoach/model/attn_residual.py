"""The residual stream between sublayers, and how a sublayer reads it.

Kimi-K3 replaces the residual stream by block attention residuals: every sublayer reads a
softmax mixture of the closed blocks' sums and the running sum of the open block. Kimi-Linear
keeps a plain running sum: the same classes with an empty bank and no mixing weights.

    block 0        block 1                 open block
    embedding | sum of layers 0..b-1 | ... | partial: sum of sublayers since the last close

The newest output is added by whoever reads the sum next, so that on a GPU the addition, the
mixture and the reader's norm are one kernel.

Dimensions: T tokens, B blocks, H hidden size.
"""

from typing import NamedTuple, Self

import torch
from torch import Tensor

from stagecoach.kernels.attn_res import mix, mix_rms_norm
from stagecoach.kernels.norm import add_rms_norm
from stagecoach.model.norm import RmsNorm
from stagecoach.model.weight_slots import WeightKind, WeightScope


class Pending(NamedTuple):
    """The running sum of the open block, which lacks the newest output."""

    partial_TH: Tensor
    addend_TH: Tensor | None  # None: nothing is left to add


class ResidualStream:
    """The sum of the open block, and the bank of closed blocks.

    A tensor that was read from here is never written again: the partial sum is replaced, and
    a bank row is filled once. So both may be on their way to another stage meanwhile.

    Attributes:
        taps: by id, [T, H] each: outputs for a drafter that this stage has made so far.
    """

    def __init__(self, hidden_TH: Tensor, bank_TBH: Tensor, capacity: int) -> None:
        """Start from a running sum and the blocks closed before it.

        Args:
            hidden_TH: embedding, or the running sum that the stage before handed over.
            bank_TBH: [T, closed blocks, H]; empty on the first stage.
            capacity: closed blocks at the end of the stage.
        """
        num_tokens, num_blocks, hidden_size = bank_TBH.shape
        assert num_blocks <= capacity, f"{num_blocks} blocks for a bank of {capacity}"
        self._partial_TH: Tensor | None = hidden_TH
        self._addend_TH: Tensor | None = None
        self._num_blocks = num_blocks
        self._storage_TBH = bank_TBH
        if num_blocks < capacity:
            self._storage_TBH = hidden_TH.new_empty(num_tokens, capacity, hidden_size)
            self._storage_TBH[:, :num_blocks] = bank_TBH
        self.taps: dict[int, Tensor] = {}

    @classmethod
    def from_embedding(cls, hidden_TH: Tensor, capacity: int) -> Self:
        """The stream before layer 0."""
        num_tokens, hidden_size = hidden_TH.shape
        return cls(hidden_TH, hidden_TH.new_empty(num_tokens, 0, hidden_size), capacity)

    @property
    def partial_TH(self) -> Tensor:
        """Running sum of the open block."""
        partial_TH, addend_TH = self.pending
        if addend_TH is not None:
            partial_TH = partial_TH + addend_TH
            self.settle(partial_TH)
        return partial_TH

    @property
    def pending(self) -> Pending:
        """The running sum in two parts: for a reader that adds them and calls `settle`."""
        assert self._partial_TH is not None, "the block was just closed and nothing added since"
        return Pending(self._partial_TH, self._addend_TH)

    def settle(self, sum_TH: Tensor) -> None:
        """`sum_TH` is the sum of what was pending."""
        self._partial_TH, self._addend_TH = sum_TH, None

    @property
    def bank_TBH(self) -> Tensor:
        """The closed blocks; contiguous once the bank is full, as it is at a stage's end."""
        return self._storage_TBH[:, : self._num_blocks]

    def close_block(self) -> None:
        """File the running sum as a block; the next `add` opens another."""
        self._storage_TBH[:, self._num_blocks] = self.partial_TH
        self._num_blocks += 1
        self._partial_TH = None

    def add(self, output_TH: Tensor) -> None:
        """Add a sublayer's output to the open block; it must not be written afterwards."""
        if self._partial_TH is None:
            self._partial_TH = output_TH
        else:
            self.settle(self.partial_TH)
            self._addend_TH = output_TH


class ResidualRead:
    """How one sublayer reads the stream.

    With mixing: softmax over the blocks of <block, w_norm * w_proj> / rms(block), applied to
    the raw blocks (block attention residuals of the Kimi-K3 reference code; `kernels/attn_res`).
    """

    def __init__(
        self, weights: WeightScope, name: str, hidden_size: int, eps: float, *, has_mixing: bool
    ) -> None:
        self._eps = eps
        self._has_mixing = has_mixing
        self._key_weight_H: Tensor | None = None
        if has_mixing:
            self._norm_H = weights.parameter(hidden_size)
            self._proj_1H = weights.parameter(1, hidden_size)
            weights.bind(f"{name}_norm.weight", self._norm_H, WeightKind.NORM)
            weights.bind(f"{name}_proj.weight", self._proj_1H)

    def prepare(self) -> None:
        """Only the product of the two weights is ever used."""
        if self._has_mixing:
            dtype = torch.promote_types(self._norm_H.dtype, torch.float32)
            self._key_weight_H = self._norm_H.to(dtype) * self._proj_1H[0].to(dtype)

    def __call__(self, stream: ResidualStream) -> Tensor:
        """[T, H], the sublayer's input before its norm."""
        return self.mix(stream.bank_TBH, stream.partial_TH)

    def normed(self, stream: ResidualStream, norm: RmsNorm) -> Tensor:
        """[T, H], the sublayer's input: what `norm` makes of this read."""
        return self._read(stream, norm, keeps_mixed=False)[1]

    def both(self, stream: ResidualStream, norm: RmsNorm) -> tuple[Tensor, Tensor]:
        """This read before its norm and after it, [T, H] each."""
        mixed_TH, normed_TH = self._read(stream, norm, keeps_mixed=True)
        assert mixed_TH is not None, "the mixture was asked for"
        return mixed_TH, normed_TH

    def normed_rows(self, bank_TBH: Tensor, partial_TH: Tensor, norm: RmsNorm) -> Tensor:
        """`normed` for chosen rows: [R, B, H] and [R, H] -> [R, H]."""
        if self._key_weight_H is None:
            return norm(partial_TH)
        return mix_rms_norm(
            bank_TBH, partial_TH, None, self._key_weight_H, norm.weight_H, self._eps
        ).normed_TH

    def mix(self, bank_TBH: Tensor, partial_TH: Tensor) -> Tensor:
        """[T, B, H] and [T, H] -> [T, H], before the norm."""
        if self._key_weight_H is None:
            return partial_TH
        return mix(bank_TBH, partial_TH, self._key_weight_H, self._eps)

    def _read(
        self, stream: ResidualStream, norm: RmsNorm, *, keeps_mixed: bool
    ) -> tuple[Tensor | None, Tensor]:
        assert norm.eps == self._eps, "one eps for both norms"
        partial_TH, addend_TH = stream.pending
        if self._key_weight_H is None:
            if addend_TH is None:
                return partial_TH, norm(partial_TH)
            sum_TH, normed_TH = add_rms_norm(partial_TH, addend_TH, norm.weight_H, norm.eps)
            stream.settle(sum_TH)
            return sum_TH, normed_TH
        mixed = mix_rms_norm(
            stream.bank_TBH,
            partial_TH,
            addend_TH,
            self._key_weight_H,
            norm.weight_H,
            self._eps,
            keeps_mixed=keeps_mixed,
        )
        stream.settle(mixed.sum_TH)
        return mixed.mixed_TH, mixed.normed_TH
