"""What a plan moves and clears in memory before it computes anything.

Owns the moves, what must hold among them, their text form, and the lists that cache memory
fills while a plan is made. Decides nothing and moves nothing.
"""

import re

import msgspec

from stagecoach.cache.page_pool import NULL_PAGE
from stagecoach.cache.state_slots import ZERO_SLOT


class PageCopy(msgspec.Struct, frozen=True, array_like=True):
    """The first `num_tokens` cache rows of page `source`, for page `target` to go on from."""

    source: int
    target: int
    num_tokens: int


class Transfer(msgspec.Struct, frozen=True, array_like=True):
    """A page or a slot of the device and one of the host tier; which way is the field's."""

    device: int
    host: int


class MemoryMoves(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What is moved and cleared before anything of a plan is computed, in the order of fields.

    So evicted memory is stored before its new owner's is scrubbed or loaded, and a page is
    copied before anybody writes to it.
    """

    store_pages: tuple[Transfer, ...] = ()  # device -> host
    store_slots: tuple[Transfer, ...] = ()
    # Filled with NaN in debug mode, which lists all that was freed; else with zeros, and only
    # what a request with values that are not finite has left.
    scrub_pages: tuple[int, ...] = ()
    scrub_slots: tuple[int, ...] = ()
    load_pages: tuple[Transfer, ...] = ()  # host -> device
    load_slots: tuple[Transfer, ...] = ()
    copies: tuple[PageCopy, ...] = ()

    def __post_init__(self) -> None:
        for store, scrub, load in (
            (self.store_pages, self.scrub_pages, self.load_pages),
            (self.store_slots, self.scrub_slots, self.load_slots),
        ):
            loaded = [transfer.device for transfer in load]
            assert len(set(loaded)) == len(loaded), f"loaded twice: {self}"
            stored = [transfer.host for transfer in store]
            assert len(set(stored)) == len(stored), f"stored over each other: {self}"
            lost = {*stored} & {transfer.host for transfer in load}
            assert not lost, f"stored over before it is loaded, {sorted(lost)}: {self}"
            assert not {NULL_PAGE, ZERO_SLOT} & {*loaded, *scrub}, f"writes what is zero: {self}"
        filled = [transfer.device for transfer in self.load_pages]
        filled += [copy.target for copy in self.copies]
        assert len(set(filled)) == len(filled), f"a page filled twice: {self}"
        for copy in self.copies:
            assert copy.num_tokens > 0 and copy.target != NULL_PAGE, f"bad copy: {self}"
            assert copy.source not in self.scrub_pages, f"copies what was scrubbed: {self}"
            assert copy.source not in filled, f"copies what this plan fills: {self}"

    def __str__(self) -> str:
        def pairs(transfers: "tuple[Transfer, ...]") -> str:
            return ",".join(f"{item.device}:{item.host}" for item in transfers) or "-"

        copies = ",".join(f"{c.source}>{c.target}*{c.num_tokens}" for c in self.copies) or "-"
        return (
            f"store pages {pairs(self.store_pages)} slots {pairs(self.store_slots)}"
            f"  scrub pages {_numbers(self.scrub_pages)} slots {_numbers(self.scrub_slots)}"
            f"  load pages {pairs(self.load_pages)} slots {pairs(self.load_slots)}"
            f"  copy {copies}"
        )

    @staticmethod
    def parse(text: str) -> "MemoryMoves":
        """Read back what `str(moves)` printed.

        Raises:
            ValueError: a text that is not of that form.
        """
        match = _MOVES.fullmatch(text)
        if match is None:
            raise ValueError(f"not moves of memory: {text!r}")

        def groups(name: str) -> list[list[int]]:
            found = match[name]
            return (
                []
                if found == "-"
                else [[*map(int, re.findall(r"\d+", g))] for g in found.split(",")]
            )

        return MemoryMoves(
            store_pages=tuple(Transfer(*pair) for pair in groups("store_pages")),
            store_slots=tuple(Transfer(*pair) for pair in groups("store_slots")),
            scrub_pages=tuple(number for [number] in groups("scrub_pages")),
            scrub_slots=tuple(number for [number] in groups("scrub_slots")),
            load_pages=tuple(Transfer(*pair) for pair in groups("load_pages")),
            load_slots=tuple(Transfer(*pair) for pair in groups("load_slots")),
            copies=tuple(PageCopy(*triple) for triple in groups("copies")),
        )


NO_MOVES = MemoryMoves()

_MOVES = re.compile(
    r"store pages (?P<store_pages>\S+) slots (?P<store_slots>\S+)"
    r"  scrub pages (?P<scrub_pages>\S+) slots (?P<scrub_slots>\S+)"
    r"  load pages (?P<load_pages>\S+) slots (?P<load_slots>\S+)  copy (?P<copies>\S+)"
)


def _numbers(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers)) or "-"


class MovesDraft:
    """What is moved and cleared so far; a number that is cleared twice is cleared once."""

    def __init__(self) -> None:
        self.store_pages: list[Transfer] = []
        self.store_slots: list[Transfer] = []
        self.scrub_pages: set[int] = set()
        self.scrub_slots: set[int] = set()
        self.load_pages: list[Transfer] = []
        self.load_slots: list[Transfer] = []
        self.copies: list[PageCopy] = []

    def finish(self) -> MemoryMoves:
        """The moves, for the plan."""
        return MemoryMoves(
            store_pages=tuple(self.store_pages),
            store_slots=tuple(self.store_slots),
            scrub_pages=tuple(sorted(self.scrub_pages)),
            scrub_slots=tuple(sorted(self.scrub_slots)),
            load_pages=tuple(self.load_pages),
            load_slots=tuple(self.load_slots),
            copies=tuple(self.copies),
        )
