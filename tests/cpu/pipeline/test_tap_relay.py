"""The tap relay: the last stage has every tap once, in order, and nobody copies what passes."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stagecoach.config.model import ModelConfig, Taps, parse_model_config
from stagecoach.model.tiny import TinyShape, kimi_k3_config
from stagecoach.pipeline.boundary import incoming_fields, outgoing_fields
from stagecoach.pipeline.handoff import Handoff
from stagecoach.pipeline.links import Links
from stagecoach.pipeline.stage import Stage, make_stages, whole_model
from stagecoach.pipeline.tap_relay import TapRelay, final_after, taps_before
from stagecoach.pipeline.thread_links import ThreadMesh
from stagecoach.pipeline.topology import Topology, WorkerId
from tests.cpu.engine.fakes import in_threads

pytestmark = pytest.mark.cpu

HIDDEN = 6
DTYPE = torch.float64


def taps_of(listed: Sequence[int], *, are_mixtures: bool = False) -> Taps:
    """As a draft's config gives them: in any order."""
    return Taps(tuple(sorted(listed)), are_mixtures)


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[Stage, ...], Taps]:
    """A partition, and taps anywhere: also on a stage's first and last layer, and -1."""
    counts = draw(st.lists(st.integers(1, 5), min_size=1, max_size=8))
    num_layers = sum(counts)
    listed = draw(st.sets(st.integers(-1, num_layers - 1), min_size=1))
    return make_stages(counts), taps_of(sorted(listed), are_mixtures=draw(st.booleans()))


@given(cases())
def test_received_and_own_taps_are_all_before_the_stages_end_each_once(
    case: tuple[tuple[Stage, ...], Taps],
) -> None:
    stages, taps = case
    relays = [TapRelay(taps, stage, HIDDEN) for stage in stages]
    assert not relays[0].received
    assert sum((relay.own for relay in relays), ()) == taps.layers
    for relay, following in pairwise(relays):
        assert following.received == relay.received + relay.own
    assert relays[-1].received + relays[-1].own == taps.layers


@given(cases())
def test_the_stage_that_makes_a_tap_is_the_one_with_its_layer_or_its_reader(
    case: tuple[tuple[Stage, ...], Taps],
) -> None:
    stages, taps = case
    num_layers = stages[-1].end
    for stage in stages:
        for tap in TapRelay(taps, stage, HIDDEN).own:
            maker = min(tap + 1, num_layers - 1) if taps.are_mixtures else max(tap, 0)
            assert maker in stage.layers
            # The boundary waits for no layer of another stage.
            assert stage.is_last or final_after(taps, tap) < stage.end


@pytest.mark.parametrize(
    ("layer", "are_mixtures", "expected"),
    [
        pytest.param(0, False, (), id="the first stage receives nothing"),
        pytest.param(1, False, (-1,), id="the embedding"),
        pytest.param(48, False, (-1, 2, 23, 47), id="the tapped layer is the last before"),
        pytest.param(47, False, (-1, 2, 23), id="the tapped layer is the first behind"),
        pytest.param(48, True, (-1, 2, 23), id="the reader is the first behind"),
        pytest.param(49, True, (-1, 2, 23, 47), id="the reader is the last before"),
        pytest.param(0, True, (), id="layer 0 mixes the embedding"),
        pytest.param(1, True, (-1,), id="layer 0 has mixed the embedding"),
    ],
)
def test_what_a_cut_of_kimi_k3_carries(
    layer: int, are_mixtures: bool, expected: tuple[int, ...]
) -> None:
    taps = taps_of([71, 2, 47, -1, 23, 89], are_mixtures=are_mixtures)
    assert taps_before(taps, layer) == expected


# What the stages do, without a model: a tap's value says which tap, step and token it is of.


def value(tap: int, step: int, num_tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + tap + 1)
    return torch.randn(num_tokens, HIDDEN, generator=generator, dtype=DTYPE)


def model_config(num_layers: int) -> ModelConfig:
    shape = TinyShape(
        num_layers=num_layers, mla_layers=(num_layers - 1,), hidden_size=HIDDEN, block_size=3
    )
    return parse_model_config(kimi_k3_config(shape))


