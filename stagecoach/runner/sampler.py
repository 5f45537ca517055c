"""Logits to tokens; with `noise`, the one home of randomness.

Owns the order in which parameters act and the choice itself. A choice is a pure function of
(logits, parameters, tokens so far, seed, position): what else is in the batch never matters,
because each step below is decided and computed row by row.

    raw logits -> logprobs
               -> logit_bias -> min_tokens -> penalties          (edits)
               -> masks of grammars                              (token_masks.py)
               -> / temperature -> min_p -> top_k -> top_p       (cuts)
               -> argmax of what is left + Gumbel noise

The argmax of log-probabilities plus independent Gumbel noise is distributed as the softmax
(Gumbel 1954; Maddison et al., "A* sampling", NeurIPS 2014, §2). Equal values are ordered by
token id throughout: the lowest id wins a greedy tie, and cuts keep lower ids first.

Dimensions: R rows, Q the random rows among them, V vocabulary, K candidates of a row,
J pending tokens of a row.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stagecoach.kernels.sampling import SamplingRows
from stagecoach.kernels.sampling import choose_tokens as choose_rows
from stagecoach.kernels.sampling.noise import gumbel_noise, gumbel_noise_at
from stagecoach.runner.logprobs import TopTokens, as_float, top_tokens
from stagecoach.runner.sampling_table import Parameter, PendingTokens, RowTraits, SamplingTable
from stagecoach.runner.transfer import upload

# top_p looks this far down the ranking first, and further only where that mass is not enough.
_FIRST_LOOK = 128


def choose_tokens(
    logits_RV: Tensor,
    rows: Sequence[int],
    positions_R: Tensor,
    table: SamplingTable,
    pending: PendingTokens | None = None,
    noise_RV: Tensor | None = None,
) -> Tensor:
    """Choose the token of each row: int64 [R]. The table is not changed.

    Several rows may belong to one request, as in a verify window; its later rows then hold in
    `pending` the tokens before them that the table has not been told of, and are right only if
    those tokens become output.

    Args:
        logits_RV: any floating type; float64 is computed in float64, all else in float32.
        rows: table row of each logits row.
        positions_R: int64, index, within its request, of the token being chosen.
        pending: for each row, output tokens that `table.append` has not seen; penalties
            count them.
        noise_RV: Gumbel noise in place of the target's own at these positions.
    """
    traits = [table.traits(row) for row in rows]
    if all(item.is_plain for item in traits):
        return logits_RV.argmax(-1)
    edited_RV = _edit(as_float(logits_RV), rows, positions_R, table, pending)
    random = [index for index, item in enumerate(traits) if not item.is_greedy]
    if not random:
        return edited_RV.argmax(-1)
    draw = _draw(edited_RV, rows, positions_R, table, noise_RV).pick(random)
    token_ids_Q = torch.empty_like(draw.positions_Q)
    for shortlist in _shortlists(draw):
        token_ids_Q[_index(shortlist.indices, table)] = _noisy_argmax(shortlist)
    if len(random) == len(rows):
        return token_ids_Q
    token_ids_R = edited_RV.argmax(-1)
    token_ids_R[_index(random, table)] = token_ids_Q
    return token_ids_R


def probabilities(
    logits_RV: Tensor,
    rows: Sequence[int],
    positions_R: Tensor,
    table: SamplingTable,
    pending: PendingTokens | None = None,
) -> Tensor:
    """The distribution that `choose_tokens` draws each row from: [R, V], of the type it
    computes in. That of a greedy row is its one token.

    Args: as for `choose_tokens`.
    """
    traits = [table.traits(row) for row in rows]
    edited_RV = _edit(as_float(logits_RV), rows, positions_R, table, pending)
    p_RV = torch.zeros_like(edited_RV).scatter_(-1, edited_RV.argmax(-1, keepdim=True), 1.0)
    random = [index for index, item in enumerate(traits) if not item.is_greedy]
    if not random:
        return p_RV
    draw = _draw(edited_RV, rows, positions_R, table).pick(random)
    p_QV = torch.empty_like(draw.logits_QV)
    for shortlist in _shortlists(draw):
        p_QK = shortlist.values_QK.softmax(-1)
        if shortlist.token_ids_QK is not None:
            p_QK = torch.zeros_like(shortlist.draw.logits_QV).scatter_(
                -1, shortlist.token_ids_QK, p_QK
            )
        p_QV[_index(shortlist.indices, table)] = p_QK
    p_RV[_index(random, table)] = p_QV
    return p_RV


def _edit(
    logits_RV: Tensor,
    rows: Sequence[int],
    positions_R: Tensor,
    table: SamplingTable,
    pending: PendingTokens | None,
) -> Tensor:
    """Apply bias, min_tokens and penalties; a copy if any row needs one."""
    traits = [table.traits(row) for row in rows]
    biased = [(index, item.bias) for index, item in enumerate(traits) if item.bias is not None]
    blocked = [index for index, item in enumerate(traits) if item.blocked_ids]
    penalised = [index for index, item in enumerate(traits) if item.has_penalties]
    if not (biased or blocked or penalised):
        return logits_RV
    edited_RV = logits_RV.clone()
    for index, (token_ids, values) in biased:
        edited_RV[index, token_ids] += values.to(edited_RV.dtype)
    if blocked:
        _block_ends(edited_RV, blocked, traits, positions_R)
    if penalised:
        rows_P = _index([rows[index] for index in penalised], table)
        indices_P = _index(penalised, table)
        counts_PV = table.output_counts(rows_P)
        if pending is not None:
            token_ids_PJ, is_real_PJ = pending.pick(indices_P)
            counts_PV.scatter_add_(-1, token_ids_PJ, is_real_PJ.to(counts_PV.dtype))
        edited_RV[indices_P] = _penalise(
            edited_RV[indices_P],
            counts_PV,
            table.is_in_prompt(rows_P),
            table.parameters_NP[rows_P].to(edited_RV.dtype),
        )
    return edited_RV


def _block_ends(
    edited_RV: Tensor, blocked: list[int], traits: list[RowTraits], positions_R: Tensor
) -> None:
    """Make ends impossible, in place, where `min_tokens` outputs do not exist yet."""
    places = [
        (index, traits[index].blocked_before, token_id)
        for index in blocked
        for token_id in traits[index].blocked_ids
    ]
    rows_B, before_B, ids_B = upload(places, torch.int64, edited_RV.device).unbind(-1)
    is_early_B = positions_R[rows_B] < before_B
    edited_RV[rows_B, ids_B] = edited_RV[rows_B, ids_B].masked_fill(is_early_B, -torch.inf)


def _penalise(
    logits_PV: Tensor, counts_PV: Tensor, is_in_prompt_PV: Tensor, parameters_P: Tensor
) -> Tensor:
    """Repetition penalty on prompt and output (Keskar et al., "CTRL", 2019, §4.1), then
    frequency and presence penalties on the output (OpenAI API reference)."""
    is_in_output_PV = counts_PV > 0
    repetition_P1 = _column(parameters_P, Parameter.REPETITION_PENALTY)
    repeated_PV = torch.where(logits_PV > 0, logits_PV / repetition_P1, logits_PV * repetition_P1)
    logits_PV = torch.where(is_in_output_PV | is_in_prompt_PV, repeated_PV, logits_PV)
    logits_PV -= _column(parameters_P, Parameter.FREQUENCY_PENALTY) * counts_PV
    logits_PV -= _column(parameters_P, Parameter.PRESENCE_PENALTY) * is_in_output_PV
    return logits_PV


class _Draw(NamedTuple):
    """Rows that are sampled with noise."""

    logits_QV: Tensor
    parameters_QP: Tensor
    seeds_Q: Tensor
    positions_Q: Tensor
    noise_QV: Tensor | None  # None: the target's own, made where it is needed
    traits: list[RowTraits]

    def pick(self, indices: list[int]) -> "_Draw":
        """Some of its rows, in ascending order."""
        if len(indices) == len(self.traits):
            return self
        indices_Q = upload(indices, torch.int64, self.logits_QV.device)
        return _Draw(
            logits_QV=self.logits_QV[indices_Q],
            parameters_QP=self.parameters_QP[indices_Q],
            seeds_Q=self.seeds_Q[indices_Q],
            positions_Q=self.positions_Q[indices_Q],
            noise_QV=None if self.noise_QV is None else self.noise_QV[indices_Q],
            traits=[self.traits[index] for index in indices],
        )


class _Shortlist(NamedTuple):
    """What the cuts left of some rows of a draw."""

    indices: list[int]  # which rows of the draw
    draw: _Draw  # those rows
    values_QK: Tensor  # log-probabilities but for a constant, -inf where cut
    token_ids_QK: Tensor | None  # None: the whole vocabulary in its order


def _draw(
    edited_RV: Tensor,
    rows: Sequence[int],
    positions_R: Tensor,
    table: SamplingTable,
    noise_RV: Tensor | None = None,
) -> _Draw:
    rows_R = _index(rows, table)
    return _Draw(
        logits_QV=edited_RV,
        parameters_QP=table.parameters_NP[rows_R],
        seeds_Q=table.seeds_N[rows_R],
        positions_Q=positions_R,
        noise_QV=noise_RV,
        traits=[table.traits(row) for row in rows],
    )


def _shortlists(draw: _Draw) -> Iterator[_Shortlist]:
    """What the cuts leave of every row; of several with one row the last is right."""
    # Relative to the greatest logit, so that no temperature overflows.
    scaled_QV = draw.logits_QV - draw.logits_QV.amax(-1, keepdim=True)
    dtype = scaled_QV.dtype
    temperature_Q1 = _column(draw.parameters_QP, Parameter.TEMPERATURE).to(dtype)
    scaled_QV /= temperature_Q1.clamp_min(torch.finfo(dtype).tiny)
    if any(item.has_min_p for item in draw.traits):
        log_min_p_Q1 = _column(draw.parameters_QP, Parameter.LOG_MIN_P).to(dtype)
        scaled_QV.masked_fill_(scaled_QV < log_min_p_Q1, -torch.inf)
    scaled = draw._replace(logits_QV=scaled_QV)

    # Each row's way depends on its own parameters only.
    by_top_k = [index for index, item in enumerate(draw.traits) if item.top_k is not None]
    by_top_p = [
        index for index, item in enumerate(draw.traits) if item.top_k is None and item.has_top_p
    ]
    uncut = [
        index for index, item in enumerate(draw.traits) if item.top_k is None and not item.has_top_p
    ]
    if by_top_k:
        yield _cut_by_top_k(by_top_k, scaled.pick(by_top_k))
    if by_top_p:
        yield from _cut_by_top_p(by_top_p, scaled.pick(by_top_p))
    if uncut:
        part = scaled.pick(uncut)
        yield _Shortlist(uncut, part, part.logits_QV, None)


def _cut_by_top_k(indices: list[int], draw: _Draw) -> _Shortlist:
    top_k = [item.top_k for item in draw.traits if item.top_k is not None]
    best = top_tokens(draw.logits_QV, max(top_k))
    top_k_Q1 = upload(top_k, torch.int64, best.values_RK.device).unsqueeze(-1)
    ranks_K = torch.arange(max(top_k), device=top_k_Q1.device)
    best = best._replace(values_RK=best.values_RK.masked_fill(ranks_K >= top_k_Q1, -torch.inf))
    mass_QK = best.values_RK.to(torch.float64).exp().cumsum(-1)
    return _cut_by_mass(indices, draw, best, mass_QK, total_Q1=mass_QK[:, -1:])


def _cut_by_top_p(indices: list[int], draw: _Draw, look: int = _FIRST_LOOK) -> Iterator[_Shortlist]:
    vocab_size = draw.logits_QV.shape[-1]
    look = min(look, vocab_size)
    # cumsum, not sum: its order of addition does not depend on the number of rows.
    total_Q1 = draw.logits_QV.to(torch.float64).exp().cumsum(-1)[:, -1:]
    best = top_tokens(draw.logits_QV, look)
    mass_QK = best.values_RK.to(torch.float64).exp().cumsum(-1)
    yield _cut_by_mass(indices, draw, best, mass_QK, total_Q1)
    if look == vocab_size:
        return
    is_short_Q1 = mass_QK[:, -1:] < _column(draw.parameters_QP, Parameter.TOP_P) * total_Q1
    short = is_short_Q1.squeeze(-1).nonzero().squeeze(-1).tolist()
    if short:
        yield from _cut_by_top_p([indices[row] for row in short], draw.pick(short), 4 * look)


def _cut_by_mass(
    indices: list[int], draw: _Draw, best: TopTokens, mass_QK: Tensor, total_Q1: Tensor
) -> _Shortlist:
    """Keep the fewest of the best whose mass reaches top_p.

    Args:
        mass_QK: float64, inclusive running sum of the unnormalised probabilities.
        total_Q1: float64, what it runs up to.
    """
    top_p_Q1 = _column(draw.parameters_QP, Parameter.TOP_P)
    # The best stays whatever rounding, or a NaN, does to the sums.
    is_cut_QK = torch.zeros_like(mass_QK, dtype=torch.bool)
    is_cut_QK[:, 1:] = (mass_QK[:, :-1] >= top_p_Q1 * total_Q1) & (top_p_Q1 < 1.0)
    values_QK = best.values_RK.masked_fill(is_cut_QK, -torch.inf)
    return _Shortlist(indices, draw, values_QK, best.token_ids_RK)


def _noisy_argmax(shortlist: _Shortlist) -> Tensor:
    """Tokens of a shortlist's rows: int64 [Q]."""
    draw, values_QK, token_ids_QK = shortlist.draw, shortlist.values_QK, shortlist.token_ids_QK
    vocab_size = draw.logits_QV.shape[-1]
    noise_QV = draw.noise_QV
    is_sparse = token_ids_QK is not None and 4 * values_QK.shape[-1] < vocab_size
    if noise_QV is None and token_ids_QK is None and values_QK.is_cuda:
        return _draw_on_device(draw, values_QK)
    if noise_QV is None and not is_sparse:
        noise_QV = gumbel_noise(draw.seeds_Q, draw.positions_Q, vocab_size, values_QK.device)
    if token_ids_QK is None:
        assert noise_QV is not None
        return (noise_QV + values_QK).argmax(-1)
    if noise_QV is None:
        noise_QK = gumbel_noise_at(draw.seeds_Q, draw.positions_Q, token_ids_QK)
    else:
        noise_QK = noise_QV.gather(-1, token_ids_QK)
    chosen_Q1 = (noise_QK + values_QK).argmax(-1, keepdim=True)
    return token_ids_QK.gather(-1, chosen_Q1).squeeze(-1)


def _draw_on_device(draw: _Draw, values_QV: Tensor) -> Tensor:
    """The same in one pass: the greatest value of a row is 0, so that nothing is scaled anew."""
    num_rows, device = len(values_QV), values_QV.device
    rows = SamplingRows(
        sampling_rows_B=torch.arange(num_rows, dtype=torch.int32, device=device),
        segment_T=None,
        positions_T=draw.positions_Q,
        position_offset=0,
        temperatures_N=torch.ones(num_rows, device=device),
        seeds_N=draw.seeds_Q,
    )
    return choose_rows(values_QV, rows).token_ids_T.to(torch.int64)


def _column(parameters_QP: Tensor, parameter: Parameter) -> Tensor:
    return parameters_QP[:, parameter, None]


def _index(numbers: Sequence[int], table: SamplingTable) -> Tensor:
    return upload(numbers, torch.int64, table.device)
