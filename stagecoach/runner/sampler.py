"""Logits to tokens; with `noise`, the one home of randomness.

Owns the order in which parameters act and the choice itself. A choice is a pure function of
(logits, parameters, tokens so far, seed, position): what else is in the batch never matters,
because each step below is decided and computed row by row.

    raw logits -> logprobs
               -> logit_bias -> min_tokens -> penalties          (edits)
               -> / temperature -> min_p -> top_k -> top_p       (cuts)
               -> argmax of what is left + Gumbel noise

The argmax of log-probabilities plus independent Gumbel noise is distributed as the softmax
(Gumbel 1954; Maddison et al., "A* sampling", NeurIPS 2014, §2). Equal values are ordered by
token id throughout: the lowest id wins a greedy tie, and cuts keep lower ids first.

Dimensions: R rows, Q the random rows among them, V vocabulary, K candidates of a row.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stagecoach.request import TokenLogprobs
from stagecoach.runner.logprobs import LogprobRows, TopTokens, as_float, token_logprobs, top_tokens
from stagecoach.runner.noise import gumbel_noise, gumbel_noise_at
from stagecoach.runner.sampling_table import Parameter, RowTraits, SamplingTable

# top_p looks this far down the ranking first, and further only where that mass is not enough.
_FIRST_LOOK = 128


class HostRows(NamedTuple):
    """Sampled tokens on the host; a row without `logprobs` in its request has None."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]


class SampledRows(NamedTuple):
    """One token a row, on the device."""

    token_ids_R: Tensor  # int64
    logprobs: LogprobRows | None  # of the rows that asked, in order
    logprob_indices: list[int]  # which rows those are

    def to_host(self) -> HostRows:
        token_ids = self.token_ids_R.tolist()
        logprobs: list[TokenLogprobs | None] = [None] * len(token_ids)
        if self.logprobs is not None:
            pairs = zip(self.logprob_indices, self.logprobs.to_host(), strict=True)
            for index, entry in pairs:
                logprobs[index] = entry
        return HostRows(token_ids, logprobs)


def sample(
    logits_RV: Tensor,
    rows: Sequence[int],
    positions: Sequence[int],
    table: SamplingTable,
    pending: Sequence[Sequence[int]] | None = None,
) -> SampledRows:
    """Choose the token of each row.

    Several rows may belong to one request, as in a verify window; its later rows then hold in
    `pending` the tokens before them that the table has not been told of, and are right only if
    those tokens become output.

    Args:
        logits_RV: any floating type; float64 is computed in float64, all else in float32.
        rows: table row of each logits row.
        positions: index, within its request, of the token being sampled.
        pending: for each row, output tokens that `table.append` has not seen; penalties
            count them.

    Returns:
        Tokens and logprobs. The table is not changed.
    """
    traits = [table.traits(row) for row in rows]
    if all(item.is_plain for item in traits):
        return SampledRows(logits_RV.argmax(-1), None, [])
    logits_RV = as_float(logits_RV)
    edited_RV = _edit(logits_RV, rows, positions, table, pending)
    random = [index for index, item in enumerate(traits) if not item.is_greedy]
    if not random:
        token_ids_R = edited_RV.argmax(-1)
    else:
        draw = _Draw(
            logits_QV=_pick(edited_RV, random),
            parameters_QP=table.parameters_NP[_index([rows[index] for index in random], table)],
            seeds_Q=table.seeds_N[_index([rows[index] for index in random], table)],
            positions_Q=_index([positions[index] for index in random], table),
            traits=[traits[index] for index in random],
        )
        token_ids_Q = _choose(draw)
        if len(random) == len(rows):
            token_ids_R = token_ids_Q
        else:
            token_ids_R = edited_RV.argmax(-1)
            token_ids_R[_index(random, table)] = token_ids_Q
    wanted = [index for index, item in enumerate(traits) if item.num_logprobs is not None]
    logprobs = None
    if wanted:
        logprobs = token_logprobs(
            _pick(logits_RV, wanted),
            _pick(token_ids_R, wanted),
            [traits[index].num_logprobs or 0 for index in wanted],
        )
    return SampledRows(token_ids_R, logprobs, wanted)


def _edit(
    logits_RV: Tensor,
    rows: Sequence[int],
    positions: Sequence[int],
    table: SamplingTable,
    pending: Sequence[Sequence[int]] | None,
) -> Tensor:
    """Apply bias, min_tokens and penalties; a copy if any row needs one."""
    edited_RV: Tensor | None = None
    penalised: list[int] = []
    for index, (row, position) in enumerate(zip(rows, positions, strict=True)):
        traits = table.traits(row)
        is_blocked = traits.blocked_ids is not None and position < traits.blocked_before
        if not (traits.bias or is_blocked or traits.has_penalties):
            continue
        if edited_RV is None:
            edited_RV = logits_RV.clone()
        if traits.bias is not None:
            token_ids, values = traits.bias
            edited_RV[index, token_ids] += values.to(edited_RV.dtype)
        if is_blocked:
            edited_RV[index, traits.blocked_ids] = -torch.inf
        if traits.has_penalties:
            penalised.append(index)
    if edited_RV is None:
        return logits_RV
    if penalised:
        rows_P = _index([rows[index] for index in penalised], table)
        counts_PV = table.output_counts(rows_P)
        if pending is not None:
            _count_pending(counts_PV, [pending[index] for index in penalised])
        edited_RV[_index(penalised, table)] = _penalise(
            _pick(edited_RV, penalised),
            counts_PV,
            table.is_in_prompt(rows_P),
            table.parameters_NP[rows_P].to(edited_RV.dtype),
        )
    return edited_RV


