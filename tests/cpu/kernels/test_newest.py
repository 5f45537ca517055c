"""Newest tokens, kept and filled in as a device's kernels do it, interpreted."""

from collections.abc import Callable

import pytest
import torch

from stagecoach.kernels.newest import cuda, fill_in_newest, note_newest

torch.set_num_threads(1)
pytestmark = pytest.mark.cpu


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("note", [note_newest, cuda.note_newest])
def test_what_was_chosen_is_kept_by_row(note: Callable[..., None]) -> None:
    newest_N = torch.arange(100, 400, dtype=torch.int32)
    rows_B = torch.full((300,), -1, dtype=torch.int32)
    rows_B[[0, 3, 299]] = int32(7, 299, 0)
    note(newest_N, rows_B, torch.arange(300, dtype=torch.int32))
    expected_N = torch.arange(100, 400, dtype=torch.int32)
    expected_N[[7, 299, 0]] = int32(0, 3, 299)
    assert torch.equal(newest_N, expected_N)


@pytest.mark.parametrize("fill_in", [fill_in_newest, cuda.fill_in_newest])
def test_a_chained_token_is_the_newest_of_its_row(fill_in: Callable[..., None]) -> None:
    """Known ids stay, and so does what is nobody's."""
    token_ids_T = int32(5, -1, 0, -1, -1, 9, *[0] * 300, -1)
    segment_T = int32(0, 1, 2, 3, -1, -1, *[-1] * 300, 4)
    newest_N = int32(11, 22, 33, 44)
    fill_in(token_ids_T, segment_T, int32(1, 3, 0, 2, 0), newest_N)
    assert token_ids_T.tolist() == [5, 44, 0, 33, -1, 9, *[0] * 300, 11]
    assert newest_N.tolist() == [11, 22, 33, 44]


def test_nothing_is_no_fault() -> None:
    for module in (cuda.note_newest, note_newest):
        module(int32(1), int32(), int32())
    for module in (cuda.fill_in_newest, fill_in_newest):
        module(int32(), int32(), int32(0), int32(1))