class StageThread:
    """One rank of one stage: receive, make its taps layer by layer, send as they are final."""

    def __init__(
        self,
        links: Links,
        worker: WorkerId,
        topology: Topology,
        stages: tuple[Stage, ...],
        taps: Taps,
    ) -> None:
        self._stage = stage = stages[worker.stage]
        self._config = config = model_config(stages[-1].end)
        self._taps = taps
        self._relay = TapRelay(taps, stage, HIDDEN)
        incoming = incoming_fields(config, stage, taps)
        outgoing = outgoing_fields(config, stage, taps)
        self._handoff = Handoff(links, worker, topology, incoming, outgoing, DTYPE)

    def run(self, token_counts: Sequence[int]) -> list[Tensor]:
        """What the last stage would give to its drafter, step by step."""
        self._handoff.agree()
        blocks = []
        for step, num_tokens in enumerate(token_counts):
            self._handoff.begin_step(step)
            fields = {} if self._stage.is_first else self._handoff.receive(num_tokens)
            received = fields.get("taps_TNH")
            assert (received is None) == (not self._relay.received)
            made: dict[int, Tensor] = {}
            for layer in (self._stage.start - 1, *self._stage.layers):
                made |= {
                    tap: value(tap, step, num_tokens)
                    for tap in self._relay.own
                    if final_after(self._taps, tap) == layer
                }
                self._send(layer, num_tokens, received, made)
            if self._stage.is_last:
                made |= {tap: value(tap, step, num_tokens) for tap in self._relay.own}
                blocks.append(self._relay.join(received, made))
        self._handoff.finish()
        return blocks

    def _send(
        self, layer: int, num_tokens: int, received: Tensor | None, made: dict[int, Tensor]
    ) -> None:
        def read(name: str) -> Tensor:
            if name == "taps_TNH":
                return self._relay.join(received, made)
            if name == "hidden_TH":
                return torch.zeros(num_tokens, HIDDEN, dtype=DTYPE)
            num_blocks = self._config.num_closed_blocks(self._stage.end)
            return torch.zeros(num_tokens, num_blocks, HIDDEN, dtype=DTYPE)

        self._handoff.send_final(layer, read)


def relayed(
    stages: tuple[Stage, ...], taps: Taps, token_counts: Sequence[int], tp_size: int = 1
) -> list[list[Tensor]]:
    """The blocks on each rank of the last stage, step by step."""
    topology = Topology(num_stages=len(stages), tp_size=tp_size)
    mesh = ThreadMesh(topology)

    def work(worker: WorkerId) -> list[Tensor]:
        torch.set_num_threads(1)
        try:
            return StageThread(mesh.links(worker), worker, topology, stages, taps).run(token_counts)
        except BaseException:
            mesh.close()
            raise

    calls: list[Callable[[], list[Tensor]]] = [
        lambda worker=worker: work(worker) for worker in topology.workers
    ]
    return in_threads(calls, timeout_seconds=20)[-tp_size:]


def assert_whole(blocks: list[Tensor], taps: Taps, token_counts: Sequence[int]) -> None:
    for step, (block, num_tokens) in enumerate(zip(blocks, token_counts, strict=True)):
        expected = torch.stack([value(tap, step, num_tokens) for tap in taps.layers], dim=1)
        assert block.shape == (num_tokens, len(taps.layers), HIDDEN)
        assert block.dtype == DTYPE and torch.equal(block, expected)


# Steps of many tokens, of one and of none.
TOKEN_COUNTS = (5, 1, 0, 1, 3)


