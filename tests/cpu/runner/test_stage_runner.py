"""One stage alone and chains of stages over thread links: the same numbers everywhere.

All in float64 with NaN in free pages and slots; plans are written by hand, with the tokens
that follow given, so that every position's log-probabilities over the whole vocabulary can be
compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from stagecoach.cache.memory_plan import MemoryPlan
from stagecoach.config import EngineConfig, ResolvedConfig
from stagecoach.model import tiny
from stagecoach.pipeline.links import Handle, Links, Transport
from stagecoach.pipeline.thread_links import ThreadMesh
from stagecoach.pipeline.topology import Topology, WorkerId
from stagecoach.request import SamplingParams, TokenLogprobs
from stagecoach.resolve import resolve
from stagecoach.runner import last_stage
from stagecoach.runner.device_memory import memory_needs
from stagecoach.runner.stage_runner import StageRunner, StepOutcome
from stagecoach.schedule.step_plan import (
    RowResult,
    SamplingEntry,
    Segment,
    StepPlan,
    pack_page_table,
)
from tests.cpu.engine.fakes import in_threads

pytestmark = pytest.mark.cpu

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


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    configs = {"kimi_k3": tiny.kimi_k3_config, "kimi_linear": tiny.kimi_linear_config}
    folders = {}
    for name, config in configs.items():
        folders[name] = tmp_path_factory.mktemp(name)
        tiny.write_tiny_model(folders[name], config(SHAPE), seed=3)
    return folders


def config_of(folder: Path, partition: Sequence[int] = (6,), tp_size: int = 1) -> ResolvedConfig:
    return resolve(
        EngineConfig(
            model=str(folder),
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
    num_computed: int = 0
    is_admitted: bool = False

    def segment(self, length: int, *, num_drafts: int = 0, samples: bool = False) -> Segment:
        start, end = self.num_computed, self.num_computed + length
        self.num_computed = end
        return Segment(
            request_id=self.request_id,
            epoch=0,
            start=start,
            token_ids=self.token_ids[start:end],
            num_draft_tokens=num_drafts,
            read_slot=self.slot if start else 0,
            write_slot=self.slot,
            page_table=pack_page_table(self.pages),
            sampling_row=self.row if samples else None,
            prompt_logprob_targets=self.token_ids[start + 1 : end + 1],
            num_prompt_logprobs=VOCAB_SIZE,
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
        poison_pages: tuple[int, ...] = (),
        poison_slots: tuple[int, ...] = (),
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
                poison_pages=poison_pages,
                poison_slots=poison_slots,
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


def mixed_plans() -> list[StepPlan]:
    """Chunks around the page size, windows with and without drafts, and a change of tenants."""
    first, second, third, fourth = tenants()
    script = Script()
    script.add((first, 5, "chunk"), (second, 4, "sample"))
    script.add((second, 1, 0), (third, 1, "chunk"), (first, 6, "sample"))
    script.add((first, 1, 0), (second, 1, 0), (third, 8, "sample"))
    script.add((first, 1, 0), (second, 3, 2), (third, 1, 0))
    script.add((first, 1, 0), (third, 2, 1))
    script.add((first, 1, 0), (fourth, 7, "chunk"), poison_pages=(1, 5, 11), poison_slots=(4,))
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


def run_grid(config: ResolvedConfig, plans: Sequence[StepPlan]) -> Run:
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
            runner.allocate(MEMORY)
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


@pytest.fixture(scope="module")
def one_stage(checkpoints: dict[str, Path]) -> dict[str, Run]:
    plans = mixed_plans()
    return {name: run_grid(config_of(folder), plans) for name, folder in checkpoints.items()}


@pytest.mark.parametrize("model", ["kimi_k3", "kimi_linear"])
def test_one_stage_gives_what_each_request_alone_in_one_chunk_gives(
    model: str, checkpoints: dict[str, Path], one_stage: dict[str, Run]
) -> None:
    in_one_chunk: dict[int, list[TokenLogprobs]] = {}
    config = config_of(checkpoints[model])
    for tenant in tenants():
        script = Script()
        script.add((tenant, 4 * len(tenant.pages), "chunk"))
        [[row]] = run_grid(config, script.plans).rows
        in_one_chunk[tenant.request_id] = list(row.prompt_logprobs)
    num_compared = 0
    for plan, rows in zip(mixed_plans(), one_stage[model].rows, strict=True):
        for segment, row in zip(plan.segments, rows, strict=True):
            assert len(row.prompt_logprobs) == segment.num_tokens
            assert (segment.sampling_row is None) == (not row.token_ids)
            whole = in_one_chunk[segment.request_id][segment.start : segment.end]
            for ours, theirs in zip(row.prompt_logprobs, whole, strict=False):
                assert ours.token_id == theirs.token_id
                difference = (logprob_table(ours) - logprob_table(theirs)).abs().max()
                assert difference < TOLERANCE
                num_compared += 1
    assert num_compared > 40


LAYOUTS = [
    pytest.param((1, 5), 1, id="right after layer 0 closed a block"),
    pytest.param((3, 3), 1, id="right after a closed block"),
    pytest.param((2, 2, 2), 1, id="before each closing layer"),
    pytest.param((1, 2, 2, 1), 1, id="after each closing layer"),
    pytest.param((1, 1, 1, 1, 1, 1), 1, id="one layer a stage"),
    pytest.param((6,), 4, id="tp 4"),
    pytest.param((3, 3), 2, id="tp 2"),
    pytest.param((2, 1, 3), 4, id="three stages of tp 4"),
]


@pytest.mark.parametrize("model", ["kimi_k3", "kimi_linear"])
@pytest.mark.parametrize(("partition", "tp_size"), LAYOUTS)
def test_a_chain_of_stages_gives_what_one_stage_gives(
    model: str,
    partition: tuple[int, ...],
    tp_size: int,
    checkpoints: dict[str, Path],
    one_stage: dict[str, Run],
) -> None:
    run = run_grid(config_of(checkpoints[model], partition, tp_size), mixed_plans())
    assert_same(run.rows, one_stage[model].rows)
    # Nobody rewrote a tensor after it was handed to the transport.
    for transfers in run.transfers:
        for transfer in transfers:
            if transfer.copy is not None:
                assert torch.equal(transfer.tensor, transfer.copy)


def test_a_stage_keeps_the_sends_of_as_many_steps_as_there_are_stages(
    checkpoints: dict[str, Path],
) -> None:
    run = run_grid(config_of(checkpoints["kimi_k3"], (2, 2, 2)), mixed_plans())
    num_fields, num_stages = 2, 3
    assert run.most_unfinished == [num_fields * num_stages] * 2 + [0]


def test_only_the_last_stages_first_rank_has_rows(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a sampling table; every stage runs all plans."""
    tables: list[object] = []
    make_table = last_stage.SamplingTable

    def count_table(*args: Any) -> object:
        tables.append(args)
        return make_table(*args)

    monkeypatch.setattr(last_stage, "SamplingTable", count_table)
    plans = mixed_plans()
    run = run_grid(config_of(checkpoints["kimi_k3"], (2, 2, 2), tp_size=2), plans)
    has_rows = [{outcome.rows is not None for outcome in outcomes} for outcomes in run.outcomes]
    assert has_rows == [{False}] * 4 + [{True}, {False}]
    assert [len(outcomes) for outcomes in run.outcomes] == [len(plans)] * 6
    assert len(tables) == 1


