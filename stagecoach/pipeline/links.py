"""How ranks reach each other: the interfaces, whatever carries them.

A Transport moves one tensor between two ranks; a TensorParallel group reduces and gathers
within a stage. `process_links.py` implements both over torch.distributed,
`thread_links.py` over memory when all workers are threads of one process.
"""

from typing import NamedTuple, Protocol

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

    A tensor given to `send` is not copied: it stays alive and unchanged until its handle
    completes.
    """

    def send(self, tensor: Tensor, to_rank: int, tag: int) -> Handle: ...

    def receive(self, into: Tensor, from_rank: int, tag: int) -> Handle: ...


class Links(NamedTuple):
    """What one worker reaches others through."""

    transport: Transport
    tensor_parallel: TensorParallel
