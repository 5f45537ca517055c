"""How much of the prompts goes into one plan, so that every stage has something to do.

Owns the division only; who is served first is the scheduler's choice. With one stage a plan takes
what its budget allows. With several, n plans keep p stages busy for n / (n + p - 1) of the time,
if they take equally long:

    all prompts in one plan            the same in three shares
    stage 0  [ a b c ] . . . . .       stage 0  [a][b][c] . .
    stage 1  . . . . . [ a b c ]       stage 1  . . .[a][b][c]

So what waits and what is in flight is divided into at least p shares, but none so small that
a step would take as long with more. A token costs the more the longer the context before it is:
1 + position / balance, in units of a token's work at the beginning of a prompt.
"""

import math
from collections.abc import Iterable

# A step of fewer tokens costs hardly less: each of many experts is read for a few of them.
_LEAST_TOKENS = 2048
# Where a chunk ends anyway, it ends at a boundary of what the kernels take at once.
_ALIGNMENT = 64
# Pieces that are smaller, of a share or of the least share, are not worth a step or a segment.
_LEAST_PIECE = 1 / 8


class Share:
    """What the chunks of one plan may still take. Without bounds until the first is cut."""

    def __init__(self, shares: "PrefillShares", cost: float) -> None:
        self._shares = shares
        self._left = cost
        self.taken = 0.0
        self.is_used_up = False

    def cut(self, start: int, length: int) -> int:
        """At most `length` tokens from position `start` on, at least one; ends the share if less.

        A rest that is hardly longer than the share goes with it.

        Args:
            length: what the budget and the pages allow.
        """
        assert not self.is_used_up, "nothing is left to cut"
        fitting = self._shares.length(start, self._left)
        if fitting * (1 + _LEAST_PIECE) >= length:
            return length
        self.is_used_up = True
        end = (start + fitting) // _ALIGNMENT * _ALIGNMENT
        return end - start if end > start else max(1, fitting)

    def take(self, start: int, end: int) -> None:
        """Tokens [start, end) of a prompt are in the plan."""
        cost = self._shares.cost(start, end)
        self.taken += cost
        self._left -= cost
        self.is_used_up |= self._left < self._shares.least_piece


class PrefillShares:
    """Divides prompts into plans.

    Args:
        num_stages: p.
        budget: most tokens of a plan.
        balance: the position from which on attention costs a token more than all else; infinite
            without attention over the context.
        least_tokens: no share is worth less than so many tokens at the beginning of a prompt.
    """

    def __init__(
        self,
        *,
        num_stages: int,
        budget: int,
        balance: float = math.inf,
        least_tokens: int = _LEAST_TOKENS,
    ) -> None:
        assert balance > 0 and least_tokens > 0, f"{balance}, {least_tokens}"
        self._num_stages = num_stages
        self._balance = balance
        self._most = self.cost(0, budget)
        self._least = min(self._most, self.cost(0, least_tokens))
        self.least_piece = _LEAST_PIECE * self._least

    def begin_plan(
        self, waiting: Iterable[tuple[int, int]], costs_in_flight: Iterable[float]
    ) -> Share:
        """The share of a plan.

        Args:
            waiting: spans [start, end) of prompts that may join it or the next ones, as far as
                known; it is read no further than matters.
            costs_in_flight: `Share.taken` of each plan in flight.
        """
        if self._num_stages == 1:
            return Share(self, math.inf)
        total = sum(costs_in_flight)
        # Beyond that, every plan takes the most.
        enough = 4 * self._num_stages * self._most
        for start, end in waiting:
            total += self.cost(start, end)
            if total >= enough:
                break
        num_plans = max(self._num_stages, math.ceil(total / self._most))
        return Share(self, max(self._least, total / num_plans))

    def cost(self, start: int, end: int) -> float:
        """Of tokens [start, end): the sum of 1 + position / balance."""
        return (end - start) * (1 + (start + end) / (2 * self._balance))

    def length(self, start: int, cost: float) -> int:
        """Most tokens from `start` on that cost no more: the inverse of `cost`."""
        first = 1 + start / self._balance
        if math.isinf(cost):
            return _UNBOUNDED
        # n · first + n² / (2 · balance) = cost, in a form that is exact without attention too.
        root = math.sqrt(first * first + 2 * cost / self._balance)
        # A whole number of tokens that fits exactly must not be lost to rounding.
        return math.floor(2 * cost / (first + root) + 1e-6)


_UNBOUNDED = 2**62
