"""Filling parameters on the host: buffers that are used again, and no way to a device."""

import contextlib
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from stagecoach.model import weight_upload
from stagecoach.model.weight_upload import BUFFER_BYTES, WeightUpload

pytestmark = pytest.mark.cpu


def test_on_the_host_tensors_stay_where_they_are() -> None:
    upload = WeightUpload(torch.device("cpu"))
    upload.provide(2)
    buffer = upload.take(16)
    source = buffer.bytes[:16].view(torch.float32)
    source.copy_(torch.arange(4.0))
    with upload.bring((source,), buffer) as (brought,):
        assert brought is source
    upload.finish()


def test_buffers_come_round() -> None:
    upload = WeightUpload(torch.device("cpu"))
    upload.provide(3)
    first = [upload.take(8) for _ in range(3)]
    assert len(set(map(id, first))) == 3
    assert [upload.take(8) for _ in range(3)] == first


def test_a_row_that_does_not_fit_gets_a_buffer_of_its_own() -> None:
    upload = WeightUpload(torch.device("cpu"))
    upload.provide(2)
    assert len(upload.take(8).bytes) == BUFFER_BYTES
    upload.take(8)
    assert len(upload.take(BUFFER_BYTES + 1).bytes) == BUFFER_BYTES + 1


@pytest.fixture
def to_a_device(monkeypatch: pytest.MonkeyPatch) -> WeightUpload:
    """An upload that copies, as to a GPU, but to other memory of the host."""
    cuda = SimpleNamespace(
        stream=lambda stream: contextlib.nullcontext(),
        current_stream=MagicMock(),
        Event=lambda: MagicMock(),
        Stream=lambda device: MagicMock(),
    )
    monkeypatch.setattr(weight_upload.torch, "cuda", cuda)
    empty = torch.empty
    monkeypatch.setattr(
        weight_upload.torch, "empty", lambda size, *, dtype, pin_memory: empty(size, dtype=dtype)
    )
    to = torch.Tensor.to
    monkeypatch.setattr(
        torch.Tensor, "to", lambda tensor, device, non_blocking: to(tensor, device, copy=True)
    )
    upload = WeightUpload(SimpleNamespace(type="cuda"))  # type: ignore[arg-type]
    upload._device = torch.device("cpu")
    upload.provide(2)
    return upload


def test_what_shares_a_buffer_travels_in_one_copy(to_a_device: WeightUpload) -> None:
    for number in range(5):
        buffer = to_a_device.take(64)
        buffer.num_filled = 64
        first = buffer.bytes[:16].view(torch.float32)
        second = buffer.bytes[32:38].view(torch.bfloat16).view(3, 1)
        first.copy_(torch.arange(4.0) + number)
        second.copy_(torch.tensor([[1.0], [2.0], [number]]))
        with to_a_device.bring((first,), buffer) as (one,):
            pass
        with to_a_device.bring((second, first), buffer) as (other, again):
            assert torch.equal(one, first) and torch.equal(other, second)
        assert again.data_ptr() == one.data_ptr() != first.data_ptr()
        assert one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    to_a_device.finish()
