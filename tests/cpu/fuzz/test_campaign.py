"""A run over many scripts: what it counts, what it passes over, and when it ends."""

from pathlib import Path

import pytest

from stagecoach.errors import CapacityError, ConfigError
from stagecoach.fuzz.campaign import Campaign, Failure, Limits
from stagecoach.fuzz.check import Finding
from stagecoach.fuzz.draw import Given
from stagecoach.fuzz.oracle import Oracle
from stagecoach.fuzz.play import Outcome, Played, Player
from stagecoach.fuzz.script import Script, read
from stagecoach.fuzz.workers import Layouts


class FakePlayer:
    """Refuses and fails as it is told, script by script; anything else is in order."""

    def __init__(self, refused: set[int], failing: set[int]) -> None:
        self.oracle = Oracle(Layouts())
        self.scripts: list[Script] = []
        self._refused, self._failing = refused, failing

    def play(self, script: Script) -> Outcome:
        index = len(self.scripts)
        self.scripts.append(script)
        if index in self._refused:
            raise CapacityError(f"script {index} needs more memory")
        finding = Finding(f"kind {index}", "wrong") if index in self._failing else None
        return Outcome([Played() for _ in script.requests], None, finding)


def test_a_script_that_the_options_refuse_is_passed_over(given: Given, tmp_path: Path) -> None:
    player = FakePlayer({0, 2, 3}, set())
    campaign = Campaign(given, 5, player, tmp_path)
    campaign.run(Limits(schedules=3), lambda _: None, lambda _: None)
    assert len(player.scripts) == 6
    assert campaign.totals.schedules == 3 and campaign.totals.mismatches == 0
    ran = [player.scripts[index] for index in (1, 4, 5)]
    assert campaign.totals.requests == sum(len(script.requests) for script in ran)


@pytest.mark.parametrize("limits", [Limits(schedules=1), Limits(seconds=0.05)])
def test_options_that_nothing_fits_are_an_error(
    limits: Limits, given: Given, tmp_path: Path
) -> None:
    campaign = Campaign(given, 5, FakePlayer(set(range(100_000)), set()), tmp_path)
    with pytest.raises(ConfigError, match="needs more memory"):
        campaign.run(limits, lambda _: None, lambda _: None)


def test_enough_failures_end_it_and_each_is_written_down(given: Given, tmp_path: Path) -> None:
    player = FakePlayer({1}, {0, 3, 4})
    campaign = Campaign(given, 5, player, tmp_path)
    failures: list[Failure] = []
    limits = Limits(schedules=50, mismatches=2, shrink_seconds=0.0)
    campaign.run(limits, lambda _: None, failures.append)
    assert [failure.name for failure in failures] == ["fuzz-5-0", "fuzz-5-3"]
    assert [read(failure.path) for failure in failures] == [player.scripts[0], player.scripts[3]]
    assert campaign.totals.mismatches == 2 and campaign.totals.schedules == 3


@pytest.mark.parametrize(
    "options",
    [{"kv_offloading_size": 0.0003}, {"num_gpu_blocks_override": 4}, {"kv_cache_memory_bytes": 9}],
)
def test_a_player_refuses_what_cannot_be_and_calls_it_no_finding(
    options: dict[str, float], model: str, player: Player
) -> None:
    script = Script(
        model=model,
        engine={"dtype": "float64", "max_model_len": 64, "block_size": 8}
        | {"enable_prefix_caching": False}
        | options,
        requests=(),
    )
    with pytest.raises(ConfigError):
        player.play(script)
