"""Sampling as one call with plain lists, and tables to sample from."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stagecoach.request import SamplingParams, TokenLogprobs
from stagecoach.runner.logprobs import requested_logprobs
from stagecoach.runner.sampler import choose_tokens
from stagecoach.runner.sampling_table import PendingTokens, SamplingTable
from stagecoach.schedule.step_plan import SamplingEntry

STOP_ID = 3


class HostRows(NamedTuple):
    """Sampled tokens on the host; a row without `logprobs` in its request has None."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]

    @property
    def token_ids_R(self) -> Tensor:
        return torch.tensor(self.token_ids)


def sample(
    logits_RV: Tensor,
    rows: Sequence[int],
    positions: Sequence[int],
    table: SamplingTable,
    pending: Sequence[Sequence[int]] | None = None,
) -> HostRows:
    """Tokens and logprobs of each row, as the last stage makes them."""
    token_ids_R = choose_tokens(
        logits_RV,
        rows,
        torch.tensor(list(positions), dtype=torch.int64),
        table,
        None if pending is None else pending_tokens(pending),
    )
    wanted = requested_logprobs(
        logits_RV, token_ids_R, [table.traits(row).num_logprobs for row in rows]
    )
    logprobs: list[TokenLogprobs | None] = [None] * len(rows)
    if wanted is not None:
        for index, entry in zip(wanted.indices, wanted.rows.to_host(), strict=True):
            logprobs[index] = entry
    return HostRows(token_ids_R.tolist(), logprobs)


def pending_tokens(pending: Sequence[Sequence[int]]) -> PendingTokens:
    width = max(map(len, pending))
    return PendingTokens(
        torch.tensor([[*ids, *[0] * (width - len(ids))] for ids in pending], dtype=torch.int64),
        torch.tensor([[place < len(ids) for place in range(width)] for ids in pending]),
    )


def make_table(
    vocab_size: int,
    params: Sequence[dict[str, Any]],
    *,
    prompt: tuple[int, ...] = (0, 1),
    output: tuple[int, ...] = (),
    seeds: Sequence[int] | None = None,
) -> SamplingTable:
    """A table whose row i has params[i]."""
    table = SamplingTable(len(params), vocab_size, "cpu")
    table.admit(
        SamplingEntry(
            row=row,
            request_id=row,
            params=SamplingParams(**values),
            seed=row if seeds is None else seeds[row],
            stop_token_ids=(STOP_ID,),
            num_prompt_tokens=len(prompt),
            token_ids=(*prompt, *output),
        )
        for row, values in enumerate(params)
    )
    return table


def exact_probabilities(
    logits: list[float],
    params: SamplingParams,
    prompt: tuple[int, ...],
    output: tuple[int, ...],
) -> list[float]:
    """Slow reference in plain Python: the exact distribution of one row."""
    values = list(logits)
    for token_id, bias in params.logit_bias.items():
        values[token_id] += bias
    if len(output) < params.min_tokens:
        values[STOP_ID] = -math.inf
    for token_id in {*prompt, *output}:
        value, penalty = values[token_id], params.repetition_penalty
        values[token_id] = value / penalty if value > 0 else value * penalty
    for token_id in output:
        values[token_id] -= params.frequency_penalty
    for token_id in set(output):
        values[token_id] -= params.presence_penalty
    weights = [math.exp((value - max(values)) / params.temperature) for value in values]
    weights = [weight if weight >= params.min_p else 0.0 for weight in weights]
    order = sorted(range(len(weights)), key=lambda token_id: (-weights[token_id], token_id))
    if params.top_k > 0:
        for token_id in order[params.top_k :]:
            weights[token_id] = 0.0
    total, mass = sum(weights), 0.0
    for token_id in order:
        if mass >= params.top_p * total and params.top_p < 1.0:
            weights[token_id] = 0.0
        mass += weights[token_id]
    return [weight / sum(weights) for weight in weights]


def chi_square(token_ids_R: Tensor, expected: Sequence[float]) -> float:
    """How many standard deviations tokens stray from their probabilities.

    Pearson's chi-square as a normal number (Wilson and Hilferty, 1931): above 3.09 once in a
    thousand times. Infinite where an impossible token was drawn.
    """
    num_draws = len(token_ids_R)
    counts = token_ids_R.bincount(minlength=len(expected)).tolist()
    assert len(counts) == len(expected)
    if any(count and not p for count, p in zip(counts, expected, strict=True)):
        return math.inf
    # Cells too rare for the approximation are pooled.
    cells = [(count, num_draws * p) for count, p in zip(counts, expected, strict=True) if p > 0]
    rare = [cell for cell in cells if cell[1] < 5.0]
    cells = [cell for cell in cells if cell[1] >= 5.0]
    if rare:
        cells.append((sum(count for count, _ in rare), sum(mean for _, mean in rare)))
    value = sum((count - mean) ** 2 / mean for count, mean in cells)
    degrees = len(cells) - 1
    if degrees == 0:
        return 0.0 if value < 1e-9 else math.inf
    spread = 2.0 / (9.0 * degrees)
    return ((value / degrees) ** (1 / 3) - 1.0 + spread) / math.sqrt(spread)
