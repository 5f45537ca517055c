"""What all use of torch.distributed here has in common: how long a rank waits, what a break is."""

import datetime
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from stagecoach.errors import WorkerDiedError

# A rank that waits longer than this for a neighbour reports it; a dead neighbour is noticed
# at once by its closed connection and by the process that started the workers.
TIMEOUT = datetime.timedelta(minutes=30)


@contextmanager
def naming_neighbours() -> Iterator[None]:
    """What a library raises when a connection breaks, in our words."""
    try:
        yield
    except (torch.AcceleratorError, torch.OutOfMemoryError):
        # A kernel before it has failed, or memory has ended: the link is only the first to be told.
        raise
    except RuntimeError as error:
        [first_line, *_] = str(error).splitlines() or [repr(error)]
        raise WorkerDiedError(f"the link to a neighbour broke: {first_line}") from error
