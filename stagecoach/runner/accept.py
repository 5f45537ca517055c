"""Which drafts stand: the acceptance rule on the device.

Owns how drafts are chosen and how they are judged, which belong together: the noise behind the
choice decides what a fair comparison is. `schedule/verify_window.py` is the home of the rule;
this carries it out for all windows of a step at once. Knows no draft model and no plan.

    shared      drafter and target choose with the same noise, and a draft stands if it is what
                the target chooses: the output is that of plain decoding, token for token
    rejection   independent noise and the ratio of probabilities: the same distribution
    synthetic   as many drafts stand as a benchmark asks for

Dimensions: R rows, S segments, W rows of the widest segment, D rows with a draft, N blocks,
J drafts of a block so far, K all of them, V vocabulary.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from stagecoach.config.engine import ResolvedSpeculation
from stagecoach.draft.drafter import Choose
from stagecoach.kernels.sampling.noise import (
    ACCEPT_STREAM,
    DRAFT_STREAM,
    TOKEN_STREAM,
    gumbel_noise,
    uniform_noise,
)
from stagecoach.runner.sampler import choose_tokens, probabilities
from stagecoach.runner.sampling_table import PendingTokens, SamplingTable
from stagecoach.runner.step_inputs import SampleInputs, WindowRows
from stagecoach.runner.transfer import upload

# Noise of a whole block is made at once, which costs a small model less, up to this many values.
_MAX_BLOCK_NOISE = 2**21


class Verdict(NamedTuple):
    """What the sampled rows of a step say; those of a segment up to its first rejection count."""

    token_ids_R: Tensor  # int64: the draft where it stands, else what the target chooses
    num_accepted_S: Tensor | None  # int64; None where no segment has drafts

    def newest_rows(self, inputs: SampleInputs) -> Tensor:
        """Which row holds the newest token of each segment: int64 [S]."""
        first_rows_S = upload(inputs.first_rows, torch.int64, self.token_ids_R.device)
        return first_rows_S if self.num_accepted_S is None else first_rows_S + self.num_accepted_S

    def is_output(self, inputs: SampleInputs) -> Tensor | None:
        """Which rows count: bool [R]; None where all do."""
        if self.num_accepted_S is None or inputs.windows is None:
            return None
        return inputs.windows.place_R <= self.num_accepted_S[inputs.windows.segment_R]


class AcceptanceRule(Protocol):
    """Chooses drafts, and judges them a step or more later."""

    def forced_accepts(
        self, sampling_rows: Sequence[int], num_drafts: Sequence[int], table: SamplingTable
    ) -> list[int] | None:
        """How many drafts of each segment stand whatever the target says; None: it decides.

        Once for every plan, in order.

        Args:
            sampling_rows: table row of each segment.
            num_drafts: drafts of each.
        """

    def verify(
        self,
        logits_RV: Tensor,
        inputs: SampleInputs,
        table: SamplingTable,
        forced: Sequence[int] | None,
    ) -> Verdict:
        """Tokens of the sampled rows; the table is not changed.

        Args:
            logits_RV: the target's, for the rows of `inputs`.
            forced: what `forced_accepts` said of the segments of `inputs`.
        """

    def draft_choice(self, rows: Sequence[int], starts_N: Tensor, table: SamplingTable) -> Choose:
        """How the tokens of a block pass are chosen; the table holds all tokens before it.

        Args:
            rows: table row of each block.
            starts_N: int64, position of each block's anchor.
        """


def make_rule(speculation: ResolvedSpeculation | None) -> AcceptanceRule:
    """The rule that the options ask for."""
    if speculation is None:
        return SharedNoise(num_draft_tokens=0)
    if speculation.synthetic_acceptance_length is not None:
        return SyntheticAcceptance(
            speculation.synthetic_acceptance_length, speculation.num_speculative_tokens
        )
    if speculation.acceptance == "rejection":
        return Rejection(speculation.num_speculative_tokens)
    assert speculation.acceptance == "shared", f"unknown acceptance: {speculation.acceptance}"
    return SharedNoise(speculation.num_speculative_tokens)


class _BlockNoise(NamedTuple):
    """The target's noise at the places of a block and the one behind, for the verify."""

    seed: int
    position: int  # of the first
    noise_KV: Tensor


