"""The handoff: what is sent arrives, bit for bit, and nothing is copied or kept too long."""

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stagecoach.errors import ConfigError
from stagecoach.model.parallel_linear import SingleRank
from stagecoach.pipeline.boundary import BoundaryField
from stagecoach.pipeline.handoff import Handoff
from stagecoach.pipeline.links import Handle, Links
from stagecoach.pipeline.thread_links import ThreadMesh
from stagecoach.pipeline.topology import Topology, WorkerId
from tests.cpu.engine.fakes import in_threads

pytestmark = pytest.mark.cpu

DTYPE = torch.float64


def boundary_field(name: str, row_shape: Sequence[int], final_after: int = 0) -> BoundaryField:
    return BoundaryField(name=name, row_shape=tuple(row_shape), final_after=final_after)


HIDDEN = boundary_field("hidden", (6,), final_after=3)
BANK = boundary_field("bank", (2, 6), final_after=1)
EMPTY = boundary_field("empty", (0, 6), final_after=1)
EXTRA = boundary_field("extra", (3,), final_after=2)


@dataclass
class Wire:
    """A transport that notes what is sent; a send completes when somebody waits for it."""

    rank: int = 0
    posted: list[tuple[int, int]] = field(default_factory=list)  # (rank it comes from, tag)
    sends: list["Sent"] = field(default_factory=list)
    copying: bool = False  # whether it takes messages out of their tensors at once

    def place(self, num_values: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(num_values, dtype=dtype)

    def copies(self, num_values: int, dtype: torch.dtype) -> bool:
        return self.copying

    def send(self, tensor: Tensor, to_rank: int, tag: int) -> Handle:
        sent = Sent(weakref.ref(tensor), tensor.data_ptr(), tensor.numel(), to_rank, tag)
        self.sends.append(sent)
        return sent

    def receive(self, into: Tensor, from_rank: int, tag: int) -> Handle:
        raise NotImplementedError

    @property
    def unfinished(self) -> list["Sent"]:
        return [sent for sent in self.sends if not sent.is_done]


@dataclass
class Sent:
    tensor: "weakref.ref[Tensor]"
    address: int
    num_values: int
    to_rank: int
    tag: int
    is_done: bool = False

    def wait(self) -> None:
        assert self.tensor() is not None, "the tensor is gone before its send completed"
        self.is_done = True


class Rank:
    """One of `size` ranks; its collectives are never called by a sender."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_reduce(self, tensor: Tensor) -> Tensor:
        raise NotImplementedError

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        raise NotImplementedError

    def broadcast(self, tensor: Tensor) -> Tensor:
        raise NotImplementedError


def sender(
    wire: Wire,
    fields: Sequence[BoundaryField],
    num_stages: int = 2,
    tp_size: int = 1,
    tp_rank: int = 0,
) -> Handoff:
    """The first stage's end of a boundary."""
    topology = Topology(num_stages=num_stages, tp_size=tp_size)
    links = Links(wire, Rank(tp_rank, tp_size))
    return Handoff(links, topology.worker(tp_rank), topology, (), tuple(fields), DTYPE)


def values(fields: Sequence[BoundaryField], num_tokens: int) -> dict[str, Tensor]:
    return {item.name: torch.randn(num_tokens, *item.row_shape, dtype=DTYPE) for item in fields}


def across(
    fields: Sequence[BoundaryField], steps: Sequence[dict[str, Tensor]], tp_size: int
) -> list[list[dict[str, Tensor]]]:
    """What each rank of the second stage receives, step by step."""
    topology = Topology(num_stages=2, tp_size=tp_size)
    mesh = ThreadMesh(topology)

    def send(worker: WorkerId) -> list[dict[str, Tensor]]:
        handoff = Handoff(mesh.links(worker), worker, topology, (), tuple(fields), DTYPE)
        for step, tensors in enumerate(steps):
            handoff.begin_step(step)
            for layer in range(4):
                handoff.send_final(layer, tensors.__getitem__)
        handoff.finish()
        return []

    def receive(worker: WorkerId) -> list[dict[str, Tensor]]:
        handoff = Handoff(mesh.links(worker), worker, topology, tuple(fields), (), DTYPE)
        received = []
        for step, tensors in enumerate(steps):
            handoff.begin_step(step)
            num_tokens = len(next(iter(tensors.values())))
            received.append(handoff.receive(num_tokens))
        return received

    calls: list[Callable[[], list[dict[str, Tensor]]]] = [
        lambda worker=worker: (send if worker.stage == 0 else receive)(worker)
        for worker in topology.workers
    ]
    return in_threads(calls, timeout_seconds=10)[tp_size:]


def assert_arrived(
    fields: Sequence[BoundaryField],
    steps: Sequence[dict[str, Tensor]],
    received: list[list[dict[str, Tensor]]],
) -> None:
    for of_rank in received:
        for sent, got in zip(steps, of_rank, strict=True):
            assert list(got) == [item.name for item in fields]
            for name, tensor in got.items():
                assert tensor.dtype == DTYPE and tensor.shape == sent[name].shape
                assert torch.equal(tensor, sent[name])


@settings(max_examples=40, deadline=None)
@given(
    tp_size=st.sampled_from([1, 2, 4]),
    row_shapes=st.lists(
        st.lists(st.integers(0, 3), min_size=1, max_size=3), min_size=1, max_size=4
    ),
    final_after=st.lists(st.integers(0, 3), min_size=4, max_size=4),
    token_counts=st.lists(st.integers(0, 5), min_size=1, max_size=3),
)
def test_any_fields_arrive_bit_for_bit_and_in_the_declared_order(
    tp_size: int,
    row_shapes: list[list[int]],
    final_after: list[int],
    token_counts: list[int],
) -> None:
    """Also sizes that the ranks do not divide, and tensors without values."""
    fields = [
        boundary_field(f"field {index}", shape, final_after[index])
        for index, shape in enumerate(row_shapes)
    ]
    steps = [values(fields, num_tokens) for num_tokens in token_counts]
    assert_arrived(fields, steps, across(fields, steps, tp_size))


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_an_empty_tensor_keeps_its_shape_and_dtype(tp_size: int) -> None:
    steps = [values([BANK, EMPTY, HIDDEN], 3)]
    received = across([BANK, EMPTY, HIDDEN], steps, tp_size)
    assert_arrived([BANK, EMPTY, HIDDEN], steps, received)
    assert received[0][0]["empty"].shape == (3, 0, 6)


@pytest.mark.parametrize(
    ("tp_size", "num_tokens", "share"),
    [(1, 3, 18), (2, 3, 9), (4, 2, 3), (4, 1, 6), (4, 3, 18)],
)
def test_each_rank_sends_its_share_or_all_that_cannot_be_shared(
    tp_size: int, num_tokens: int, share: int
) -> None:
    tensors = values([HIDDEN], num_tokens)
    flat = tensors["hidden"].view(-1)
    is_shared = share * tp_size == flat.numel()
    for tp_rank in range(tp_size):
        wire = Wire()
        handoff = sender(wire, [HIDDEN], tp_size=tp_size, tp_rank=tp_rank)
        handoff.send_final(3, tensors.__getitem__)
        [sent] = wire.sends
        assert (sent.to_rank, sent.num_values) == (tp_size + tp_rank, share)
        offset = tp_rank * share if is_shared else 0
        assert sent.address == flat.data_ptr() + offset * flat.element_size()


def test_a_field_leaves_after_its_layer_and_once() -> None:
    wire, tensors = Wire(), values([BANK, EXTRA, HIDDEN], 2)
    handoff = sender(wire, [BANK, EXTRA, HIDDEN])
    read: list[tuple[int, str]] = []
    for layer in range(-1, 5):

        def read_field(name: str, layer: int = layer) -> Tensor:
            read.append((layer, name))
            return tensors[name]

        handoff.send_final(layer, read_field)
    assert read == [(1, "bank"), (2, "extra"), (3, "hidden")]
    assert [sent.tag for sent in wire.sends] == [0, 1, 2]


def test_the_wire_carries_what_was_declared_and_nothing_else() -> None:
    wire, tensors = Wire(), values([BANK, EMPTY, EXTRA, HIDDEN], 5)
    handoff = sender(wire, [BANK, EMPTY, HIDDEN])
    for layer in range(4):
        handoff.send_final(layer, tensors.__getitem__)
    assert [(sent.tag, sent.num_values) for sent in wire.sends] == [(0, 60), (2, 30)]


def test_receives_are_posted_in_the_declared_order_before_the_first_wait() -> None:
    waited: list[int] = []
    posted: list[tuple[int, int]] = []

    class Arriving:
        def __init__(self, into: Tensor, tag: int) -> None:
            self.into, self.tag = into, tag

        def wait(self) -> None:
            assert len(posted) == 3
            waited.append(self.tag)
            self.into.fill_(self.tag)

    class Posts(Wire):
        def receive(self, into: Tensor, from_rank: int, tag: int) -> Handle:
            posted.append((from_rank, tag))
            return Arriving(into, tag)

    topology = Topology(num_stages=3, tp_size=1)
    fields = (BANK, EMPTY, EXTRA, HIDDEN)
    handoff = Handoff(Links(Posts(), SingleRank()), topology.worker(1), topology, fields, (), DTYPE)
    received = handoff.receive(2)
    assert posted == [(0, 0), (0, 2), (0, 3)] and waited == [0, 2, 3]
    assert {name: tensor.shape[1:] for name, tensor in received.items()} == {
        item.name: item.row_shape for item in fields
    }


@pytest.mark.parametrize(("tp_size", "tp_rank"), [(1, 0), (2, 0), (2, 1)])
def test_a_sent_tensor_is_not_cloned(tp_size: int, tp_rank: int) -> None:
    wire, tensors = Wire(), values([BANK, HIDDEN], 4)
    handoff = sender(wire, [BANK, HIDDEN], tp_size=tp_size, tp_rank=tp_rank)
    for layer in range(4):
        handoff.send_final(layer, tensors.__getitem__)
    for sent, tensor in zip(wire.sends, tensors.values(), strict=True):
        share = tensor.nbytes // tp_size
        assert sent.address == tensor.data_ptr() + tp_rank * share


@pytest.mark.parametrize("num_stages", [2, 3, 5])
def test_sends_live_until_their_plan_must_be_finished_and_no_longer(num_stages: int) -> None:
    wire = Wire()
    handoff = sender(wire, [BANK, HIDDEN], num_stages=num_stages)
    for step in range(4 * num_stages):
        handoff.begin_step(step)
        # A plan of the last `num_stages` steps may still be under way; no older one is.
        oldest = max(0, step - num_stages + 1)
        assert [sent.is_done for sent in wire.sends] == [True] * 2 * oldest + [False] * 2 * (
            step - oldest
        )
        tensors = values([BANK, HIDDEN], 1)
        for layer in range(4):
            handoff.send_final(layer, tensors.__getitem__)
        del tensors
        assert len(wire.unfinished) <= 2 * num_stages
        assert all(sent.tensor() is not None for sent in wire.unfinished)
        assert all(sent.tensor() is None for sent in wire.sends if sent.is_done)
    handoff.finish()
    assert not wire.unfinished


@pytest.mark.parametrize("copying", [False, True])
def test_all_fields_leave_at_once_and_their_tensors_may_be_rewritten(copying: bool) -> None:
    """A graph's own tensors: sent from copies, except where the transport makes them."""
    wire, tensors = Wire(copying=copying), values([BANK, EMPTY, HIDDEN], 4)
    handoff = sender(wire, [BANK, EMPTY, HIDDEN])
    handoff.send_all(tensors.__getitem__)
    assert [(sent.tag, sent.num_values) for sent in wire.sends] == [(0, 48), (2, 24)]
    for sent, name in zip(wire.sends, ("bank", "hidden"), strict=True):
        assert (sent.address == tensors[name].data_ptr()) is copying
        kept = sent.tensor()
        assert kept is not None
        assert torch.equal(kept, tensors[name].view(-1))


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_where_shares_are_no_gain_each_rank_sends_and_receives_all(num_tokens: int) -> None:
    topology = Topology(num_stages=2, tp_size=2)
    tensors = values([HIDDEN], num_tokens)
    mesh = ThreadMesh(topology)

    def run(worker: WorkerId) -> Tensor | None:
        # Ranks whose collectives raise: a gather would fail.
        links = Links(mesh.links(worker).transport, Rank(worker.tp_rank, 2), shares_fields=False)
        if worker.stage == 0:
            handoff = Handoff(links, worker, topology, (), (HIDDEN,), DTYPE)
            handoff.send_final(3, tensors.__getitem__)
            return None
        handoff = Handoff(links, worker, topology, (HIDDEN,), (), DTYPE)
        return handoff.receive(num_tokens)["hidden"]

    received = in_threads([lambda worker=worker: run(worker) for worker in topology.workers])
    assert received[:2] == [None, None]
    for tensor in received[2:]:
        assert tensor is not None and torch.equal(tensor, tensors["hidden"])


@pytest.mark.parametrize("num_stages", [2, 5])
def test_bytes_of_other_steps_on_their_way(num_stages: int) -> None:
    topology = Topology(num_stages=num_stages, tp_size=1)
    links = Links(Wire(), SingleRank())
    handoff = Handoff(links, topology.worker(1), topology, (HIDDEN, EMPTY), (BANK,), DTYPE)
    # Six values a token come, twelve leave, of each plan in flight but the one that computes.
    assert handoff.bytes_in_flight(10) == (num_stages - 1) * 10 * (6 + 12) * 8


def test_a_field_of_another_dtype_is_our_mistake() -> None:
    handoff = sender(Wire(), [HIDDEN])
    with pytest.raises(AssertionError, match=r"hidden is torch\.float32, not torch\.float64"):
        handoff.send_final(3, lambda name: torch.zeros(2, 6))


@pytest.mark.parametrize("shape", [(2, 5), (2, 1, 6), (12,)])
def test_a_field_of_another_width_is_our_mistake(shape: tuple[int, ...]) -> None:
    handoff = sender(Wire(), [HIDDEN])
    with pytest.raises(AssertionError, match=r"\) is no hidden \[T, 6\]"):
        handoff.send_final(3, lambda name: torch.zeros(shape, dtype=DTYPE))


def agreement(
    sent: Sequence[BoundaryField], expected: Sequence[BoundaryField], tp_size: int = 1
) -> None:
    """Both stages compare what they declare, then a step crosses."""
    topology = Topology(num_stages=2, tp_size=tp_size)
    mesh = ThreadMesh(topology)
    steps = values(sent, 3)

    def work(worker: WorkerId) -> None:
        is_first = worker.stage == 0
        incoming, outgoing = ((), tuple(sent)) if is_first else (tuple(expected), ())
        handoff = Handoff(mesh.links(worker), worker, topology, incoming, outgoing, DTYPE)
        handoff.agree()
        handoff.begin_step(0)
        if is_first:
            for layer in range(4):
                handoff.send_final(layer, steps.__getitem__)
        else:
            for name, tensor in handoff.receive(3).items():
                assert torch.equal(tensor, steps[name])
        handoff.finish()

    in_threads([lambda worker=worker: work(worker) for worker in topology.workers])


@pytest.mark.parametrize("tp_size", [1, 2])
def test_ends_that_declare_the_same_agree(tp_size: int) -> None:
    later = replace(HIDDEN, final_after=2)
    agreement([BANK, EMPTY, HIDDEN], [BANK, EMPTY, later], tp_size)


TAPS = replace(boundary_field("taps_TNH", (2, 6), final_after=1), columns=(2, 23))


@pytest.mark.parametrize(
    ("expected", "named"),
    [
        pytest.param(
            [replace(TAPS, row_shape=(3, 6), columns=(2, 23, 47)), HIDDEN],
            r"rank 0 sends taps_TNH \[T, 2, 6\] of taps 2, 23; hidden \[T, 6\] as torch.float64, "
            r"but rank 1 expects taps_TNH \[T, 3, 6\] of taps 2, 23, 47; hidden \[T, 6\]",
            id="another width",
        ),
        pytest.param(
            [replace(TAPS, columns=(2, 47)), HIDDEN], "expects .* of taps 2, 47;", id="other taps"
        ),
        pytest.param([HIDDEN, TAPS], "expects hidden", id="another order"),
        pytest.param([HIDDEN], "expects hidden", id="no taps"),
    ],
)
def test_ends_that_declare_other_fields_name_both(
    expected: list[BoundaryField], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        agreement([TAPS, HIDDEN], expected)


def test_a_declaration_is_let_go_of_with_the_first_step() -> None:
    wire = Wire()
    handoff = sender(wire, [BANK, HIDDEN], num_stages=3)
    handoff.agree()
    [sent] = wire.unfinished
    handoff.begin_step(0)
    assert sent.is_done and sent.tensor() is None


def test_stages_may_run_ahead_of_each_other() -> None:
    """The first stage sends all steps before the second takes the first."""
    topology = Topology(num_stages=2, tp_size=1)
    mesh = ThreadMesh(topology)
    steps = [values([BANK, HIDDEN], 1 + step) for step in range(5)]
    is_sent = threading.Event()

    def first() -> list[dict[str, Tensor]]:
        worker = topology.worker(0)
        handoff = Handoff(mesh.links(worker), worker, topology, (), (BANK, HIDDEN), DTYPE)
        for step, tensors in enumerate(steps):
            handoff.begin_step(step)
            for layer in range(4):
                handoff.send_final(layer, tensors.__getitem__)
        is_sent.set()
        return []

    def second() -> list[dict[str, Tensor]]:
        worker = topology.worker(1)
        handoff = Handoff(mesh.links(worker), worker, topology, (BANK, HIDDEN), (), DTYPE)
        assert is_sent.wait(30)
        return [handoff.receive(1 + step) for step in range(5)]

    assert_arrived([BANK, HIDDEN], steps, in_threads([first, second])[1:])
