"""How many tokens of which request go into a step: pure arithmetic on plain numbers."""

from collections.abc import Sequence
from typing import NamedTuple


def pages_for(num_tokens: int, block_size: int) -> int:
    """Pages that hold tokens [0, num_tokens)."""
    return -(-num_tokens // block_size)


def cohort_size(num_decoding: int, num_stages: int) -> int:
    """Most decode windows of one plan, so that as many plans as stages can share them.

    With all of them in one plan, every other stage would wait for its result.
    """
    return -(-num_decoding // num_stages)


def chunk_length(*, num_remaining: int, budget: int, num_free_positions: int) -> int:
    """Tokens of the next prefill chunk; 0 only if the budget or the memory is used up.

    Chunks are not rounded to pages or to kernel blocks: a length that is rounded down can be 0
    for ever, and the kernels take any length.

    Args:
        num_remaining: committed tokens not yet in a plan.
        budget: tokens this step may still compute.
        num_free_positions: tokens that the pages held and the pages available have room for.
    """
    return max(0, min(num_remaining, budget, num_free_positions))


class DraftRoom(NamedTuple):
    """What bounds the drafts of one window, beside what its plan shares out."""

    num_wanted: int  # drafts at hand that its request could still use
    num_open_positions: int  # behind the anchor, in pages that the request holds
    num_promised_pages: int  # of the spare pages, those promised to its seniors


def draft_limits(
    rooms: Sequence[DraftRoom], *, budget: int, num_spare_pages: int, block_size: int
) -> list[int]:
    """The most drafts of each window of a plan whose anchors all have their place.

    The budget is shared evenly, and what one window does not want goes to the others. Pages go
    to whoever stands first, and only free ones: drafts are a guess and cost nobody a place.

    Args:
        budget: tokens that drafts may take, `draft_budget`.
        num_spare_pages: free pages that drafts may take.
    """
    limits = share_evenly([room.num_wanted for room in rooms], budget)
    for index, room in enumerate(rooms):
        num_wanted_pages = pages_for(max(0, limits[index] - room.num_open_positions), block_size)
        num_pages = max(0, min(num_wanted_pages, num_spare_pages - room.num_promised_pages))
        limits[index] = min(limits[index], room.num_open_positions + num_pages * block_size)
        num_spare_pages -= num_pages
    return limits


def draft_budget(budget: int, num_chunk_tokens: int) -> int:
    """What drafts may take of a budget that is left beside the anchors.

    Prompts come after windows but get up to half of it, so that drafts never keep one waiting.
    """
    return budget - min(num_chunk_tokens, -(-budget // 2))


def share_evenly(wanted: Sequence[int], total: int) -> list[int]:
    """At most `total` in all; nobody gets less than another unless it wants no more."""
    shares = [0] * len(wanted)
    by_want = sorted(range(len(wanted)), key=wanted.__getitem__)
    for num_served, index in enumerate(by_want):
        shares[index] = min(wanted[index], total // (len(wanted) - num_served))
        total -= shares[index]
    return shares