class SharedNoise:
    """A draft stands if the target chooses the same, with the noise that chose the draft.

    The last stage of plain decoding is this rule without drafts. Noise of a block is kept for
    the next segment of its request, which chooses at the same positions.
    """

    def __init__(self, num_draft_tokens: int) -> None:
        self._num_draft_tokens = num_draft_tokens
        self._kept: dict[int, _BlockNoise] = {}  # by table row

    def forced_accepts(
        self, sampling_rows: Sequence[int], num_drafts: Sequence[int], table: SamplingTable
    ) -> None:
        """The target decides."""

    def verify(
        self,
        logits_RV: Tensor,
        inputs: SampleInputs,
        table: SamplingTable,
        forced: Sequence[int] | None = None,
    ) -> Verdict:
        token_ids_R = self.target_choice(logits_RV, inputs, table)
        if inputs.windows is None:
            return Verdict(token_ids_R, None)
        return Verdict(token_ids_R, count_accepted(token_ids_R, inputs.windows))

    def target_choice(
        self, logits_RV: Tensor, inputs: SampleInputs, table: SamplingTable
    ) -> Tensor:
        """What plain decoding chooses in each row if all drafts before it stand: int64 [R]."""
        pending = None if inputs.windows is None else inputs.windows.pending
        noise_RV = self._take_noise(inputs, table) if self._kept else None
        return choose_tokens(
            logits_RV, inputs.sampling_rows, inputs.positions_R, table, pending, noise_RV
        )

    def draft_choice(self, rows: Sequence[int], starts_N: Tensor, table: SamplingTable) -> Choose:
        num_places = 1 + self._num_draft_tokens
        noise_NKV: Tensor | None = None
        is_random = any(not table.traits(row).is_greedy for row in rows)
        # On an accelerator it costs less to make noise again than to look at positions here.
        is_kept = is_random and table.device.type == "cpu"
        if is_kept and len(rows) * num_places * table.vocab_size <= _MAX_BLOCK_NOISE:
            noise_NKV = _block_noise(rows, starts_N, num_places, table)
            for row, start, noise_KV in zip(rows, starts_N.tolist(), noise_NKV, strict=True):
                # A copy: the request may end here, and must not keep its neighbours' noise alive.
                self._kept[row] = _BlockNoise(table.traits(row).seed, start + 1, noise_KV.clone())

        def choose(place: int, logits_NV: Tensor, drafts_NJ: Tensor) -> Tensor:
            return choose_tokens(
                logits_NV,
                rows,
                starts_N + (1 + place),
                table,
                _all_pending(drafts_NJ),
                None if noise_NKV is None else noise_NKV[:, place],
            )

        return choose

    def _take_noise(self, inputs: SampleInputs, table: SamplingTable) -> Tensor | None:
        """Kept noise of all rows; None where one has none. It is not kept any longer."""
        positions = inputs.positions_R.tolist()
        ends = [*inputs.first_rows[1:], len(positions)]
        parts = []
        for first, end in zip(inputs.first_rows, ends, strict=True):
            row = inputs.sampling_rows[first]
            kept = self._kept.pop(row, None)
            wanted = (table.traits(row).seed, positions[first])
            if kept is not None and (kept.seed, kept.position) == wanted:
                parts.append(kept.noise_KV[: end - first])
        return torch.cat(parts) if len(parts) == len(ends) else None


