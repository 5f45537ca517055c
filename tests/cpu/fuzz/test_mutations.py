"""Planted bugs are found: each of the known kinds, within schedules of one seed."""

from types import MappingProxyType

import pytest

from stagecoach.fuzz.play import Player
from tests.cpu.fuzz.hunt import MOST_SCHEDULES, hunt
from tests.cpu.fuzz.mutations import MUTATIONS, Mutation

# The schedule that finds each, as the table of docs/fuzz.md has it; the search starts a little
# before it, so that the suite stays fast.
_FOUND_BY = MappingProxyType(
    {
        "replay": 2,
        "stale slot": 1,
        "no copy": 3,
        "short copy": 3,
        "salt": 12,
        "late save": 1,
        "convolution": 1,
        "draft rows": 6,
        "late draft rows": 14,
        "pin": 4,
        "one reader": 3,
        "deep hit": 1,
        "whole hit": 22,
        "tail": 1,
        "stop": 32,
        "kept replay": 5,
        "epoch": 38,
        "host record": 6,
        "store": 14,
        "host moves": 15,
        "leak": 1,
        "newest": 5,
        "mask rows": 8,
        "draft masks": 6,
    }
)
_MARGIN = 1


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_planted_bug_is_found(mutation: Mutation, model: str, draft: str, player: Player) -> None:
    first = max(0, _FOUND_BY.get(mutation.name, 1) - 1 - _MARGIN)
    found = hunt(mutation, model, draft, player, indices=range(first, first + MOST_SCHEDULES))
    assert found is not None, f"{mutation.what}: not found in {MOST_SCHEDULES} schedules"
    repaired = player.play(found.script).finding
    assert repaired is None, f"this is another bug: {repaired}"


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_bug_is_planted_and_gone_again(mutation: Mutation) -> None:
    """Each changes something, and nothing stays changed."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        mutation.plant(monkeypatch)
        changed = list(monkeypatch._setattr)
        assert changed
    for target, name, original in changed:
        current = target.__dict__.get(name) if isinstance(target, type) else getattr(target, name)
        assert current is original
