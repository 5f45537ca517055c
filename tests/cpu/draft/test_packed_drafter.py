"""The drafter as a device runs it: rows and blocks of fixed capacities, nothing waiting."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cpu.draft.draft_runs import HIDDEN, Stage, greedy, make_requests
from tests.cpu.draft.packed_runs import (
    ANCHORS,
    CONFIGS,
    LENGTHS,
    SHAPE,
    packed_blocks,
    packed_step,
)

torch.set_num_threads(1)
pytestmark = pytest.mark.cpu

WriteDraft = Callable[[dict[str, Any]], Path]


@pytest.mark.parametrize("name", CONFIGS)
def test_rows_and_blocks_are_those_of_the_other_form(name: str, write_draft: WriteDraft) -> None:
    folder = write_draft(CONFIGS[name])
    theirs = Stage.read(folder, torch.float32, num_draft_tokens=3)
    requests = make_requests(LENGTHS, len(SHAPE.taps))
    theirs.write_all(requests)
    expected = theirs.propose(requests, ANCHORS)

    ours = Stage.read(folder, torch.float32, num_draft_tokens=3)
    (drafter,), (cache,) = ours.drafters, ours.caches
    taps_TNH = torch.cat([request.taps for request in requests]).to(torch.float32)
    idle_TNH = torch.full((2, len(SHAPE.taps), HIDDEN), torch.nan)
    with torch.inference_mode():
        drafter.write_context(torch.cat((taps_TNH, idle_TNH)), packed_step(requests, 2), cache)
        torch.testing.assert_close(cache, theirs.caches[0], rtol=1e-4, atol=1e-5, equal_nan=True)
        proposal = drafter.propose(packed_blocks(requests, 1), cache, greedy)
    assert proposal is not None and proposal.confidences_NK is not None
    assert expected.confidences_NK is not None
    assert proposal.token_ids_NK[:3].tolist() == expected.token_ids_NK.tolist()
    torch.testing.assert_close(
        proposal.confidences_NK[:3], expected.confidences_NK, rtol=1e-4, atol=1e-5
    )
