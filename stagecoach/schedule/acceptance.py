"""How often drafts are accepted lately: by place in the window, and as tokens a round.

Owns the counting of accepted and refused drafts with a memory that fades. Knows no cost, no
clock and no policy. A round is one proposal and what became of it.
"""

from collections.abc import Sequence

# Nothing is known of a place yet: a draft worth serving is accepted about as often.
_PRIOR_RATE = 0.7
# How many tries of its own outweigh what is known from elsewhere.
_BORROWED_TRIES = 2.0

# On any text, some first drafts of a draft that fits its target are accepted. Once that was
# seen, hard texts must be told from a draft that broke: by chance they bring long runs too.
_BROKEN_WINDOWS = 24
_BROKEN_LATER_WINDOWS = 96
_BROKEN_REQUESTS = 3
_BROKEN_RATE = 0.02


class PlaceRates:
    """Rolling rate, for each place, at which a draft is accepted when all before it are.

    Args:
        num_places: k, the most drafts of a window.
        memory: tries of a place after which a fresh one weighs 1 / memory.
    """

    def __init__(self, num_places: int, memory: float) -> None:
        self._keep = 1 - 1 / memory
        self._tries = [0.0] * num_places
        self._hits = [0.0] * num_places

    def note(self, num_drafts: int, num_accepted: int) -> None:
        """Count a window: its first `num_accepted` drafts stood, the next one, if any, fell."""
        tries, hits, keep = self._tries, self._hits, self._keep
        for place in range(num_accepted):
            tries[place] = tries[place] * keep + 1
            hits[place] = hits[place] * keep + 1
        if num_accepted < num_drafts:
            tries[num_accepted] = tries[num_accepted] * keep + 1
            hits[num_accepted] *= keep

    def blended(self, elsewhere: Sequence[float] | None = None) -> list[float]:
        """The rate of each place, between 0 and 1; where tries are few, close to `elsewhere`.

        Args:
            elsewhere: rates to start from, those of all requests; None: a guess.
        """
        borrowed = elsewhere or [_PRIOR_RATE] * len(self._tries)
        return [
            (hits + _BORROWED_TRIES * rate) / (tries + _BORROWED_TRIES)
            for hits, tries, rate in zip(self._hits, self._tries, borrowed, strict=True)
        ]


class Payoff:
    """Rolling means of rounds: tokens that came of them, and drafts that they verified."""

    def __init__(self, memory: float) -> None:
        self._keep = 1 - 1 / memory
        self._tokens = 0.0
        self._drafts = 0.0
        self.num_rounds = 0.0  # as they weigh now: at most `memory`
        self.novelty = 1.0  # fades as rounds come: what an assumption from before still weighs

    def note(self, num_drafts: int, num_accepted: int) -> None:
        self.num_rounds = self.num_rounds * self._keep + 1
        self._tokens = self._tokens * self._keep + 1 + num_accepted
        self._drafts = self._drafts * self._keep + num_drafts
        self.novelty *= self._keep

    def restart(self) -> None:
        """Forget what rounds came to, but not that they were."""
        self.num_rounds = self._tokens = self._drafts = 0.0

    @property
    def mean_tokens(self) -> float:
        """Tokens of a round, the sampled one included; 1 before the first round."""
        return self._tokens / self.num_rounds if self.num_rounds else 1.0

    @property
    def mean_drafts(self) -> float:
        """Drafts that a round verified; 0 before the first round."""
        return self._drafts / self.num_rounds if self.num_rounds else 0.0


class FirstDrafts:
    """Tells a broken draft from a hard text: of many requests, no first draft is accepted."""

    def __init__(self) -> None:
        self._num_windows = 0
        self._num_accepted = 0
        self._num_needed = _BROKEN_WINDOWS
        self._request_ids: set[int] = set()

    def note(self, request_id: int, *, is_accepted: bool) -> bool:
        """Count a window; whether nearly all first drafts have been refused for long."""
        self._num_windows += 1
        self._num_accepted += is_accepted
        if self._num_accepted > _BROKEN_RATE * self._num_windows:
            self._num_windows = self._num_accepted = 0
            self._num_needed = _BROKEN_LATER_WINDOWS
            self._request_ids.clear()
        elif len(self._request_ids) < _BROKEN_REQUESTS:
            self._request_ids.add(request_id)
        return self._num_windows >= self._num_needed and len(self._request_ids) >= _BROKEN_REQUESTS

    def describe(self) -> str:
        return (
            f"of the first drafts of {self._num_windows} windows in a row, of at least "
            f"{_BROKEN_REQUESTS} requests, {self._num_accepted} were accepted"
        )
