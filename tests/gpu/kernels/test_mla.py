"""Latent and block attention on a GPU against the references: `bench/kernels/mla_cases`."""

import pytest
import torch

from bench.kernels.mla_cases import check_cases
from bench.kernels.timing import Report


@pytest.mark.parametrize("number", range(len(check_cases())))
def test_equals_the_reference(number: int) -> None:
    torch.manual_seed(number)
    report = Report()
    check_cases()[number](report)
    assert report.num_failed == 0
