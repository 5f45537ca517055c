"""Boundary fields from one stage to the next.

Each tensor rank sends its 1/tp of a field to the same tensor rank of the next stage, which
gathers the parts within its stage; where that is no gain (`Links.shares_fields`), all of it.
Receives are posted in the declared order; a send keeps its tensor alive and is waited for only
when its plan must have been finished anyway. On a GPU nothing waits on the host: receives are
posted as early as `receive` is called, and what waits is the stream that is current there.
"""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from stagecoach.errors import ConfigError
from stagecoach.pipeline.boundary import BoundaryField
from stagecoach.pipeline.links import Handle, Links
from stagecoach.pipeline.topology import Topology, WorkerId

# One message before all steps: the sender's declaration as text, padded to this size.
_DECLARATION_TAG = 1000
_DECLARATION_BYTES = 8192


class _Sending(NamedTuple):
    step: int
    handle: Handle
    tensor: Tensor  # alive until the handle completes


class Handoff:
    """Both ends of this worker's stage."""

    def __init__(
        self,
        links: Links,
        worker: WorkerId,
        topology: Topology,
        incoming: tuple[BoundaryField, ...],
        outgoing: tuple[BoundaryField, ...],
        dtype: torch.dtype,
    ) -> None:
        self._links = links
        self._rank = worker.rank
        self._previous_rank = worker.rank - topology.tp_size
        self._next_rank = worker.rank + topology.tp_size
        self._num_stages = topology.num_stages
        self._incoming = incoming
        self._outgoing = outgoing
        self._dtype = dtype
        self._step = 0
        self._sending: deque[_Sending] = deque()

    def agree(self) -> None:
        """Compare what the stage before declares with what this one does; once, before any step.

        Nobody else would notice: a transport may take a shorter message without a word.

        Raises:
            ConfigError: the two ends declare other fields; the text has both declarations.
        """
        transport = self._links.transport
        if self._outgoing:
            ours = self._declaration(self._outgoing).encode().ljust(_DECLARATION_BYTES)
            assert len(ours) == _DECLARATION_BYTES, f"a declaration of {len(ours)} bytes"
            sent = torch.frombuffer(bytearray(ours), dtype=torch.uint8)
            handle = transport.send(sent, self._next_rank, _DECLARATION_TAG)
            # Let go of with the first step.
            self._sending.append(_Sending(-self._num_stages, handle, sent))
        if self._incoming:
            received = torch.empty(_DECLARATION_BYTES, dtype=torch.uint8)
            transport.receive(received, self._previous_rank, _DECLARATION_TAG).wait()
            theirs = bytes(received.tolist()).decode().strip()
            expected = self._declaration(self._incoming)
            if theirs != expected:
                raise ConfigError(
                    f"rank {self._previous_rank} sends {theirs}, "
                    f"but rank {self._rank} expects {expected}"
                )

    def drop(self) -> None:
        """Forget what is under way: it never arrives."""
        self._sending.clear()

    def renew(self, links: Links) -> None:
        """Go on with other links, from a first step again."""
        assert not self._sending, "drop first"
        self._step = 0
        self._links = links

    def begin_step(self, step: int) -> None:
        """Let go of sends whose plan has come back from the last stage.

        At most `num_stages` plans are in flight, so by now all stages are done with older
        ones and these waits return at once.
        """
        self._step = step
        while self._sending and self._sending[0].step <= step - self._num_stages:
            self._end_oldest_send()

    def receive(self, num_tokens: int) -> dict[str, Tensor]:
        """Wait for the fields of this step's tokens from the stage before, by name."""
        tensor_parallel = self._links.tensor_parallel
        posted: list[tuple[BoundaryField, Tensor, Handle | None]] = []
        for tag, field in enumerate(self._incoming):
            shape = (num_tokens, *field.row_shape)
            share = self._share(shape_size(shape))
            part = self._links.transport.place(share, self._dtype)
            handle = None
            if share:
                handle = self._links.transport.receive(part, self._previous_rank, tag)
            posted.append((field, part, handle))
        received = {}
        for field, part, handle in posted:
            if handle is not None:
                handle.wait()
            shape = (num_tokens, *field.row_shape)
            if part.numel() != shape_size(shape):
                part = tensor_parallel.all_gather(part, dim=0)
            received[field.name] = part.view(shape)
        return received

    def send_final(self, layer: int, read: Callable[[str], Tensor]) -> None:
        """Send the fields that are final after decoder layer `layer`.

        Args:
            read: gives the tensor of a field by name; the caller never rewrites it.
        """
        for tag, field in enumerate(self._outgoing):
            if field.final_after == layer:
                self._send(tag, field, read(field.name), is_rewritten=False)

    def send_all(self, read: Callable[[str], Tensor]) -> None:
        """Send every field, in their order: what a graph left in tensors of its own.

        Args:
            read: gives the tensor of a field by name, [tokens of the step, ...]. What is enqueued
                on the current stream after this call may rewrite it.
        """
        for tag, field in enumerate(self._outgoing):
            self._send(tag, field, read(field.name), is_rewritten=True)

    def bytes_in_flight(self, num_tokens: int) -> int:
        """What the fields of other steps of so many tokens take at most, beside those of the step
        that computes: received early, or sent and not let go of."""
        fields = (*self._incoming, *self._outgoing)
        num_values = num_tokens * sum(shape_size(field.row_shape) for field in fields)
        return (self._num_stages - 1) * num_values * self._dtype.itemsize

    def finish(self) -> None:
        """Wait for every send; called once when the worker ends in order."""
        while self._sending:
            self._end_oldest_send()

    def _declaration(self, fields: tuple[BoundaryField, ...]) -> str:
        return f"{'; '.join(map(str, fields))} as {self._dtype}"

    def _send(self, tag: int, field: BoundaryField, tensor: Tensor, *, is_rewritten: bool) -> None:
        assert tensor.dtype == self._dtype, f"{field.name} is {tensor.dtype}, not {self._dtype}"
        assert tensor.shape[1:] == field.row_shape, f"{tuple(tensor.shape)} is no {field}"
        tensor_parallel, transport = self._links.tensor_parallel, self._links.transport
        flat = tensor.reshape(-1)
        share = self._share(flat.numel())
        if share < flat.numel():
            flat = flat[share * tensor_parallel.rank : share * (tensor_parallel.rank + 1)]
        if not share:
            return
        if is_rewritten and not transport.copies(share, self._dtype):
            flat = flat.clone()
        handle = transport.send(flat, self._next_rank, tag)
        self._sending.append(_Sending(self._step, handle, flat))

    def _share(self, num_values: int) -> int:
        """How many values of a field this rank sends or receives itself."""
        size = self._links.tensor_parallel.size
        is_shared = self._links.shares_fields and num_values % size == 0
        return num_values // size if is_shared else num_values

    def _end_oldest_send(self) -> None:
        # Taken off after the wait: the tensor must outlive its transfer.
        self._sending[0].handle.wait()
        self._sending.popleft()


def shape_size(shape: tuple[int, ...]) -> int:
    size = 1
    for extent in shape:
        size *= extent
    return size
