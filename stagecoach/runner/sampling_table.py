"""What the last stage remembers of each running request in order to sample for it.

Owns the sampling parameters of every row as tensors, the masks that follow from them, and the
token counts behind penalties. A row belongs to one admission of one request: admitting anew
replaces all of it. Knows no logits, no schedule, and no text.

Dimensions: N rows of the table, R rows of a call, V vocabulary, P parameters, J tokens.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from stagecoach.runner.transfer import upload
from stagecoach.schedule.step_plan import SamplingEntry


class Parameter(IntEnum):
    """Columns of `SamplingTable.parameters_NP`."""

    TEMPERATURE = 0
    TOP_P = 1
    LOG_MIN_P = 2
    PRESENCE_PENALTY = 3
    FREQUENCY_PENALTY = 4
    REPETITION_PENALTY = 5


class PendingTokens(NamedTuple):
    """Output tokens before each row of a call that the table has not been told of.

    The drafts before a row of a window: what the row samples is right only if they stand.
    """

    token_ids_RJ: Tensor  # int64, any valid id where none is
    is_real_RJ: Tensor  # bool

    def pick(self, indices_R: Tensor) -> "PendingTokens":
        """Those of some rows."""
        return PendingTokens(self.token_ids_RJ[indices_R], self.is_real_RJ[indices_R])


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTraits:
    """The host's knowledge of a row: which features it pays for, and their sparse masks."""

    request_id: int
    seed: int
    is_greedy: bool
    top_k: int | None  # None: no cut, or one that would cut nothing
    has_top_p: bool
    has_min_p: bool
    has_penalties: bool
    num_logprobs: int | None
    bias: tuple[Tensor, Tensor] | None  # token ids (int64) and what is added (float64)
    blocked_ids: tuple[int, ...]  # impossible before position `blocked_before`
    blocked_before: int
    is_plain: bool  # greedy without anything that edits logits: one argmax


def is_simple(entry: SamplingEntry, vocab_size: int) -> bool:
    """Whether a row is greedy or has a temperature, and nothing else: neither what edits or cuts
    logits, nor log-probabilities."""
    params = entry.params
    is_edited = (
        params.has_penalties
        or bool(params.logit_bias)
        or bool(params.min_tokens and entry.stop_token_ids)
    )
    is_cut = params.top_p < 1.0 or params.min_p > 0.0 or 0 < params.top_k < vocab_size
    return params.logprobs is None and not is_edited and (params.is_greedy or not is_cut)


