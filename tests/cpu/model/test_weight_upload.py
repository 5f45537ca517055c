"""Filling parameters on the host: buffers that are used again, and no way to a device."""

import pytest
import torch

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
