"""Where workers meet: a name for each generation, and nothing is left of earlier ones."""

from pathlib import Path

import pytest

from stagecoach.pipeline.rendezvous import Rendezvous

pytestmark = pytest.mark.cpu


def test_a_generation_has_a_file_of_its_own_and_earlier_ones_can_go(tmp_path: Path) -> None:
    rendezvous = Rendezvous(file=tmp_path / "rendezvous", timeout_seconds=5.0)
    stores = [rendezvous.store(generation, 2) for generation in range(3)]
    for number, store in enumerate(stores):
        store.set("key", str(number))
    assert [store.get("key") for store in stores] == [b"0", b"1", b"2"]
    kept = tmp_path / "commands"
    kept.touch()
    rendezvous.forget_earlier(2)
    assert set(tmp_path.iterdir()) == {tmp_path / "rendezvous-2", kept}
    assert stores[2].get("key") == b"2"
    Rendezvous(address=("127.0.0.1", 1), timeout_seconds=5.0).forget_earlier(2)
