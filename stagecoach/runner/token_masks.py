"""Grammars on the device: logits of tokens that a mask forbids become -inf.

Owns the unpacking of `TokenMasks` and which rows they are for. Knows no grammar.

A choice among logits that are masked before bias and penalties is the same as with the mask
behind them, since what is added to -inf, or scaled, stays -inf. Masked logits are for choices
only: log-probabilities are of the raw ones.

Dimensions: R sampled rows, C constrained rows among them, B bytes of a row, V vocabulary.
"""

import functools

import torch
from torch import Tensor
from torch.nn.functional import embedding

from stagecoach.runner.step_inputs import SampleInputs
from stagecoach.runner.transfer import to_device, upload
from stagecoach.schedule.step_plan import StepPlan


def constrained_rows(plan: StepPlan, inputs: SampleInputs) -> list[int]:
    """The sampled rows of the constrained segments, in the order of their masks."""
    return [
        first + place
        for index, first in zip(inputs.segments, inputs.first_rows, strict=True)
        if plan.segments[index].is_constrained
        for place in range(1 + plan.segments[index].num_draft_tokens)
    ]


def mask_logits(logits_RV: Tensor, rows: list[int], masks: bytes) -> Tensor:
    """A copy of the logits with -inf where a row's mask has a 0.

    Args:
        rows: the C rows that have a mask.
        masks: as in `TokenMasks`.
    """
    # Adding costs the same for any mask; choosing between two values is slower than the head.
    biases_CV = unpack_masks(masks, len(rows), logits_RV)
    if len(rows) == len(logits_RV):
        return biases_CV.add_(logits_RV)
    return logits_RV.index_add(0, upload(rows, torch.int64, logits_RV.device), biases_CV)


def unpack_masks(masks: bytes, num_rows: int, logits_RV: Tensor) -> Tensor:
    """Bit t of each row as what is added to the logit of t, 0 or -inf: [num_rows, V]."""
    vocab_size = logits_RV.shape[1]
    num_bytes = len(masks) // num_rows
    assert len(masks) == num_rows * num_bytes and 8 * num_bytes >= vocab_size, (
        f"{len(masks)} bytes of masks for {num_rows} rows of {vocab_size} tokens"
    )
    bytes_CB = torch.frombuffer(bytearray(masks), dtype=torch.uint8).view(num_rows, num_bytes)
    bytes_CB = to_device(bytes_CB, logits_RV.device).to(torch.int32)
    biases_CB8 = embedding(bytes_CB, _byte_biases(logits_RV.dtype, logits_RV.device))
    return biases_CB8.flatten(1)[:, :vocab_size]


@functools.cache
def _byte_biases(dtype: torch.dtype, device: torch.device) -> Tensor:
    """What each byte of a mask adds to its eight logits: [256, 8]."""
    bytes_N = torch.arange(256, device=device)
    is_allowed_N8 = (bytes_N[:, None] >> torch.arange(8, device=device)) & 1
    return torch.zeros(256, 8, dtype=dtype, device=device).masked_fill(
        is_allowed_N8 == 0, -torch.inf
    )
