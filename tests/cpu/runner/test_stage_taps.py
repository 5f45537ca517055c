"""Speculation over chains of stages: every rank's drafter reads what it reads on one stage."""

import gc
import weakref
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from stagecoach.config.engine import ResolvedConfig, SpeculativeConfig
from stagecoach.draft.context_rows import MOST_WAITING
from stagecoach.draft.tiny import TinyDraftShape, mla_draft_config, write_tiny_draft
from stagecoach.kernels.ragged import StepTensors
from stagecoach.model import tiny
from stagecoach.pipeline.handoff import Handoff
from stagecoach.pipeline.thread_links import ThreadMesh
from stagecoach.pipeline.topology import Topology
from stagecoach.runner import stage_runner
from stagecoach.runner.stage_runner import StageRunner
from tests.cpu.runner.stage_runs import (
    SHAPE,
    Run,
    Script,
    assert_same,
    config_of,
    mixed_plans,
    run_grid,
    tenants,
    write_checkpoints,
)

pytestmark = pytest.mark.cpu

NUM_DRAFTS = 3
# As they stand in the file: unsorted, the embedding, both sides of most cuts, the last layer.
TAPS = (5, -1, 2, 3)


class Seen(NamedTuple):
    """What a drafter was given for one step."""

    taps_TNH: Tensor
    copy_TNH: Tensor


class Watcher:
    """Stands before a drafter and keeps what it is given."""

    def __init__(self, drafter: Any, seen: list[Seen]) -> None:
        self._drafter = drafter
        self._seen = seen

    def write_context(self, taps_TNH: Tensor, step: StepTensors, draft_rows_YRD: Tensor) -> None:
        self._seen.append(Seen(taps_TNH, taps_TNH.clone()))
        self._drafter.write_context(taps_TNH, step, draft_rows_YRD)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A draft for each value of a tap."""
    config = mla_draft_config(TinyDraftShape(taps=TAPS, hidden_size=SHAPE.hidden_size))
    streams = {"prefix": {}, "mixture": {"aux_hidden_stream": "attn_res"}}
    folders = {value: tmp_path_factory.mktemp(value) for value in streams}
    for value, keys in streams.items():
        write_tiny_draft(folders[value], config | keys, seed=6)
    return folders


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[Seen]]:
    """What the drafters of runs from here on are given, by tensor rank."""
    seen: dict[int, list[Seen]] = defaultdict(list)
    load = stage_runner.load_drafter

    def load_watched(config: ResolvedConfig, model: Any, tp: Any, *args: Any) -> Watcher:
        return Watcher(load(config, model, tp, *args), seen[tp.rank])

    monkeypatch.setattr(stage_runner, "load_drafter", load_watched)
    return seen


def speculative(draft: Path) -> SpeculativeConfig:
    return SpeculativeConfig(model=str(draft), num_speculative_tokens=NUM_DRAFTS)


def assert_same_drafts(run: Run, expected: Run) -> None:
    num_proposals = 0
    for got, wanted in zip(run.rows, expected.rows, strict=True):
        for ours, theirs in zip(got, wanted, strict=True):
            assert ours.draft_token_ids == theirs.draft_token_ids
            assert ours.confidences == pytest.approx(theirs.confidences, abs=1e-9)
            num_proposals += bool(ours.draft_token_ids)
    assert num_proposals > 5


# Of each number of ranks, one stage first.
LAYOUTS: dict[int, tuple[tuple[int, ...], ...]] = {
    1: ((6,), (3, 3), (2, 2, 2), (1, 2, 2, 1), (1, 1, 1, 1, 1, 1)),
    2: ((6,), (4, 2)),
    4: ((6,), (2, 1, 3)),
}


@pytest.mark.parametrize(
    ("model", "value", "tp_sizes"),
    [
        ("kimi_k3", "prefix", (1, 2, 4)),
        ("kimi_k3", "mixture", (1, 2)),
        ("kimi_linear", "mixture", (1,)),
    ],
)
def test_a_chain_of_stages_drafts_what_one_stage_drafts(
    model: str,
    value: str,
    tp_sizes: tuple[int, ...],
    checkpoints: dict[str, Path],
    drafts: dict[str, Path],
    watched: dict[int, list[Seen]],
) -> None:
    """And gives each rank's drafter the taps of one stage of as many ranks, bit for bit."""
    plans = mixed_plans(speculates=True)
    one_rank: Run | None = None
    for tp_size in tp_sizes:
        one_stage: list[Seen] = []
        for partition in LAYOUTS[tp_size]:
            watched.clear()
            config = config_of(checkpoints[model], partition, tp_size, speculative(drafts[value]))
            run = run_grid(config, plans)
            one_rank = one_rank or run
            assert_same(run.rows, one_rank.rows)
            assert_same_drafts(run, one_rank)
            one_stage = one_stage or watched[0]
            assert sorted(watched) == list(range(tp_size))
            for seen in watched.values():
                for plan, ours, theirs in zip(plans, seen, one_stage, strict=True):
                    assert ours.copy_TNH.shape == (plan.num_tokens, len(TAPS), SHAPE.hidden_size)
                    assert torch.equal(ours.copy_TNH, theirs.copy_TNH)
                    # Nobody rewrites a tap while others may read it.
                    assert torch.equal(ours.taps_TNH, ours.copy_TNH)


