"""Requests that decode through a last stage, over a model and a drafter of a few lines.

The model's logits are a function of the tokens so far and of nothing else, so that what a row
of a window says is right exactly if the tokens before it are. The drafter reads its context
back from the cache rows that it was told of, and knows the model's logits as well as it is
told to.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from stagecoach.config.engine import ResolvedSpeculation
from stagecoach.draft.drafter import Choose, DSparkDrafter, Proposal
from stagecoach.kernels.ragged import BlockInputs, PackedBlocks, StepTensors
from stagecoach.model.attn_residual import ResidualStream
from stagecoach.model.kimi_k3 import StageModel
from stagecoach.model.parallel_linear import SingleRank, TensorParallel
from stagecoach.request import SamplingParams, TokenLogprobs
from stagecoach.runner.last_stage import LastStage
from stagecoach.runner.packed_inputs import PackedInputs, StepBounds, exact_bounds
from stagecoach.runner.step_inputs import build_step_tensors
from stagecoach.schedule.step_plan import (
    RowResult,
    SamplingEntry,
    Segment,
    StepPlan,
    pack_page_table,
)

VOCAB_SIZE = 24
BLOCK_SIZE = 4
STOP_ID = 3
NUM_DRAFTS = 4

# Parameters of requests whose windows a captured step can end, and of others.
SIMPLE: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 1.3},
    {"temperature": 0.0, "top_k": 4, "top_p": 0.5},
    {"temperature": 1e-3},
]
NOT_SIMPLE: list[dict[str, Any]] = [
    {"temperature": 0.7, "top_k": 4},
    {"temperature": 0.7, "top_p": 0.5},
    {"temperature": 0.7, "min_p": 0.1},
    {"temperature": 0.0, "repetition_penalty": 1.5},
    {"temperature": 0.0, "logit_bias": {3: 1.0}},
    {"temperature": 0.0, "min_tokens": 5},
    {"temperature": 0.0, "logprobs": 0},
]

Prefix = tuple[int, ...]


@cache
def target_logits(prefix: Prefix) -> Tensor:
    """float64 [V], from the last two tokens and the length, with ties."""
    seed = hash((prefix[-2:], len(prefix))) % 2**31
    generator = torch.Generator().manual_seed(seed)
    logits_V = 2.0 * torch.randn(VOCAB_SIZE, generator=generator, dtype=torch.float64)
    logits_V[STOP_ID] += 2.0
    logits_V[5] = logits_V[11]
    return logits_V


@cache
def other_logits(prefix: Prefix) -> Tensor:
    """As unlike `target_logits` as those of another model."""
    return target_logits((*prefix, -1))


class FakeStream(list[Prefix]):
    """The tokens before and at each place of the flat axis, all of them finite."""

    device = "cpu"

    @property
    def partial_TH(self) -> Tensor:
        return torch.zeros(len(self), 1, device=self.device)


class FakeModel:
    """Makes logits of a FakeStream."""

    config = SimpleNamespace(vocab_size=VOCAB_SIZE)

    def __init__(
        self,
        logits: Callable[[Prefix], Tensor] = target_logits,
        *,
        device: str = "cpu",
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self._logits = logits
        self._device = device
        self._dtype = dtype

    def logits(self, stream: FakeStream, token_index_R: Tensor | None) -> Tensor:
        indices = range(len(stream)) if token_index_R is None else token_index_R.tolist()
        logits_RV = torch.stack([self._logits(stream[index]) for index in indices])
        return logits_RV.to(self._device, self._dtype)


class FakeDrafter:
    """Mixes the target's logits with others: `error` 0 knows the target, 1 knows nothing of it."""

    def __init__(
        self,
        error: float,
        *,
        num_drafts: int = NUM_DRAFTS,
        device: str = "cpu",
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self._error = error
        self._device = device
        self._dtype = dtype
        self._num_drafts = num_drafts
        self._token_of_row: dict[int, int] = {}
        self.blocks: list[BlockInputs | PackedBlocks] = []
        self.calls: list[str] = []
        self.has_confidences = True

    def write_context(self, taps_TNH: Tensor, step: StepTensors, draft_rows_YRD: Tensor) -> None:
        assert len(taps_TNH) == step.num_tokens
        self.calls.append("write")
        pairs = zip(step.cache_rows_T.tolist(), step.token_ids_T.tolist(), strict=True)
        self._token_of_row.update(pairs)

    def finish_context(self) -> None:
        """Rows are written at once."""

    def drop_context(self) -> None:
        """No row is ever due."""

    def propose(
        self, block: BlockInputs | PackedBlocks, draft_rows_YRD: Tensor, choose: Choose | None
    ) -> Proposal | None:
        self.calls.append("propose")
        self.blocks.append(block)
        if choose is None:
            return None
        prefixes: list[Prefix] = [
            (*(self._token_of_row[row] for row in rows_L[:start]), anchor_id)
            for rows_L, start, anchor_id in zip(
                _context_rows(block),
                block.starts_N.tolist(),
                block.anchor_ids_N.tolist(),
                strict=True,
            )
        ]
        shape = (len(prefixes), self._num_drafts)
        drafts_NK = torch.empty(shape, dtype=torch.int64, device=self._device)
        for place in range(self._num_drafts):
            logits_NV = torch.stack(
                [
                    (1 - self._error) * target_logits(prefix) + self._error * other_logits(prefix)
                    for prefix in prefixes
                ]
            )
            logits_NV = logits_NV.to(self._device, self._dtype)
            drafts_NK[:, place] = choose(place, logits_NV, drafts_NK[:, :place])
            ids = drafts_NK[:, place].tolist()
            prefixes = [(*prefix, token) for prefix, token in zip(prefixes, ids, strict=True)]
        # Told apart by (position, place), so that a mix-up of rows shows.
        places_K = torch.arange(self._num_drafts, device=self._device)
        confidences_NK = block.starts_N[:, None] + places_K / 64
        return Proposal(drafts_NK, confidences_NK if self.has_confidences else None)


def _context_rows(block: BlockInputs | PackedBlocks) -> list[list[int]]:
    """Cache rows of the context of each block; none of a block that is not real."""
    if isinstance(block, BlockInputs):
        return block.context_rows_NL.tolist()
    pages = block.pages_P.tolist()
    return [
        [
            pages[first + position // block.block_size] * block.block_size
            + position % block.block_size
            for position in range(start if is_real else 0)
        ]
        for first, start, is_real in zip(
            block.first_pages_N.tolist(),
            block.starts_N.tolist(),
            block.is_real_N.tolist(),
            strict=True,
        )
    ]


@dataclass
class Decoder:
    """One request, its committed tokens and what came with them."""

    number: int
    prompt: Prefix
    params: SamplingParams
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    drafts: tuple[int, ...] = ()
    num_computed: int = 0
    rows: list[tuple[int, int]] = field(default_factory=list)  # (drafts verified, tokens) of each
    is_spoilt: bool = False  # something was not finite: it has ended

    @property
    def known(self) -> Prefix:
        return (*self.prompt, *self.token_ids)

    @property
    def page_table(self) -> bytes:
        return pack_page_table(list(range(20 * self.number + 1, 20 * self.number + 20)))

    def segment(self, length: int, num_drafts: int, *, proposes: bool) -> Segment:
        """The next `length` committed tokens, then drafts."""
        end = self.num_computed + length
        return Segment(
            request_id=self.number,
            epoch=0,
            start=self.num_computed,
            token_ids=(*self.known[self.num_computed : end], *self.drafts[:num_drafts]),
            num_draft_tokens=num_drafts,
            read_slot=self.number + 1 if self.num_computed else 0,
            write_slot=self.number + 1,
            page_table=self.page_table,
            sampling_row=self.number if end == len(self.known) else None,
            proposes=proposes and end == len(self.known),
        )

    def entry(self) -> SamplingEntry:
        return SamplingEntry(
            row=self.number,
            request_id=self.number,
            params=self.params,
            seed=100 + self.number // 2,  # pairs of requests share a seed
            stop_token_ids=(STOP_ID,),
            num_prompt_tokens=len(self.prompt),
            token_ids=self.known if self.params.has_penalties else (),
        )

    def commit(self, segment: Segment, row: RowResult) -> None:
        if not row.is_finite:
            assert row == RowResult(request_id=self.number, epoch=0, token_ids=(), is_finite=False)
            self.is_spoilt = True
            return
        num_certain = segment.num_tokens - segment.num_draft_tokens
        if segment.sampling_row is None:
            assert not row.token_ids and not row.draft_token_ids
            self.num_computed += num_certain
            return
        assert 1 <= len(row.token_ids) <= 1 + segment.num_draft_tokens
        accepted = row.token_ids[:-1]
        assert accepted == segment.token_ids[num_certain : num_certain + len(accepted)]
        self.num_computed += num_certain + len(accepted)
        self.token_ids += row.token_ids
        self.logprobs += row.logprobs
        self.drafts = row.draft_token_ids
        self.rows.append((segment.num_draft_tokens, len(row.token_ids)))
        if row.confidences:
            newest = len(self.known) - 1
            assert list(row.confidences) == [
                newest + place / 64 for place in range(len(row.draft_token_ids))
            ]


# (step, decoder) -> (tokens of a prompt chunk, drafts to verify at most, whether to propose)
Schedule = Callable[[int, Decoder], tuple[int, int, bool]]


def all_drafts(step: int, decoder: Decoder) -> tuple[int, int, bool]:
    return 99, NUM_DRAFTS, True


def plain(step: int, decoder: Decoder) -> tuple[int, int, bool]:
    return 99, 0, False


def ragged(step: int, decoder: Decoder) -> tuple[int, int, bool]:
    """Scattered chunks, lengths and proposals, another for each request and step."""
    scattered = (step * 31 + decoder.number * 17 + 5) * 2654435761 % 2**32
    return 1 + scattered % 5, scattered // 7 % (NUM_DRAFTS + 1), scattered % 6 != 0


def decoders(params: Sequence[dict[str, Any]]) -> list[Decoder]:
    """Requests with prompts of 1, 4, 7, ... tokens."""
    return [
        Decoder(
            number=number,
            prompt=tuple((5 * place + 3 * number) % VOCAB_SIZE for place in range(1 + 3 * number)),
            params=SamplingParams(**{"max_tokens": 64, **values}),
        )
        for number, values in enumerate(params)
    ]


def make_last_stage(
    speculation: ResolvedSpeculation | None,
    drafter: FakeDrafter | None,
    *,
    tp: TensorParallel | None = None,
    is_sampler: bool = True,
    model: FakeModel | None = None,
    device: str = "cpu",
) -> LastStage:
    return LastStage(
        cast(StageModel, model or FakeModel()),
        tp or SingleRank(),
        max_num_seqs=64,
        is_sampler=is_sampler,
        speculation=speculation,
        drafter=cast(DSparkDrafter, drafter),
        device=device,
    )


def speculation(
    acceptance: str = "shared", *, synthetic: float | None = None, num_drafts: int = NUM_DRAFTS
) -> ResolvedSpeculation:
    return ResolvedSpeculation(
        draft=cast(Any, None),
        checkpoint=cast(Any, None),
        num_speculative_tokens=num_drafts,
        acceptance=acceptance,
        has_confidence_schedule=False,
        has_watchdog=False,
        synthetic_acceptance_length=synthetic,
    )


def run_plan(last_stage: LastStage, plan: StepPlan, stream: FakeStream) -> tuple[RowResult, ...]:
    rows = last_stage.run(
        plan,
        build_step_tensors(plan, BLOCK_SIZE),
        cast(ResidualStream, stream),
        torch.zeros(plan.num_tokens, 1, 1),
        torch.zeros(1, 1, 1),
    )
    assert rows is not None
    return rows


class PackedRun:
    """Runs plans as a device does, with room for more than a plan has; counts the ways they go."""

    def __init__(self, device: str = "cpu") -> None:
        self.num_captured = 0
        self.num_general = 0
        self._device = device
        self._inputs = PackedInputs(
            BLOCK_SIZE, torch.device(device), num_values=1 << 16, num_buffers=2
        )

    def __call__(
        self, last_stage: LastStage, plan: StepPlan, stream: FakeStream
    ) -> tuple[RowResult, ...]:
        last_stage.admit(plan)
        forced = last_stage.forced_accepts(plan)
        assert last_stage.forced_accepts(plan) == forced, "to ask again changes nothing"
        end = cast(ResidualStream, stream)
        stream.device = self._device
        draft_rows_YRD = torch.zeros(1, 1, 1, device=self._device)
        if not last_stage.can_capture(plan):
            self.num_general += 1
            packed = self._inputs.pack(plan, None, forced)
            taps_TNH = torch.zeros(plan.num_tokens, 1, 1, device=self._device)
            unread = last_stage.enqueue_general(plan, packed, end, taps_TNH, draft_rows_YRD)
            assert unread is not None
            rows = unread.read()
            assert unread.is_ready()
            return rows
        self.num_captured += 1
        room = exact_bounds(plan).windows
        assert room is not None
        room = room._replace(
            num_tokens=room.num_tokens + 3,
            num_segments=room.num_segments + 2,
            max_drafts=NUM_DRAFTS,
        )
        packed = self._inputs.pack(plan, StepBounds(room, None), forced)
        stream.extend([()] * 3)
        taps_TNH = torch.zeros(room.num_tokens, 1, 1, device=self._device)
        block = last_stage.enqueue(packed, end, taps_TNH, draft_rows_YRD)
        return last_stage.rows_of(plan, block.packed.cpu().numpy())


def decode(
    last_stage: LastStage,
    requests: list[Decoder],
    num_tokens: int,
    schedule: Schedule,
    run: Callable[[LastStage, StepPlan, FakeStream], tuple[RowResult, ...]] = run_plan,
) -> None:
    """Every request to `num_tokens` output tokens or a few more."""
    step = 0
    while running := [
        item for item in requests if len(item.token_ids) < num_tokens and not item.is_spoilt
    ]:
        parts = []
        for item in running:
            chunk, most_drafts, proposes = schedule(step, item)
            left = len(item.known) - item.num_computed
            num_drafts = min(most_drafts, len(item.drafts)) if left == 1 else 0
            segment = item.segment(min(chunk, left), num_drafts, proposes=proposes)
            parts.append((segment, item))
        # Windows first, as a plan must have them; neighbours in another order than requests.
        parts.sort(key=lambda part: (not part[0].is_window, part[0].end, -part[1].number))
        plan = StepPlan(
            step=step,
            segments=tuple(segment for segment, _ in parts),
            admissions=tuple(
                item.entry()
                for segment, item in parts
                if segment.sampling_row is not None and not item.token_ids
            ),
        )
        stream = FakeStream(
            (*item.known[: segment.start], *segment.token_ids[: place + 1])
            for segment, item in parts
            for place in range(segment.num_tokens)
        )
        rows = run(last_stage, plan, stream)
        for (segment, item), row in zip(parts, rows, strict=True):
            item.commit(segment, row)
        step += 1


def outcome(
    params: list[dict[str, Any]],
    schedule: Schedule,
    *,
    error: float | None,
    run: PackedRun | None,
    acceptance: str = "shared",
    synthetic: float | None = None,
    num_tokens: int = 24,
    device: str = "cpu",
    dtype: torch.dtype = torch.float64,
) -> list[Decoder]:
    """Requests decoded to the end, without a drafter where `error` is None."""
    requests = decoders(params)
    asked = drafter = None
    if error is not None:
        asked = speculation(acceptance, synthetic=synthetic)
        drafter = FakeDrafter(error, device=device, dtype=dtype)
    model = FakeModel(device=device, dtype=dtype)
    last_stage = make_last_stage(asked, drafter, model=model, device=device)
    decode(last_stage, requests, num_tokens, schedule, run or run_plan)
    return requests


def assert_same(ours: list[Decoder], theirs: list[Decoder]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.token_ids == other.token_ids
        assert one.rows == other.rows
        assert one.logprobs == other.logprobs
