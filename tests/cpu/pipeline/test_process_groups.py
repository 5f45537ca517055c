"""What a library raises at a link: a broken neighbour, or what was wrong before."""

import pytest
import torch

from stagecoach.errors import WorkerDiedError
from stagecoach.pipeline.process_groups import naming_neighbours

pytestmark = pytest.mark.cpu


def test_a_broken_connection_is_a_neighbours_end() -> None:
    text = r"^the link to a neighbour broke: closed by peer$"
    with pytest.raises(WorkerDiedError, match=text), naming_neighbours():
        raise RuntimeError("closed by peer\nand a trace")


@pytest.mark.parametrize("kind", [torch.AcceleratorError, torch.OutOfMemoryError])
def test_a_kernel_that_failed_before_is_no_broken_link(kind: type[RuntimeError]) -> None:
    with pytest.raises(kind), naming_neighbours():
        raise kind("an illegal memory access was encountered")
