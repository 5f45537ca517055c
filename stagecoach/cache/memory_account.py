"""What pages and slots account for together.

Owns the numbers of plans, the counts of what was lost, stored and loaded, and the moves of the plan
being made. Knows no page and no slot.
"""

from enum import Enum

from stagecoach.cache.memory_moves import MemoryMoves, MovesDraft


class Cause(Enum):
    """Why something is cached no more, on neither tier."""

    ROOM = "room"  # its page or slot went to somebody else
    HOST_ROOM = "host_room"  # its place in the host tier did
    PAGE = "page"  # it lies behind, or in, a page that was lost
    NOT_FINITE = "not_finite"  # NaN or infinity in what its owner computed
    QUARANTINE = "quarantine"  # a verification found it wrong
    RESET = "reset"


class MemoryAccount:
    """Written by `PageMemory`, `SlotMemory` and `CacheMemory` alone."""

    def __init__(self) -> None:
        self.evictions = dict.fromkeys(Cause, 0)
        self.num_stored = 0
        self.num_loaded = 0
        self.step = 0  # of the plan being made, or to be made next
        self.committed_step = -1
        # Grows whenever a page or a slot becomes free or a checkpoint can be read.
        self.num_gains = 0
        self.moves = MovesDraft()

    def finish_moves(self) -> MemoryMoves:
        """The moves since the last call."""
        moves, self.moves = self.moves.finish(), MovesDraft()
        return moves