class SamplingTable:
    """One row a running request; filled by `admit`, advanced by `append`.

    Attributes:
        parameters_NP: float64, columns named by `Parameter`.
        seeds_N: int64.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device | str) -> None:
        self.num_rows = num_rows
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.parameters_NP = torch.zeros(
            num_rows, len(Parameter), dtype=torch.float64, device=device
        )
        self.seeds_N = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._traits: list[RowTraits | None] = [None] * num_rows
        # Allocated by the first request with penalties.
        self._output_counts_NV: Tensor | None = None
        self._is_in_prompt_NV: Tensor | None = None

    def admit(self, entries: Iterable[SamplingEntry]) -> None:
        """Give each entry its row; nothing of the row's previous tenant remains."""
        entries = list(entries)
        if not entries:
            return
        rows = [entry.row for entry in entries]
        assert len(set(rows)) == len(rows), f"row admitted twice: {rows}"
        assert all(0 <= row < self.num_rows for row in rows), f"rows {rows} of {self.num_rows}"
        parameters = [_parameters(entry) for entry in entries]
        rows_R = self._ids(rows)
        self.parameters_NP[rows_R] = upload(parameters, torch.float64, self.device)
        self.seeds_N[rows_R] = self._ids([entry.seed for entry in entries])
        for entry in entries:
            self._traits[entry.row] = self._traits_of(entry)
            if entry.params.has_penalties:
                self._count_tokens(entry)

    def append(
        self, rows: Sequence[int], token_ids_R: Tensor, is_output_R: Tensor | None = None
    ) -> None:
        """Note tokens that became part of the output; a row may come several times.

        Args:
            rows: table row of each token.
            token_ids_R: int64, on any device.
            is_output_R: bool, which of them did; all without it.
        """
        indices = [index for index, row in enumerate(rows) if self.traits(row).has_penalties]
        if not indices:
            return
        counts_NV, _ = self._token_tables()
        rows_P = self._ids([rows[index] for index in indices])
        indices_P = self._ids(indices)
        token_ids_P = token_ids_R.to(self.device)[indices_P]
        amounts = counts_NV.new_ones(())
        if is_output_R is not None:
            amounts = is_output_R.to(self.device)[indices_P].to(counts_NV.dtype)
        counts_NV.index_put_((rows_P, token_ids_P), amounts, accumulate=True)

    @property
    def temperatures_N(self) -> Tensor:
        """float64, 0 for greedy rows; a view."""
        return self.parameters_NP[:, Parameter.TEMPERATURE]

    def traits(self, row: int) -> RowTraits:
        """What the host knows of an admitted row."""
        traits = self._traits[row]
        assert traits is not None, f"sampling row {row} was never admitted"
        return traits

    def output_counts(self, rows_R: Tensor) -> Tensor:
        """How often each token is in the output: int32 [R, V], a copy. Penalty rows only."""
        return self._token_tables()[0][rows_R]

    def is_in_prompt(self, rows_R: Tensor) -> Tensor:
        """Which tokens the prompt holds: bool [R, V]. Penalty rows only."""
        return self._token_tables()[1][rows_R]

    def _traits_of(self, entry: SamplingEntry) -> RowTraits:
        params = entry.params
        bias = None
        if params.logit_bias:
            bias = (
                self._ids(params.logit_bias),
                upload(list(params.logit_bias.values()), torch.float64, self.device),
            )
        # An end token beyond the head's vocabulary cannot be sampled and needs no mask.
        blocked_ids: tuple[int, ...] = ()
        if params.min_tokens:
            blocked_ids = tuple(
                token_id for token_id in entry.stop_token_ids if token_id < self.vocab_size
            )
        return RowTraits(
            request_id=entry.request_id,
            seed=entry.seed,
            is_greedy=params.is_greedy,
            top_k=params.top_k if 0 < params.top_k < self.vocab_size else None,
            has_top_p=params.top_p < 1.0,
            has_min_p=params.min_p > 0.0,
            has_penalties=params.has_penalties,
            num_logprobs=params.logprobs,
            bias=bias,
            blocked_ids=blocked_ids,
            blocked_before=entry.num_prompt_tokens + params.min_tokens,
            is_plain=params.is_greedy
            and not params.has_penalties
            and bias is None
            and not blocked_ids,
        )

    def _count_tokens(self, entry: SamplingEntry) -> None:
        assert len(entry.token_ids) >= entry.num_prompt_tokens, f"penalties need tokens: {entry}"
        counts_NV, is_in_prompt_NV = self._token_tables()
        counts_V, is_in_prompt_V = counts_NV[entry.row], is_in_prompt_NV[entry.row]
        counts_V.zero_()
        is_in_prompt_V.zero_()
        is_in_prompt_V[self._ids(entry.token_ids[: entry.num_prompt_tokens])] = True
        output_ids = self._ids(entry.token_ids[entry.num_prompt_tokens :])
        counts_V.index_put_((output_ids,), counts_V.new_ones(()), accumulate=True)

    def _token_tables(self) -> tuple[Tensor, Tensor]:
        if self._output_counts_NV is None or self._is_in_prompt_NV is None:
            shape = (self.num_rows, self.vocab_size)
            self._output_counts_NV = torch.zeros(shape, dtype=torch.int32, device=self.device)
            self._is_in_prompt_NV = torch.zeros(shape, dtype=torch.bool, device=self.device)
        return self._output_counts_NV, self._is_in_prompt_NV

    def _ids(self, token_ids: Iterable[int]) -> Tensor:
        return upload(list(token_ids), torch.int64, self.device)


def _parameters(entry: SamplingEntry) -> list[float]:
    params = entry.params
    log_min_p = math.log(params.min_p) if params.min_p > 0.0 else -math.inf
    values = {
        Parameter.TEMPERATURE: params.temperature,
        Parameter.TOP_P: params.top_p,
        Parameter.LOG_MIN_P: log_min_p,
        Parameter.PRESENCE_PENALTY: params.presence_penalty,
        Parameter.FREQUENCY_PENALTY: params.frequency_penalty,
        Parameter.REPETITION_PENALTY: params.repetition_penalty,
    }
    return [values[parameter] for parameter in Parameter]