class Rejection:
    """Speculative sampling by tokens: a draft d stands with probability min(1, p_t(d) / p_d(d)),
    and where it falls the token comes from max(p_t - p_d, 0), normed (Leviathan et al., "Fast
    inference from Transformers via speculative decoding", ICML 2023, §2.3).

    Each kind of draw has noise of its own. A row without a draft is chosen as in plain decoding,
    and so is every token of a greedy request. What a draft was drawn from is kept from its block
    pass to the next segment of its request. A draft of unknown origin counts as certain
    (p_d(d) = 1), which is exact for any draft that was chosen without the target's noise.
    """

    def __init__(self, num_draft_tokens: int) -> None:
        self._shared = SharedNoise(num_draft_tokens)
        self._drafts_p: dict[int, list[Tensor]] = {}  # by table row, [V] for each draft

    def forced_accepts(
        self, sampling_rows: Sequence[int], num_drafts: Sequence[int], table: SamplingTable
    ) -> None:
        """The target decides."""

    def verify(
        self,
        logits_RV: Tensor,
        inputs: SampleInputs,
        table: SamplingTable,
        forced: Sequence[int] | None = None,
    ) -> Verdict:
        token_ids_R = self._shared.target_choice(logits_RV, inputs, table)
        sampling_rows = [inputs.sampling_rows[first] for first in inputs.first_rows]
        drafts_p = [self._drafts_p.pop(row, []) for row in sampling_rows]
        windows = inputs.windows
        if windows is None:
            return Verdict(token_ids_R, None)
        judged: list[int] = []
        known: list[tuple[int, Tensor]] = []  # p_d, and its place among the judged rows
        for first, row, num_drafts, p in zip(
            inputs.first_rows, sampling_rows, windows.num_drafts_S, drafts_p, strict=True
        ):
            if not table.traits(row).is_greedy:
                known += enumerate(p[:num_drafts], start=len(judged))
                judged += range(first, first + num_drafts)
        if judged:
            indices_D = upload(judged, torch.int64, token_ids_R.device)
            rows = [inputs.sampling_rows[index] for index in judged]
            positions_D, draft_ids_D = inputs.positions_R[indices_D], windows.draft_ids_R[indices_D]
            target_p_DV = probabilities(
                logits_RV[indices_D], rows, positions_D, table, windows.pending.pick(indices_D)
            )
            draft_p_DV = torch.zeros_like(target_p_DV)
            draft_p_DV.scatter_(-1, draft_ids_D.unsqueeze(-1), 1.0)
            for place, p_V in known:
                draft_p_DV[place] = p_V
            seeds_D = table.seeds_N[upload(rows, torch.int64, table.device)]
            token_ids_R[indices_D] = judge_drafts(
                target_p_DV, draft_p_DV, draft_ids_D, seeds_D, positions_D
            )
        return Verdict(token_ids_R, count_accepted(token_ids_R, windows))

    def draft_choice(self, rows: Sequence[int], starts_N: Tensor, table: SamplingTable) -> Choose:
        random = [index for index, row in enumerate(rows) if not table.traits(row).is_greedy]
        if not random:
            return self._shared.draft_choice(rows, starts_N, table)
        for index in random:
            self._drafts_p[rows[index]] = []
        seeds_N = table.seeds_N[upload(rows, torch.int64, table.device)]

        def choose(place: int, logits_NV: Tensor, drafts_NJ: Tensor) -> Tensor:
            positions_N = starts_N + (1 + place)
            p_NV = probabilities(logits_NV, rows, positions_N, table, _all_pending(drafts_NJ))
            for index in random:
                self._drafts_p[rows[index]].append(p_NV[index].clone())
            return _draw_from(p_NV, seeds_N, positions_N, DRAFT_STREAM)

        return choose


class SyntheticAcceptance:
    """So many drafts stand that rows have the asked length on average, whatever the target says.

    Of a request's windows the n-th accepts floor(n a) - floor((n - 1) a) drafts, a being the
    length less 1: no sequence of whole numbers with that mean varies less, or strays less from
    it in sum. A window with fewer drafts accepts all it has.
    """

    def __init__(self, length: float, num_draft_tokens: int) -> None:
        self._shared = SharedNoise(num_draft_tokens)
        # The decimal number that was asked for: sums of its binary neighbour drift over integers.
        self._mean_accepted = Fraction(str(length)) - 1
        self._num_windows: dict[int, tuple[int, int]] = {}  # by table row: (request id, count)

    def forced_accepts(
        self, sampling_rows: Sequence[int], num_drafts: Sequence[int], table: SamplingTable
    ) -> list[int]:
        return [
            min(count, self._next_length(row, table)) if count else 0
            for row, count in zip(sampling_rows, num_drafts, strict=True)
        ]

    def verify(
        self,
        logits_RV: Tensor,
        inputs: SampleInputs,
        table: SamplingTable,
        forced: Sequence[int] | None,
    ) -> Verdict:
        token_ids_R = self._shared.target_choice(logits_RV, inputs, table)
        windows = inputs.windows
        if windows is None:
            return Verdict(token_ids_R, None)
        assert forced is not None, "the number of accepted drafts is missing"
        num_accepted_S = upload(forced, torch.int64, token_ids_R.device)
        is_accepted_R = windows.place_R < num_accepted_S[windows.segment_R]
        return Verdict(torch.where(is_accepted_R, windows.draft_ids_R, token_ids_R), num_accepted_S)

    def draft_choice(self, rows: Sequence[int], starts_N: Tensor, table: SamplingTable) -> Choose:
        return self._shared.draft_choice(rows, starts_N, table)

    def _next_length(self, row: int, table: SamplingTable) -> int:
        request_id = table.traits(row).request_id
        tenant, count = self._num_windows.get(row, (request_id, 0))
        if tenant != request_id:
            count = 0
        self._num_windows[row] = (request_id, count + 1)
        return int((count + 1) * self._mean_accepted) - int(count * self._mean_accepted)


