"""Operators run without gradients on numbers that are the same in every run."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def fixed_numbers_without_gradients() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield
