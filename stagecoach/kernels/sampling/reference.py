"""Tokens and accepted drafts of flat rows in plain PyTorch: the specification, and on CPU the code.

Owns the choice of rows that have a temperature and nothing else, as an accelerator makes it
for a whole step at once; all other parameters, and the order in which they act, are those of
`runner/sampler.py`, which says the same of such rows. The acceptance rule is that of
`schedule/verify_window.py`.

Dimensions: T rows of logits, V vocabulary, B segments, N rows of the sampling table.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from stagecoach.kernels.ragged import PackedGroup
from stagecoach.kernels.sampling.noise import gumbel_noise


class SamplingRows(NamedTuple):
    """Whose token each row of logits chooses, and by what."""

    sampling_rows_B: Tensor  # int32, row of the sampling table; -1: nothing is chosen
    segment_T: Tensor | None  # int32, segment of each row, -1: none; None: row b is segment b's
    positions_T: Tensor  # int32 or int64
    position_offset: int  # the token that is chosen stands so far behind `positions_T`
    temperatures_N: Tensor  # floating, any stride; 0: greedy
    seeds_N: Tensor  # int64


class Choices(NamedTuple):
    """One token a row; 0 where nothing is chosen."""

    token_ids_T: Tensor  # int32, in the vocabulary whatever the logits are
    is_finite_T: Tensor  # int32, 0 where a logit is NaN or infinite


class Accepted(NamedTuple):
    """What the windows of a step say; 0 for segments that do not sample."""

    num_accepted_B: Tensor  # int32
    is_finite_B: Tensor  # int32, of the rows that count; 1 for segments that do not sample
    newest_2B: Tensor  # int32, id and position of the newest token


def choose_tokens(
    logits_TV: Tensor,
    rows: SamplingRows,
    addend_TV: Tensor | None = None,
    out: Choices | None = None,
) -> Choices:
    """Greedy, or the argmax of logits / temperature plus the noise of seed and position.

    Among equal values the lowest id wins.

    Args:
        logits_TV: any floating type; computed in float64 if it is that, else in float32.
        rows: what each row goes by.
        addend_TV: added to the logits first.
        out: where the choices go; new tensors without it.
    """
    dtype = torch.promote_types(logits_TV.dtype, torch.float32)
    values_TV = logits_TV.to(dtype)
    if addend_TV is not None:
        values_TV = values_TV + addend_TV
    table_rows_T = _table_rows(rows, len(values_TV))
    is_chosen_T = table_rows_T >= 0
    rows_T = table_rows_T.clamp_min(0)
    temperatures_T = rows.temperatures_N[rows_T]
    # Relative to the greatest logit, so that no temperature overflows.
    scaled_TV = values_TV - values_TV.amax(-1, keepdim=True)
    scaled_TV /= temperatures_T.to(dtype).clamp_min(torch.finfo(dtype).tiny).unsqueeze(1)
    positions_T = rows.positions_T.to(torch.int64) + rows.position_offset
    noise_TV = gumbel_noise(rows.seeds_N[rows_T], positions_T, values_TV.shape[1], values_TV.device)
    token_ids_T = torch.where(
        temperatures_T > 0, (noise_TV + scaled_TV).argmax(-1), values_TV.argmax(-1)
    )
    is_finite_T = values_TV.isfinite().all(-1) | ~is_chosen_T
    return _stored(
        Choices(token_ids_T.where(is_chosen_T, 0).to(torch.int32), is_finite_T.to(torch.int32)),
        out,
    )


def count_accepted(
    choices: Choices,
    token_ids_T: Tensor,
    group: PackedGroup,
    sampling_rows_B: Tensor,
    forced_accepts_B: Tensor,
    out: Accepted | None = None,
) -> Accepted:
    """How many drafts of each window stand: the longest prefix that equals the choices.

    Args:
        choices: of the tokens of the group. Those in front of a forced draft become the draft.
        token_ids_T: int32, the plan's.
        group: windows.
        sampling_rows_B: int32; -1: the segment does not sample.
        forced_accepts_B: int32, how many stand whatever the choices are, at most all; -1: as
            the choices say.
        out: where the answer goes; new tensors without it.
    """
    num_segments = group.num_segments
    answer = Accepted(
        sampling_rows_B.new_zeros(num_segments, dtype=torch.int32),
        sampling_rows_B.new_ones(num_segments, dtype=torch.int32),
        sampling_rows_B.new_zeros(2, num_segments, dtype=torch.int32),
    )
    for segment in range(num_segments):
        if int(sampling_rows_B[segment]) < 0:
            continue
        first = int(group.offsets_S[segment])
        num_drafts = int(group.num_drafts_B[segment])
        drafts_J = token_ids_T[first + 1 : first + 1 + num_drafts]
        chosen_W = choices.token_ids_T[first : first + 1 + num_drafts]
        forced = int(forced_accepts_B[segment])
        if forced >= 0:
            num_accepted = min(forced, num_drafts)
            chosen_W[:num_accepted] = drafts_J[:num_accepted]
        else:
            num_accepted = int((chosen_W[:num_drafts] == drafts_J).int().cumprod(0).sum())
        is_finite_W = choices.is_finite_T[first : first + 1 + num_accepted]
        answer.num_accepted_B[segment] = num_accepted
        answer.is_finite_B[segment] = is_finite_W.min()
        answer.newest_2B[0, segment] = chosen_W[num_accepted]
        answer.newest_2B[1, segment] = group.starts_B[segment] + 1 + num_accepted
    if out is None:
        return answer
    for target, source in zip(out, answer, strict=True):
        target.copy_(source)
    return out


def _table_rows(rows: SamplingRows, num_rows: int) -> Tensor:
    """int64 [T]; -1 where nothing is chosen."""
    table_rows_B = rows.sampling_rows_B.to(torch.int64)
    if rows.segment_T is None:
        return table_rows_B[:num_rows]
    segment_T = rows.segment_T.to(torch.int64)
    return table_rows_B[segment_T.clamp_min(0)].where(segment_T >= 0, -1)


def _stored(choices: Choices, out: Choices | None) -> Choices:
    if out is None:
        return choices
    for target, source in zip(out, choices, strict=True):
        target.copy_(source)
    return out