def test_a_bank_that_was_final_before_the_stage_is_passed_on_as_it_came(
    tmp_path: Path,
) -> None:
    """Stages 1 and 2 close no block: no copy, and the bank leaves before the first layer ran."""
    shape = tiny.TinyShape(num_layers=4, mla_layers=(3,), block_size=4)
    tiny.write_tiny_model(tmp_path, tiny.kimi_k3_config(shape), seed=4)
    first, second, *_ = tenants()
    script = Script()
    script.add((first, 5, "chunk"), (second, 3, "chunk"))
    script.add((second, 1, 0), (first, 2, "sample"))
    run = run_grid(config_of(tmp_path, (1, 1, 1, 1)), script.plans)
    for rank in (1, 2):
        by_step = [run.transfers[rank][start : start + 4] for start in (0, 4)]
        for step in by_step:
            assert [(transfer.verb, transfer.tag) for transfer in step] == [
                ("receive", 0),
                ("receive", 1),
                ("send", 0),
                ("send", 1),
            ]
            bank_in, hidden_in, bank_out, hidden_out = (transfer.tensor for transfer in step)
            assert bank_out.data_ptr() == bank_in.data_ptr()
            assert hidden_out.data_ptr() != hidden_in.data_ptr()


def test_what_a_stage_waits_for_is_not_counted_as_its_work(one_stage: dict[str, Run]) -> None:
    [outcomes] = one_stage["kimi_k3"].outcomes
    for outcome in outcomes:
        assert outcome.wait_seconds == 0.0
        assert outcome.forward_seconds > 0.0


def test_poison_in_a_plan_reaches_the_memory_before_its_segments_run(
    checkpoints: dict[str, Path],
) -> None:
    first, second, *_ = tenants()
    script = Script()
    script.add((first, 9, "sample"), (second, 5, "sample"))
    # A page that the first request still needs.
    script.add((first, 1, 0), (second, 1, 0), poison_pages=(first.pages[1],))
    _, [spoilt, intact] = run_grid(config_of(checkpoints["kimi_k3"]), script.plans).rows
    assert torch.tensor(spoilt.logprobs[0].top_logprobs).isnan().all()
    assert torch.tensor(intact.logprobs[0].top_logprobs).isfinite().all()


def alone(config: ResolvedConfig) -> StageRunner:
    topology = Topology(num_stages=1, tp_size=1)
    worker = topology.worker(0)
    return StageRunner(config, worker, ThreadMesh(topology).links(worker))


def test_a_plan_before_the_memory_is_our_mistake(checkpoints: dict[str, Path]) -> None:
    runner = alone(config_of(checkpoints["kimi_k3"]))
    with pytest.raises(AssertionError, match="load and allocate first"):
        runner.run(mixed_plans()[0])
    runner.load(lambda done_bytes, total_bytes: None)
    with pytest.raises(AssertionError, match="load and allocate first"):
        runner.run(mixed_plans()[0])


def test_loading_reports_bytes_up_to_the_total(checkpoints: dict[str, Path]) -> None:
    config = config_of(checkpoints["kimi_k3"])
    runner = alone(config)
    seen: list[tuple[int, int]] = []
    runner.load(lambda done_bytes, total_bytes: seen.append((done_bytes, total_bytes)))
    done = [done_bytes for done_bytes, _ in seen]
    assert done == sorted(done)
    assert {total_bytes for _, total_bytes in seen} == {done[-1]} != {0}
    ours, again = runner.memory_needs(), memory_needs(config, runner._stage, torch.float64)
    assert (ours.bytes_per_page, ours.bytes_per_slot) == (
        again.bytes_per_page,
        again.bytes_per_slot,
    )
