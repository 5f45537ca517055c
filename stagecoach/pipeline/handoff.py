"""Boundary fields from one stage to the next.

Each tensor rank sends its 1/tp of a field to the same tensor rank of the next stage, which
gathers the parts within its stage. Receives are posted in the declared order; a send keeps
its tensor alive and is waited for only when its plan must have been finished anyway.
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
            num_values = shape_size(shape)
            is_split = num_values % tensor_parallel.size == 0
            share = num_values // tensor_parallel.size if is_split else num_values
            part = torch.empty(share, dtype=self._dtype)
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
        tensor_parallel = self._links.tensor_parallel
        for tag, field in enumerate(self._outgoing):
            if field.final_after != layer:
                continue
            tensor = read(field.name)
            assert tensor.dtype == self._dtype, f"{field.name} is {tensor.dtype}, not {self._dtype}"
            assert tensor.shape[1:] == field.row_shape, f"{tuple(tensor.shape)} is no {field}"
            flat = tensor.reshape(-1)
            if flat.numel() % tensor_parallel.size == 0:
                share = flat.numel() // tensor_parallel.size
                flat = flat[share * tensor_parallel.rank : share * (tensor_parallel.rank + 1)]
            if flat.numel():
                handle = self._links.transport.send(flat, self._next_rank, tag)
                self._sending.append(_Sending(self._step, handle, flat))

    def finish(self) -> None:
        """Wait for every send; called once when the worker ends in order."""
        while self._sending:
            self._end_oldest_send()

    def _declaration(self, fields: tuple[BoundaryField, ...]) -> str:
        return f"{'; '.join(map(str, fields))} as {self._dtype}"

    def _end_oldest_send(self) -> None:
        # Taken off after the wait: the tensor must outlive its transfer.
        self._sending[0].handle.wait()
        self._sending.popleft()


def shape_size(shape: tuple[int, ...]) -> int:
    size = 1
    for extent in shape:
        size *= extent
    return size
