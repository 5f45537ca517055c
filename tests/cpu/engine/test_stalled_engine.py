"""A stall reaches every caller as the error that names it, and ends the engine."""

from pathlib import Path

import pytest

from stagecoach.errors import StalledError
from stagecoach.request import SamplingParams
from stagecoach.schedule.seniority import Seniority
from tests.cpu.engine.schedules import Ask, run, start_client


@pytest.mark.parametrize("pp", [1, 2])
def test_a_stalled_engine_ends_instead_of_hanging(
    pp: int, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = start_client(checkpoint, pipeline_parallel_size=pp)
    try:
        ask = Ask((1, 2, 3), SamplingParams(max_tokens=2, ignore_eos=True))
        assert len(run(client, [ask])[0].token_ids) == 2
        monkeypatch.setattr(Seniority, "find_start", lambda self: None)
        for _ in range(2):  # who comes later gets the same
            with pytest.raises(StalledError, match=r"request \d+\.0 \(waiting\) at 0 of 3 tokens"):
                run(client, [ask, ask])
    finally:
        client.close()
