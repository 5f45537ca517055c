"""One stage alone and chains of stages over thread links: the same numbers everywhere."""

from pathlib import Path
from typing import Any

import pytest
import torch

from stagecoach.cache.memory_moves import MemoryMoves
from stagecoach.cache.memory_plan import MemoryPlan
from stagecoach.config.engine import ResolvedConfig
from stagecoach.model import tiny
from stagecoach.pipeline.thread_links import ThreadMesh
from stagecoach.pipeline.topology import Topology
from stagecoach.request import TokenLogprobs
from stagecoach.runner import last_stage
from stagecoach.runner.device_memory import memory_needs
from stagecoach.runner.stage_runner import StageRunner
from tests.cpu.runner.stage_runs import (
    TOLERANCE,
    Run,
    Script,
    assert_same,
    config_of,
    logprob_table,
    mixed_plans,
    run_grid,
    tenants,
    write_checkpoints,
)

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_checkpoints(tmp_path_factory.mktemp("checkpoints"))


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
    moves = MemoryMoves(scrub_pages=(first.pages[1],))
    script.add((first, 1, 0), (second, 1, 0), moves=moves)
    _, [spoilt, intact] = run_grid(config_of(checkpoints["kimi_k3"]), script.plans).rows
    assert not spoilt.is_finite
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


def test_memory_of_scratch_plans_is_given_back_before_more_is_taken(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a worker holds twice what it may take."""
    num_alive = 0

    def allocate(*_: Any) -> object:
        nonlocal num_alive
        assert num_alive == 0
        num_alive += 1
        return Reserved()

    class Reserved:
        def __del__(self) -> None:
            nonlocal num_alive
            num_alive -= 1

    monkeypatch.setattr("stagecoach.runner.stage_runner.DeviceMemory", allocate)
    runner = alone(config_of(checkpoints["kimi_k3"]))
    for _ in range(2):
        runner.allocate(MemoryPlan(num_pages=2, num_slots=2))
    assert num_alive == 1


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
