"""How ranks reach each other: the interfaces, whatever carries them.

A Transport moves one tensor between two ranks; a TensorParallel group reduces and gathers
within a stage. `process_links.py` implements both over torch.distributed, `cuda_links.py`
between GPUs, `thread_links.py` over memory when all workers are threads of one process.

On a GPU nothing here waits on the host: calls enqueue, and what waits is the current stream.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from stagecoach.model.parallel_linear import TensorParallel


class Handle(Protocol):
    """A transfer under way."""

    def wait(self) -> object:
        """Return when the tensor was received, or may be rewritten after a send.

        What is returned means nothing.
        """


class Transport(Protocol):
    """Point-to-point transfers, matched by (sender, tag) and in order among equals.

    A tensor given to `send` stays alive and unchanged until its handle completes, except where
    the transport `copies`: there work enqueued after the call may rewrite it.
    """

    def place(self, num_values: int, dtype: torch.dtype) -> Tensor:
        """[num_values] to receive one message of as many values into."""

    def copies(self, num_values: int, dtype: torch.dtype) -> bool:
        """Whether `send` takes such a message out of its tensor at once, in stream order."""

    def send(self, tensor: Tensor, to_rank: int, tag: int) -> Handle: ...

    def receive(self, into: Tensor, from_rank: int, tag: int) -> Handle: ...


class Links(NamedTuple):
    """What one worker reaches others through."""

    transport: Transport
    tensor_parallel: TensorParallel
    # Each rank sends its share of a boundary field, and the next stage gathers; or else all of it.
    shares_fields: bool = True
