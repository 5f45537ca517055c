"""What every test stands on: markers by folder, one CPU thread, no GPU test without a GPU."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings

_TESTS = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--schemathesis-examples",
        type=int,
        help="random requests of each route and kind, instead of a few that are always the same",
    )


# Triton reads it once, when the first test module imports it.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_configure() -> None:
    # Tests compare sums to the last bit and share few cores with worker processes.
    torch.set_num_threads(1)
    # A busy machine is no failure; pytest's own timeout ends what hangs.
    settings.register_profile("shared cores", deadline=None)
    settings.load_profile("shared cores")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needs_gpu = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        kind = item.path.relative_to(_TESTS).parts[0]
        item.add_marker(kind)
        if kind == "gpu" and not torch.cuda.is_available():
            item.add_marker(needs_gpu)