def test_windows_of_drafts_compute_what_chunks_compute(
    checkpoints: dict[str, Path], drafts: dict[str, Path]
) -> None:
    """The same tokens, as drafts that all come true and as chunks without speculation."""
    plain = run_grid(config_of(checkpoints["kimi_k3"]), mixed_plans())
    speculation = speculative(drafts["prefix"])
    config = config_of(checkpoints["kimi_k3"], speculative_config=speculation)
    run = run_grid(config, mixed_plans(speculates=True))
    for got, expected in zip(run.rows, plain.rows, strict=True):
        by_request = {row.request_id: row for row in expected}
        for row in got:
            theirs = by_request[row.request_id].prompt_logprobs
            for one, other in zip(row.prompt_logprobs, theirs, strict=True):
                assert one.token_id == other.token_id
                assert one.logprob == pytest.approx(other.logprob, abs=1e-9)


def test_taps_that_a_stage_does_not_make_pass_through_it_and_to_the_drafter_uncopied(
    tmp_path: Path, watched: dict[int, list[Seen]]
) -> None:
    """The embedding over four stages, the middle ones and the last of which make no tap."""
    shape = tiny.TinyShape(num_layers=4, mla_layers=(3,), block_size=4)
    tiny.write_tiny_model(tmp_path / "target", tiny.kimi_k3_config(shape), seed=4)
    draft = mla_draft_config(TinyDraftShape(taps=(-1,), hidden_size=shape.hidden_size))
    write_tiny_draft(tmp_path / "draft", draft, seed=6)
    first, second, *_ = tenants()
    script = Script()
    script.add((first, 5, "chunk"), (second, 3, "chunk"))
    script.add((second, 1, 0), (first, 2, "sample"))
    script.add((second, 1, 0))
    config = config_of(tmp_path / "target", (1, 1, 1, 1), 1, speculative(tmp_path / "draft"))
    run = run_grid(config, script.plans)
    # In the order in which they are final: taps, bank, hidden.
    received = [
        [transfer.tensor for transfer in run.transfers[rank] if transfer.verb == "receive"]
        for rank in range(4)
    ]
    sent = [
        [transfer for transfer in run.transfers[rank] if transfer.verb == "send"]
        for rank in range(4)
    ]
    for rank in (1, 2):
        assert len(received[rank]) == len(sent[rank]) == 3 * len(script.plans)
        for taps_in, taps_out in zip(received[rank][::3], sent[rank][::3], strict=True):
            assert taps_out.tag == 0
            assert taps_out.tensor.data_ptr() == taps_in.data_ptr()
    for taps_in, seen in zip(received[3][::3], watched[0], strict=True):
        assert seen.taps_TNH.data_ptr() == taps_in.data_ptr()
        storage = seen.taps_TNH.untyped_storage()
        assert storage.nbytes() == seen.taps_TNH.nbytes


