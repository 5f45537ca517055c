"""Numbers between host and device, where both are the CPU."""

import pytest
import torch

from stagecoach.runner.transfer import Download, to_device, upload

torch.set_num_threads(1)
pytestmark = pytest.mark.cpu

CPU = torch.device("cpu")


def test_nothing_is_copied_on_a_host() -> None:
    tensor = torch.arange(3)
    assert to_device(tensor, CPU) is tensor
    download = Download(tensor)
    assert download.is_ready() and download.read() is tensor


def test_numbers_keep_their_type() -> None:
    assert upload([2**40, -1], torch.int64, CPU).tolist() == [2**40, -1]
    rows = upload([[0.5, 1e-300], [2.0, 0.0]], torch.float64, CPU)
    assert rows.dtype == torch.float64 and rows.tolist() == [[0.5, 1e-300], [2.0, 0.0]]
    assert upload([], torch.int64, CPU).shape == (0,)