def count_accepted(token_ids_R: Tensor, windows: WindowRows) -> Tensor:
    """The longest prefix of each segment's drafts that equal the tokens: int64 [S]."""
    # A segment's last row has no draft, so that it ends every prefix.
    is_accepted_R = token_ids_R == windows.draft_ids_R
    return is_accepted_R[windows.rows_SW].cumprod(-1).sum(-1)


def judge_drafts(
    target_p_DV: Tensor,
    draft_p_DV: Tensor,
    draft_ids_D: Tensor,
    seeds_D: Tensor,
    positions_D: Tensor,
) -> Tensor:
    """Each draft where it stands, else the token in its place: int64 [D].

    Args:
        target_p_DV: the processed target distribution, any floating type.
        draft_p_DV: the distribution that each draft was drawn from.
        draft_ids_D: int64.
        seeds_D: int64, seed of each row's request.
        positions_D: int64, index of the draft within its request.
    """
    ids_D1 = draft_ids_D.unsqueeze(-1)
    target_p_D = target_p_DV.gather(-1, ids_D1).squeeze(-1)
    draft_p_D = draft_p_DV.gather(-1, ids_D1).squeeze(-1)
    uniform_D = uniform_noise(seeds_D, positions_D, ACCEPT_STREAM)
    stands_D = uniform_D * draft_p_D < target_p_D
    # What a drafter that overflows made, NaN, takes nothing away from the target's choice.
    rest_DV = (target_p_DV - draft_p_DV).clamp_min_(0.0).nan_to_num_(0.0)
    # Nothing is left where both are the same but for rounding; then nothing falls, but for it.
    is_empty_D1 = rest_DV.amax(-1, keepdim=True) <= 0.0
    rest_DV = torch.where(is_empty_D1, target_p_DV, rest_DV)
    return torch.where(stands_D, draft_ids_D, _draw_from(rest_DV, seeds_D, positions_D))


def _block_noise(
    rows: Sequence[int], starts_N: Tensor, num_places: int, table: SamplingTable
) -> Tensor:
    """The target's noise behind each start: [N, K, V]."""
    seeds_N = table.seeds_N[upload(rows, torch.int64, table.device)]
    places_K = torch.arange(1, 1 + num_places, device=starts_N.device)
    return gumbel_noise(
        seeds_N.repeat_interleave(num_places),
        (starts_N[:, None] + places_K).flatten(),
        table.vocab_size,
        starts_N.device,
    ).unflatten(0, (len(rows), num_places))


def _all_pending(drafts_NJ: Tensor) -> PendingTokens:
    return PendingTokens(drafts_NJ.to(torch.int64), torch.ones_like(drafts_NJ, dtype=torch.bool))


def _draw_from(
    weights_RV: Tensor, seeds_R: Tensor, positions_R: Tensor, stream: int = TOKEN_STREAM
) -> Tensor:
    """One token a row, with probability proportional to its weight."""
    vocab_size = weights_RV.shape[-1]
    noise_RV = gumbel_noise(seeds_R, positions_R, vocab_size, weights_RV.device, stream)
    return (noise_RV + weights_RV.log()).argmax(-1)
