"""After how many tokens of a request a state is worth keeping: pure arithmetic.

Owns the rungs and how strongly each may ask for a slot. Knows neither slots nor segments' shapes:
no chunk is ever cut for a rung, a rung is kept where a segment passes it.

    0 ...... hit ...... demand ....... grid ....... grid ..... prompt end ........ answer
             computed from here
"""

from typing import NamedTuple

from stagecoach.cache.prefix_cache import Claim


class Ladder(NamedTuple):
    """The rungs of one admission of a request."""

    interval: int  # of the grid, in tokens: whole pages; 0: no grid
    prompt_end: int  # where the next turn of a conversation is expected to part from this one
    # Tokens of the last whole page that was there without a state to resume from; 0: none.
    demand: int = 0
    num_found_tokens: int = 0  # whose pages were there: somebody has computed them before
    page_size: int = 1  # no rung of the grid is worth its slot less than a page behind the end

    def rungs(self, first: int, last: int) -> list[tuple[int, Claim]]:
        """Rungs in (first, last], each with its claim on a slot; what is worth most comes first.

        A prefix seen for the second time outweighs one that may never come again: its rungs
        take slots from other checkpoints. Over new tokens only the grid's 1st, 2nd, 4th, 8th ...
        rung does, so that a long prompt takes few slots and whoever shares part of it finds half
        of that part at once; the others take vacant ones. What is nearer to the beginning is
        likelier to be shared and comes first.
        """
        claims: dict[int, Claim] = {}
        if first < self.demand <= last:
            claims[self.demand] = Claim.ANY
        if first < self.prompt_end <= last:
            claims.setdefault(self.prompt_end, Claim.PROBATION)
        if self.interval and first // self.interval != last // self.interval:
            behind = first - first % self.interval + self.interval
            for position in range(behind, last + 1, self.interval):
                if self.prompt_end < position < self.prompt_end + self.page_size:
                    continue
                number = position // self.interval
                is_wanted = position <= self.num_found_tokens or not number & (number - 1)
                claims.setdefault(position, Claim.PROBATION if is_wanted else Claim.VACANT)
        return list(claims.items()) if claims else []


def grid_interval(interval: int, block_size: int) -> int:
    """The interval of the grid, rounded up to whole pages; 0 stays 0."""
    return -(-interval // block_size) * block_size


def demanded_position(*, num_found_tokens: int, hit: int, limit: int, block_size: int) -> int:
    """Where a request that found pages but no state asks for one; 0 where it need not.

    Args:
        num_found_tokens: tokens whose pages are there.
        hit: tokens behind which it starts.
        limit: the most that it could have started behind.
    """
    position = min(num_found_tokens, limit) // block_size * block_size
    return position if position > hit else 0


def hit_limit(
    *, num_tokens: int, num_prompt_tokens: int, num_prompt_logprobs: int | None, skips_reading: bool
) -> int:
    """Most tokens that an admission may skip: all but the newest, which must be computed.

    Args:
        num_prompt_logprobs: those delivered so far, one a prompt token but the first; the rows
            that give the others must be computed. None where nobody wants them.
    """
    if skips_reading:
        return 0
    limit = num_tokens - 1
    if num_prompt_logprobs is not None and num_prompt_logprobs < num_prompt_tokens - 1:
        limit = min(limit, num_prompt_logprobs)
    return limit