def test_taps_leave_after_the_layer_that_completes_them(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the stage has layers left to run."""
    sent: list[tuple[int, str]] = []
    send_final = Handoff.send_final

    def watch(self: Handoff, layer: int, read: Callable[[str], Tensor]) -> None:
        def watched_read(name: str) -> Tensor:
            sent.append((layer, name))
            return read(name)

        send_final(self, layer, watched_read)

    monkeypatch.setattr(Handoff, "send_final", watch)
    draft = mla_draft_config(TinyDraftShape(taps=(1, 0), hidden_size=SHAPE.hidden_size))
    write_tiny_draft(tmp_path, draft, seed=6)
    first, *_ = tenants()
    script = Script()
    script.add((first, 5, "chunk"))
    run_grid(config_of(checkpoints["kimi_k3"], (5, 1), 1, speculative(tmp_path)), script.plans)
    assert sent == [(1, "taps_TNH"), (4, "bank_TBH"), (4, "hidden_TH")]


class Forgetful:
    """Stands before a drafter and counts the tokens of earlier steps whose taps still live."""

    def __init__(self, drafter: Any) -> None:
        self._drafter = drafter
        self._taps: list[weakref.ref[Tensor]] = []
        self.most_waiting = 0
        self.num_gone = 0

    def write_context(self, taps_TNH: Tensor, step: StepTensors, draft_rows_YRD: Tensor) -> None:
        alive = [taps for ref in self._taps if (taps := ref()) is not None]
        self.num_gone = len(self._taps) - len(alive)
        self.most_waiting = max(self.most_waiting, sum(map(len, alive)))
        self._taps.append(weakref.ref(taps_TNH))
        self._drafter.write_context(taps_TNH, step, draft_rows_YRD)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)


@pytest.mark.parametrize("partition", [(6,), (3, 3), (5, 1)])
def test_taps_live_until_their_context_rows_are_made_and_no_longer(
    checkpoints: dict[str, Path],
    drafts: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    partition: tuple[int, ...],
) -> None:
    """Freed at once, not when a collector comes by; few tokens ever wait for their rows."""
    made: list[Forgetful] = []
    load = stage_runner.load_drafter

    def load_forgetful(*args: Any) -> Forgetful:
        made.append(Forgetful(load(*args)))
        return made[-1]

    monkeypatch.setattr(stage_runner, "load_drafter", load_forgetful)
    plans = mixed_plans(speculates=True)
    config = config_of(checkpoints["kimi_k3"], partition, 1, speculative(drafts["prefix"]))
    gc.disable()
    try:
        run_grid(config, plans)
    finally:
        gc.enable()
    [drafter] = made
    assert drafter.most_waiting < MOST_WAITING
    assert drafter.num_gone > len(plans) // 2


def test_only_the_last_stage_loads_the_draft_and_all_its_ranks_do(
    checkpoints: dict[str, Path], drafts: dict[str, Path], watched: dict[int, list[Seen]]
) -> None:
    config = config_of(checkpoints["kimi_k3"], (3, 3), 2, speculative(drafts["prefix"]))
    plans = mixed_plans(speculates=True)
    run_grid(config, plans)
    assert {rank: len(seen) for rank, seen in watched.items()} == {0: len(plans), 1: len(plans)}


def test_loading_reports_the_drafts_bytes_behind_the_targets(
    checkpoints: dict[str, Path], drafts: dict[str, Path]
) -> None:
    def load(speculation: SpeculativeConfig | None) -> list[tuple[int, int]]:
        topology = Topology(num_stages=1, tp_size=1)
        worker = topology.worker(0)
        config = config_of(checkpoints["kimi_k3"], speculative_config=speculation)
        runner = StageRunner(config, worker, ThreadMesh(topology).links(worker))
        seen: list[tuple[int, int]] = []
        runner.load(lambda done_bytes, total_bytes: seen.append((done_bytes, total_bytes)))
        return seen

    plain, seen = load(None), load(speculative(drafts["prefix"]))
    assert seen[: len(plain)] == plain
    done = [done_bytes for done_bytes, _ in seen]
    assert done == sorted(done)
    [total] = {total_bytes for _, total_bytes in seen[len(plain) :]}
    assert total == done[-1] > plain[-1][1]