@pytest.mark.parametrize("are_mixtures", [False, True], ids=["prefix", "mixture"])
@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("num_stages", [1, 2, 4, 8])
@pytest.mark.parametrize(
    "listed",
    [
        pytest.param([9, 2, 5], id="unsorted"),
        pytest.param([-1], id="the embedding alone"),
        pytest.param([-1, 15], id="both ends"),
        pytest.param([15], id="the last layer alone"),
        pytest.param([7, 8], id="on both sides of the middle"),
        pytest.param(list(range(15, -2, -1)), id="all"),
    ],
)
def test_the_last_stage_has_the_bits_of_every_tap(
    listed: list[int], num_stages: int, tp_size: int, are_mixtures: bool
) -> None:
    taps = taps_of(listed, are_mixtures=are_mixtures)
    stages = make_stages([16 // num_stages] * num_stages)
    for blocks in relayed(stages, taps, TOKEN_COUNTS, tp_size):
        assert_whole(blocks, taps, TOKEN_COUNTS)


@settings(max_examples=25, deadline=None)
@given(
    cases(),
    st.sampled_from([1, 2, 3]),
    st.lists(st.integers(0, 4), min_size=1, max_size=4),
)
def test_any_taps_cross_any_stages(
    case: tuple[tuple[Stage, ...], Taps], tp_size: int, token_counts: list[int]
) -> None:
    stages, taps = case
    for blocks in relayed(stages, taps, token_counts, tp_size):
        assert_whole(blocks, taps, token_counts)


def middle(taps: Taps) -> TapRelay:
    """Layers 4 to 7 of 12."""
    return TapRelay(taps, make_stages((4, 4, 4))[1], HIDDEN)


def test_a_stage_without_own_taps_passes_on_the_received_block_itself() -> None:
    relay = middle(taps_of([1, 3, 9]))
    received = torch.randn(5, 2, HIDDEN)
    assert relay.join(received, {}) is received


def test_the_drafter_gets_the_received_block_itself() -> None:
    """The last stage makes nothing for taps that came."""
    relay = TapRelay(taps_of([1, 3, 7]), make_stages((4, 4, 4))[2], HIDDEN)
    received = torch.randn(5, 3, HIDDEN)
    assert relay.join(received, {}) is received


def test_the_only_tap_is_not_copied() -> None:
    relay = TapRelay(taps_of([3]), whole_model(4), HIDDEN)
    tap_TH = torch.randn(5, HIDDEN)
    block = relay.join(None, {3: tap_TH})
    assert block.shape == (5, 1, HIDDEN) and block.data_ptr() == tap_TH.data_ptr()


def test_own_taps_stand_behind_the_received_ones_in_ascending_order() -> None:
    relay = middle(taps_of([6, 4, 2]))
    received, fourth, sixth = (torch.full((2, HIDDEN), float(tap)) for tap in (2, 4, 6))
    block = relay.join(received.unsqueeze(1), {6: sixth, 4: fourth})
    assert block[:, :, 0].tolist() == [[2.0, 4.0, 6.0]] * 2


@pytest.mark.parametrize(
    ("shape", "named"),
    [
        pytest.param((5, 1, HIDDEN), r"\(5, 1, 6\) came, but taps \(1, 3\)", id="too few"),
        pytest.param((5, 3, HIDDEN), r"\(5, 3, 6\) came, but taps \(1, 3\)", id="too many"),
        pytest.param((5, 2, 4), r"\(5, 2, 4\) came, but taps \(1, 3\) are", id="too narrow"),
        pytest.param((5, 2 * HIDDEN), r"\(5, 12\) came", id="flat"),
    ],
)
def test_a_block_of_another_width_is_named(shape: tuple[int, ...], named: str) -> None:
    relay = middle(taps_of([1, 3, 5]))
    with pytest.raises(AssertionError, match=named):
        relay.join(torch.zeros(shape), {5: torch.zeros(5, HIDDEN)})


def test_a_missing_block_or_tap_is_named() -> None:
    relay = middle(taps_of([1, 3, 5]))
    received, fifth = torch.zeros(5, 2, HIDDEN), torch.zeros(5, HIDDEN)
    with pytest.raises(AssertionError, match=r"taps \(1, 3\) are due, none came"):
        relay.join(None, {5: fifth})
    with pytest.raises(AssertionError, match=r"made taps \[\], but its own are \(5,\)"):
        relay.join(received, {})
    with pytest.raises(AssertionError, match=r"made taps \[5, 7\], but its own are \(5,\)"):
        relay.join(received, {5: fifth, 7: fifth})


def test_a_tap_of_another_stages_layer_is_never_taken() -> None:
    """Also one that this stage could make: the embedding, on a last stage that has a copy."""
    last = TapRelay(taps_of([-1, 9]), make_stages((4, 4, 4))[2], HIDDEN)
    assert last.received == (-1,) and last.own == (9,)
    embedding, ninth = torch.zeros(5, HIDDEN), torch.zeros(5, HIDDEN)
    with pytest.raises(AssertionError, match=r"made taps \[-1, 9\]"):
        last.join(torch.zeros(5, 1, HIDDEN), {-1: embedding, 9: ninth})