def _count_pending(counts_PV: Tensor, pending: list[Sequence[int]]) -> None:
    places = [(row, token_id) for row, token_ids in enumerate(pending) for token_id in token_ids]
    if places:
        places_2 = torch.tensor(places, device=counts_PV.device).unbind(-1)
        counts_PV.index_put_(places_2, counts_PV.new_ones(()), accumulate=True)


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
    """The rows that are sampled with noise."""

    logits_QV: Tensor
    parameters_QP: Tensor
    seeds_Q: Tensor
    positions_Q: Tensor
    traits: list[RowTraits]

    def pick(self, indices: list[int]) -> "_Draw":
        """Some of its rows."""
        return _Draw(
            logits_QV=_pick(self.logits_QV, indices),
            parameters_QP=_pick(self.parameters_QP, indices),
            seeds_Q=_pick(self.seeds_Q, indices),
            positions_Q=_pick(self.positions_Q, indices),
            traits=[self.traits[index] for index in indices],
        )


def _choose(draw: _Draw) -> Tensor:
    """Tokens of random rows: int64 [Q]."""
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
    by_all = [
        index for index, item in enumerate(draw.traits) if item.top_k is None and not item.has_top_p
    ]
    token_ids_Q = torch.empty_like(draw.positions_Q)
    for indices, choose in (
        (by_top_k, _choose_by_top_k),
        (by_top_p, _choose_by_top_p),
        (by_all, _choose_by_all),
    ):
        if not indices:
            continue
        chosen = choose(scaled.pick(indices))
        if len(indices) == len(draw.traits):
            return chosen
        token_ids_Q[torch.tensor(indices, device=token_ids_Q.device)] = chosen
    return token_ids_Q


def _choose_by_all(draw: _Draw) -> Tensor:
    vocab_size = draw.logits_QV.shape[-1]
    noise_QV = gumbel_noise(draw.seeds_Q, draw.positions_Q, vocab_size, draw.logits_QV.device)
    return (noise_QV + draw.logits_QV).argmax(-1)


def _choose_by_top_k(draw: _Draw) -> Tensor:
    top_k = [item.top_k for item in draw.traits if item.top_k is not None]
    best = top_tokens(draw.logits_QV, max(top_k))
    top_k_Q1 = torch.tensor(top_k, device=best.values_RK.device).unsqueeze(-1)
    ranks_K = torch.arange(max(top_k), device=top_k_Q1.device)
    best = best._replace(values_RK=best.values_RK.masked_fill(ranks_K >= top_k_Q1, -torch.inf))
    mass_QK = best.values_RK.to(torch.float64).exp().cumsum(-1)
    return _choose_by_mass(draw, best, mass_QK, total_Q1=mass_QK[:, -1:])


def _choose_by_top_p(draw: _Draw, look: int = _FIRST_LOOK) -> Tensor:
    vocab_size = draw.logits_QV.shape[-1]
    look = min(look, vocab_size)
    # cumsum, not sum: its order of addition does not depend on the number of rows.
    total_Q1 = draw.logits_QV.to(torch.float64).exp().cumsum(-1)[:, -1:]
    best = top_tokens(draw.logits_QV, look)
    mass_QK = best.values_RK.to(torch.float64).exp().cumsum(-1)
    token_ids_Q = _choose_by_mass(draw, best, mass_QK, total_Q1)
    if look == vocab_size:
        return token_ids_Q
    is_short_Q1 = mass_QK[:, -1:] < _column(draw.parameters_QP, Parameter.TOP_P) * total_Q1
    short = is_short_Q1.squeeze(-1).nonzero().squeeze(-1)
    if len(short):
        token_ids_Q[short] = _choose_by_top_p(draw.pick(short.tolist()), 4 * look)
    return token_ids_Q


def _choose_by_mass(draw: _Draw, best: TopTokens, mass_QK: Tensor, total_Q1: Tensor) -> Tensor:
    """Keep the fewest of the best whose mass reaches top_p, then choose among them.

    Args:
        mass_QK: float64, inclusive running sum of the unnormalised probabilities.
        total_Q1: float64, what it runs up to.
    """
    top_p_Q1 = _column(draw.parameters_QP, Parameter.TOP_P)
    # The best stays whatever rounding, or a NaN, does to the sums.
    is_cut_QK = torch.zeros_like(mass_QK, dtype=torch.bool)
    is_cut_QK[:, 1:] = (mass_QK[:, :-1] >= top_p_Q1 * total_Q1) & (top_p_Q1 < 1.0)
    values_QK = best.values_RK.masked_fill(is_cut_QK, -torch.inf)
    vocab_size = draw.logits_QV.shape[-1]
    if 4 * values_QK.shape[-1] < vocab_size:
        noise_QK = gumbel_noise_at(draw.seeds_Q, draw.positions_Q, best.token_ids_RK)
    else:
        noise_QV = gumbel_noise(draw.seeds_Q, draw.positions_Q, vocab_size, values_QK.device)
        noise_QK = noise_QV.gather(-1, best.token_ids_RK)
    chosen_Q1 = (noise_QK + values_QK).argmax(-1, keepdim=True)
    return best.token_ids_RK.gather(-1, chosen_Q1).squeeze(-1)


def _column(parameters_QP: Tensor, parameter: Parameter) -> Tensor:
    return parameters_QP[:, parameter, None]


def _pick(tensor: Tensor, indices: list[int]) -> Tensor:
    """Rows of a tensor, without a copy when that is all of them in order."""
    if len(indices) == tensor.shape[0]:
        return tensor
    return tensor[torch.tensor(indices, device=tensor.device)]


def _index(numbers: Sequence[int], table: SamplingTable) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=table.device)
