"""Filling parameters on the host: a plain copy, as it is without page-locked memory."""

import pytest
import torch

from stagecoach.model.weight_upload import WeightUpload

pytestmark = pytest.mark.cpu


def test_on_the_host_it_is_a_copy_that_converts() -> None:
    upload = WeightUpload()
    target = torch.zeros(3, 4, dtype=torch.float64)
    source = torch.randn(3, 4).bfloat16()
    upload.copy(target, source)
    upload.finish()
    assert torch.equal(target, source.double())
