"""Choices and acceptance wherever the tensors lie: the reference on CPU, Triton on a GPU."""

from torch import Tensor

from stagecoach.kernels.ragged import PackedGroup
from stagecoach.kernels.sampling import reference
from stagecoach.kernels.sampling.reference import Accepted, Choices, SamplingRows


def choose_tokens(
    logits_TV: Tensor,
    rows: SamplingRows,
    addend_TV: Tensor | None = None,
    out: Choices | None = None,
) -> Choices:
    """`reference.choose_tokens`: one token a row."""
    if logits_TV.is_cuda:
        from stagecoach.kernels.sampling import cuda

        return cuda.choose_tokens(logits_TV, rows, addend_TV, out)
    return reference.choose_tokens(logits_TV, rows, addend_TV, out)


def count_accepted(
    choices: Choices,
    token_ids_T: Tensor,
    group: PackedGroup,
    sampling_rows_B: Tensor,
    forced_accepts_B: Tensor,
    out: Accepted | None = None,
) -> Accepted:
    """`reference.count_accepted`: how many drafts of each window stand."""
    if token_ids_T.is_cuda:
        from stagecoach.kernels.sampling import cuda

        return cuda.count_accepted(
            choices, token_ids_T, group, sampling_rows_B, forced_accepts_B, out
        )
    return reference.count_accepted(
        choices, token_ids_T, group, sampling_rows_B, forced_accepts_B, out
    )
