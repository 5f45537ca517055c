"""Numbers that stand for equal pieces of memory: taken, freed, and counted.

Owns which numbers are free. Knows neither what they stand for nor who holds them.
"""

from collections.abc import Iterable, Sequence


class IdPool:
    """The numbers first..end-1, each free or taken.

    The number freed last is handed out first: constant time, the same order on every run, and
    the memory it stands for is the likeliest to be in a cache still. A fresh pool hands out
    the lowest numbers first.
    """

    def __init__(self, noun: str, first: int, end: int) -> None:
        """`noun` names one piece in error messages."""
        assert 0 <= first <= end, f"no such range of {noun}s: [{first},{end})"
        self._noun = noun
        self._first = first
        self._free = list(range(end - 1, first - 1, -1))
        self._is_taken = bytearray(end)

    @property
    def num_total(self) -> int:
        """Numbers that can be handed out."""
        return len(self._is_taken) - self._first

    @property
    def num_free(self) -> int:
        return len(self._free)

    def is_free(self, number: int) -> bool:
        return not self._is_taken[number]

    @property
    def taken(self) -> bytes:
        """One byte a number of the range: 1 where it is taken."""
        return bytes(self._is_taken[self._first :])

    def take(self, count: int) -> list[int]:
        """Hand out `count` numbers; the caller has looked at `num_free`."""
        assert 0 <= count <= len(self._free), (
            f"{count} {self._noun}s wanted, {len(self._free)} of {self.num_total} free"
        )
        taken = [self._free.pop() for _ in range(count)]
        for number in taken:
            self._is_taken[number] = True
        return taken

    def free(self, numbers: Iterable[int]) -> None:
        """Give numbers back; they may be handed out again at once."""
        for number in numbers:
            assert self._is_taken[number], f"{self._noun} {number} freed while free"
            self._is_taken[number] = False
            self._free.append(number)

    def check_integrity(self, owned: Iterable[Sequence[int]]) -> None:
        """Prove that free + owned = total and that nothing is held twice.

        Args:
            owned: the numbers of each holder.

        Raises:
            AssertionError: with the counts, and the numbers that are lost or held twice.
        """
        held = [number for numbers in owned for number in numbers]
        counts = (
            f"{self._noun}s: {len(self._free)} free + {len(held)} owned, {self.num_total} in all"
        )
        twice = (
            sorted({number for number in held if held.count(number) > 1})
            if (len(set(held)) < len(held))
            else []
        )
        assert not twice, f"{counts}; owned twice: {twice}"
        both = sorted(set(held) & set(self._free))
        assert not both, f"{counts}; owned and free: {both}"
        lost = sorted(set(range(self._first, len(self._is_taken))) - {*held, *self._free})
        assert not lost, f"{counts}; lost: {lost}"
        assert len(held) + len(self._free) == self.num_total, counts
