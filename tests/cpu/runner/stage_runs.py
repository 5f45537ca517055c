"""Grids of StageRunners over thread links: plans written by hand, and what comes of them.

All in float64 with NaN in free pages and slots; the tokens that follow are given, so that
every position's log-probabilities over the whole vocabulary can be compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stagecoach.cache.memory_moves import NO_MOVES, MemoryMoves
from stagecoach.cache.memory_plan import MemoryPlan
from stagecoach.cache.prefix_hash import prefix_digest
from stagecoach.config.engine import EngineConfig, ResolvedConfig, SpeculativeConfig
from stagecoach.model import tiny
from stagecoach.pipeline.links import Handle, Links, Transport
from stagecoach.pipeline.thread_links import ThreadMesh
from stagecoach.pipeline.topology import Topology, WorkerId
from stagecoach.request import SamplingParams, TokenLogprobs
from stagecoach.resolve import resolve
from stagecoach.runner.stage_runner import StageRunner
from stagecoach.runner.step_outcome import StepOutcome
from stagecoach.schedule.step_plan import (
    Comparison,
    RowResult,
    SamplingEntry,
    Save,
    Segment,
    StepPlan,
    pack_page_table,
)
from tests.cpu.engine.fakes import in_threads

BLOCK_SIZE = 4
MEMORY = MemoryPlan(num_pages=16, num_slots=5)
VOCAB_SIZE = tiny.VOCAB_SIZE
TOLERANCE = 1e-9
# Blocks of residuals close at layers 0, 2 and 4.
SHAPE = tiny.TinyShape(
    num_layers=6,
    mla_layers=(1, 4),
    hidden_size=32,
    head_dim=8,
    dense_size=48,
    num_experts=4,
    q_lora_rank=16,
    nope_dim=8,
    rope_dim=4,
    value_dim=8,
    block_size=2,
)


def write_checkpoints(folder: Path) -> dict[str, Path]:
    """A small Kimi-K3 and a small Kimi-Linear."""
    configs = {"kimi_k3": tiny.kimi_k3_config, "kimi_linear": tiny.kimi_linear_config}
    for name, config in configs.items():
        tiny.write_tiny_model(folder / name, config(SHAPE), seed=3)
    return {name: folder / name for name in configs}


def config_of(
    folder: Path,
    partition: Sequence[int] = (6,),
    tp_size: int = 1,
    speculative_config: SpeculativeConfig | None = None,
) -> ResolvedConfig:
    return resolve(
        EngineConfig(
            model=str(folder),
            speculative_config=speculative_config,
            dtype="float64",
            pipeline_parallel_size=len(partition),
            pp_partition=tuple(partition),
            tensor_parallel_size=tp_size,
            block_size=BLOCK_SIZE,
            max_num_seqs=MEMORY.num_slots - 1,
            max_model_len=64,
            debug_poison=True,
        )
    )


# Plans


@dataclass
class Tenant:
    """A request with all its tokens known, and what it holds."""

    request_id: int
    token_ids: tuple[int, ...]
    pages: tuple[int, ...]
    slot: int
    row: int
    params: SamplingParams
    proposes: bool = False  # wherever it samples
    num_computed: int = 0
    num_recorded: int = 0  # drafts of the window before
    is_admitted: bool = False
    checkpoint: int | None = None  # slot that the next segment reads in place of its own
    saves: dict[int, int] = field(default_factory=dict)  # position -> slot

    def segment(
        self,
        length: int,
        *,
        num_drafts: int = 0,
        samples: bool = False,
        reports_logits: bool = False,
    ) -> Segment:
        """The next tokens; of the window before, all drafts are taken for accepted."""
        start, end = self.num_computed, self.num_computed + length
        replay, self.num_recorded = self.num_recorded, num_drafts
        read_slot, self.checkpoint = self.checkpoint, None
        self.num_computed = end
        first_saved = start - replay if length == 1 + num_drafts else start
        return Segment(
            request_id=self.request_id,
            epoch=0,
            start=start,
            token_ids=self.token_ids[start:end],
            num_draft_tokens=num_drafts,
            read_slot=(read_slot or self.slot) if start else 0,
            replay=replay,
            write_slot=self.slot,
            saves=tuple(
                Save(position, slot)
                for position, slot in self.saves.items()
                if first_saved < position <= end - num_drafts
            ),
            page_table=pack_page_table(self.pages),
            sampling_row=self.row if samples else None,
            proposes=samples and self.proposes,
            prompt_logprob_targets=self.token_ids[start + 1 : end + 1],
            num_prompt_logprobs=VOCAB_SIZE,
            reports_logits=samples and reports_logits,
            read_digest=prefix_digest(self.token_ids[:start]),
        )

    def admission(self) -> SamplingEntry:
        return SamplingEntry(
            row=self.row,
            request_id=self.request_id,
            params=self.params,
            seed=self.request_id,
            stop_token_ids=(),
            num_prompt_tokens=self.num_computed,
            token_ids=self.token_ids[: self.num_computed] if self.params.has_penalties else (),
        )


@dataclass
class Script:
    """Plans in the order they run."""

    plans: list[StepPlan] = field(default_factory=list)

    def add(
        self,
        *parts: tuple[Any, ...],
        moves: MemoryMoves = NO_MOVES,
        comparisons: tuple[Comparison, ...] = (),
    ) -> None:
        """Parts are (tenant, length, "chunk", "sample" or a number of drafts)."""
        segments, admissions = [], []
        for tenant, length, kind in parts:
            samples = kind != "chunk"
            segments.append(
                tenant.segment(
                    length, num_drafts=kind if isinstance(kind, int) else 0, samples=samples
                )
            )
            if samples and not tenant.is_admitted:
                tenant.is_admitted = True
                admissions.append(tenant.admission())
        self.plans.append(
            StepPlan(
                step=len(self.plans),
                segments=tuple(sorted(segments, key=lambda segment: not segment.is_window)),
                admissions=tuple(admissions),
                moves=moves,
                comparisons=comparisons,
            )
        )


def tenants() -> list[Tenant]:
    tokens = [tuple((37 * place + 11 * number) % 500 for place in range(20)) for number in range(4)]
    greedy = SamplingParams(temperature=0.0, logprobs=VOCAB_SIZE)
    drawn = SamplingParams(temperature=0.9, logprobs=VOCAB_SIZE, repetition_penalty=1.2)
    return [
        Tenant(1, tokens[0], (9, 2, 7, 4, 12), slot=2, row=3, params=greedy),
        Tenant(2, tokens[1], (5, 1, 11), slot=4, row=0, params=drawn),
        Tenant(3, tokens[2], (3, 14, 8, 13), slot=1, row=1, params=greedy),
        # Takes over what the second held.
        Tenant(4, tokens[3], (1, 5, 6), slot=4, row=0, params=drawn),
    ]


def mixed_plans(*, speculates: bool = False) -> list[StepPlan]:
    """Chunks around the page size, windows, and a change of tenants.

    Where it speculates, some windows have drafts, and all but the first request propose.
    """
    first, second, third, fourth = tenants()
    for tenant in (second, third, fourth):
        tenant.proposes = speculates
    two_drafts, one_draft = (2, 1) if speculates else ("sample", "sample")
    script = Script()
    script.add((first, 5, "chunk"), (second, 4, "sample"))
    script.add((second, 1, 0), (third, 1, "chunk"), (first, 6, "sample"))
    script.add((first, 1, 0), (second, 1, 0), (third, 8, "sample"))
    script.add((first, 1, 0), (second, 3, two_drafts), (third, 1, 0))
    script.add((first, 1, 0), (third, 2, one_draft))
    freed = MemoryMoves(scrub_pages=(1, 5, 11), scrub_slots=(4,))
    script.add((first, 1, 0), (fourth, 7, "chunk"), moves=freed)
    script.add((fourth, 2, "sample"), (third, 1, 0))
    script.add((first, 1, 0), (third, 1, 0), (fourth, 1, 0))
    return script.plans


# Running them


class Recorder:
    """A transport that keeps a copy of what is sent beside the tensor itself."""

    def __init__(self, transport: Transport, transfers: list["Transfer"]) -> None:
        self._transport = transport
        self._transfers = transfers
        self.num_unfinished = 0
        self.most_unfinished = 0

    def place(self, num_values: int, dtype: torch.dtype) -> Tensor:
        return self._transport.place(num_values, dtype)

    def copies(self, num_values: int, dtype: torch.dtype) -> bool:
        return self._transport.copies(num_values, dtype)

    def send(self, tensor: Tensor, to_rank: int, tag: int) -> Handle:
        self._transfers.append(Transfer("send", to_rank, tag, tensor, tensor.clone()))
        self.num_unfinished += 1
        self.most_unfinished = max(self.most_unfinished, self.num_unfinished)
        return Sending(self, self._transport.send(tensor, to_rank, tag))

    def receive(self, into: Tensor, from_rank: int, tag: int) -> Handle:
        self._transfers.append(Transfer("receive", from_rank, tag, into, None))
        return self._transport.receive(into, from_rank, tag)


@dataclass
class Sending:
    """A send that counts as unfinished until somebody waited for it."""

    recorder: Recorder
    handle: Handle

    def wait(self) -> None:
        self.handle.wait()
        self.recorder.num_unfinished -= 1


class Transfer(NamedTuple):
    verb: str
    other_rank: int
    tag: int
    tensor: Tensor
    copy: Tensor | None


class Run(NamedTuple):
    """By rank: what each step returned, what crossed the boundaries, and how it was kept."""

    outcomes: list[list[StepOutcome]]
    transfers: list[list[Transfer]]
    most_unfinished: list[int]  # sends at once that nobody had waited for

    @property
    def rows(self) -> list[tuple[RowResult, ...]]:
        """Of the one rank that samples."""
        [rows] = [
            [outcome.rows for outcome in outcomes]
            for outcomes in self.outcomes
            if outcomes[0].rows is not None
        ]
        return [step for step in rows if step is not None]


def run_grid(config: ResolvedConfig, plans: Sequence[StepPlan], memory: MemoryPlan = MEMORY) -> Run:
    """Every rank in a thread, through all plans as fast as its neighbours let it."""
    topology = Topology(
        num_stages=config.engine.pipeline_parallel_size,
        tp_size=config.engine.tensor_parallel_size,
    )
    mesh = ThreadMesh(topology)
    transfers: list[list[Transfer]] = [[] for _ in topology.workers]
    most_unfinished = [0] * topology.num_workers

    def work(worker: WorkerId) -> list[StepOutcome]:
        torch.set_num_threads(1)
        links = mesh.links(worker)
        recorder = Recorder(links.transport, transfers[worker.rank])
        try:
            runner = StageRunner(config, worker, Links(recorder, links.tensor_parallel))
            runner.load(lambda done_bytes, total_bytes: None)
            runner.allocate(memory)
            transfers[worker.rank].clear()  # only those of steps are looked at
            outcomes = [runner.run(StepPlan.decode(plan.encode())) for plan in plans]
            runner.finish()
            assert recorder.num_unfinished == 0
            most_unfinished[worker.rank] = recorder.most_unfinished
        except BaseException:
            mesh.close()
            raise
        return outcomes

    outcomes = in_threads([lambda worker=worker: work(worker) for worker in topology.workers])
    return Run(outcomes, transfers, most_unfinished)


def logprob_table(entry: TokenLogprobs) -> Tensor:
    """Log-probabilities of the whole vocabulary, by token id."""
    assert sorted(entry.top_ids) == list(range(VOCAB_SIZE))
    table = torch.empty(VOCAB_SIZE, dtype=torch.float64)
    table[torch.tensor(entry.top_ids)] = torch.tensor(entry.top_logprobs, dtype=torch.float64)
    return table


def assert_same(got: list[tuple[RowResult, ...]], expected: list[tuple[RowResult, ...]]) -> None:
    for got_rows, expected_rows in zip(got, expected, strict=True):
        for ours, theirs in zip(got_rows, expected_rows, strict=True):
            assert (ours.request_id, ours.epoch) == (theirs.request_id, theirs.epoch)
            assert ours.token_ids == theirs.token_ids
            assert len(ours.logprobs) == len(ours.token_ids)
            for one, other in zip(
                (*ours.logprobs, *ours.prompt_logprobs),
                (*theirs.logprobs, *theirs.prompt_logprobs),
                strict=True,
            ):
                assert one.token_id == other.token_id
                difference = (logprob_table(one) - logprob_table(other)).abs().max()
                assert difference < TOLERANCE
