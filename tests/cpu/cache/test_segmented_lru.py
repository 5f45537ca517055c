"""What was used once goes before what was used again, each oldest first."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagecoach.cache.segmented_lru import SegmentedLru


@dataclass(eq=False)
class Item:
    name: str
    is_protected: bool = False

    def __str__(self) -> str:
        return self.name


def filled(names: str, capacity: int = 5) -> SegmentedLru[Item]:
    """Capital letters are protected."""
    lru: SegmentedLru[Item] = SegmentedLru(capacity)
    for name in names:
        lru.add(Item(name, name.isupper()))
    return lru


def order(lru: SegmentedLru[Item]) -> str:
    return "".join(item.name for item in lru)


def test_probation_goes_first_and_the_oldest_of_it() -> None:
    lru = filled("AbCd")
    assert order(lru) == "bdAC"
    item = lru.least()
    assert item is not None and item.name == "b"
    lru.remove(item)
    assert order(lru) == "dAC" and item not in lru


def test_a_flood_of_new_entries_leaves_the_protected_alone() -> None:
    lru = filled("AB")
    for name in "cdefgh":
        lru.add(Item(name))
        evicted = lru.least()
        assert evicted is not None and evicted.name == name
        lru.remove(evicted)
    assert order(lru) == "AB"


def test_the_protected_have_a_limit_and_the_oldest_goes_back() -> None:
    lru = filled("ABCDxE")
    assert order(lru) == "xABCDE"
    oldest = list(lru)[1]
    assert oldest.name == "A" and not oldest.is_protected
    lru.remove(oldest)
    assert order(lru) == "xBCDE"


def test_least_in_probation_spares_the_protected() -> None:
    lru = filled("A")
    assert lru.least(in_probation=True) is None
    protected = lru.least()
    assert protected is not None and protected.name == "A"
    assert filled("").least() is None


def test_an_entry_stands_in_it_once() -> None:
    lru: SegmentedLru[Item] = SegmentedLru(2)
    item = Item("a")
    lru.add(item)
    with pytest.raises(AssertionError, match="in the queue already"):
        lru.add(item)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=40))
def test_every_entry_leaves_exactly_once(events: list[tuple[bool, bool]]) -> None:
    lru: SegmentedLru[Item] = SegmentedLru(10)
    inside: set[Item] = set()
    for is_add, is_protected in events:
        if is_add and len(inside) < 10:
            item = Item("x", is_protected)
            lru.add(item)
            inside.add(item)
        elif (least := lru.least()) is not None:
            lru.remove(least)
            inside.remove(least)
        assert set(lru) == inside and len(lru) == len(inside)
        assert sum(item.is_protected for item in inside) <= 8


@pytest.mark.parametrize("is_protected", [True, False])
def test_what_is_demoted_goes_next(*, is_protected: bool) -> None:
    lru: SegmentedLru[Item] = SegmentedLru(10)
    first, last = Item("a"), Item("b", is_protected)
    lru.add(first)
    lru.add(last)
    lru.demote(last)
    assert list(lru) == [last, first] and not last.is_protected and len(lru) == 2
