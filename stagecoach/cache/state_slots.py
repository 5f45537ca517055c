"""Slots of KDA state, by number: which are free.

A slot holds one request's recurrent and convolution state of every KDA layer of a stage; its
number is the same on all stages and ranks. A running request owns one slot: its first chunk
reads the zero slot or a checkpoint's and writes the own one, every later segment reads and
writes it in place. A checkpoint owns one too, which nobody writes.

The state is that after the certain tokens of the segment that wrote it. Beside it stands the
record of that segment's drafts. Whoever reads the slot says how many rows of it came true, in
`Segment.replay`: all rows behind those are as good as unwritten.
"""

from stagecoach.cache.id_pool import IdPool

# Slot 0 holds zeros for ever: the state before the first token. It is never written.
ZERO_SLOT = 0
NUM_RESERVED_SLOTS = 1


class StateSlots(IdPool):
    """Slots 1..num_slots-1; slot 0 holds zeros and is never handed out."""

    def __init__(self, num_slots: int) -> None:
        assert num_slots > NUM_RESERVED_SLOTS, f"no slot beside the zero slot: {num_slots}"
        super().__init__("state slot", NUM_RESERVED_SLOTS, num_slots)
