"""Without peer memory everything goes through the collective library, on every worker."""

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from stagecoach.pipeline import peer_memory
from stagecoach.pipeline.peer_memory import PeerMemory, share_memory

pytestmark = pytest.mark.cpu

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/r", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def memory_of_two(
    num_bytes: int, ranks: tuple[int, int] | None = None
) -> tuple[PeerMemory, Tensor]:
    regions = torch.zeros(2, num_bytes, dtype=torch.uint8)

    def get_buffer(rank: int, sizes: tuple[int, ...], dtype: torch.dtype, offset: int) -> Tensor:
        return regions[rank].view(dtype)[offset : offset + sizes[0]]

    addresses = [region.data_ptr() for region in regions]
    handle = SimpleNamespace(rank=1, buffer_ptrs=addresses, get_buffer=get_buffer)
    return PeerMemory(regions[1], handle, ranks), regions


@pytest.mark.usefixtures("one_rank")
def test_where_it_fails_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(num_bytes: int, device: torch.device, hosts: None) -> PeerMemory:
        raise RuntimeError("no path between the GPUs\nat some line of C++")

    monkeypatch.setattr(peer_memory, "_rendezvous", refuse)
    with caplog.at_level(logging.WARNING):
        assert share_memory(1024, DEVICE) is None
    [line] = caplog.messages
    assert line == "GPUs exchange through NCCL alone: no path between the GPUs"


@pytest.mark.usefixtures("one_rank")
def test_memory_is_never_shared_where_multicast_is_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from torch._C import _distributed_c10d

    able = SimpleNamespace(has_multicast_support=lambda device_type, index: True)
    monkeypatch.setattr(_distributed_c10d, "_SymmetricMemory", able)
    with caplog.at_level(logging.WARNING):
        assert share_memory(1024, DEVICE) is None
    assert "multicast is not turned off" in caplog.text


def test_a_view_lies_where_it_was_asked_for() -> None:
    memory, regions = memory_of_two(1024)
    for rank in (0, 1):
        memory.view(rank, 256, 8, torch.int32).fill_(rank + 5)
        assert regions[rank].view(torch.int32).nonzero().flatten().tolist() == list(range(64, 72))
    assert memory.addresses[1] - memory.addresses[0] == 1024
    with pytest.raises(AssertionError, match="bytes up to 1028 of 1024"):
        memory.view(0, 1020, 2, torch.int32)


def test_ranks_of_another_host_keep_their_numbers() -> None:
    memory, regions = memory_of_two(1024, ranks=(4, 5))
    assert memory.rank == 5 and memory.addresses[4] == regions[0].data_ptr()
    memory.view(4, 0, 8, torch.int32).fill_(7)
    assert regions[0].view(torch.int32)[:8].tolist() == [7] * 8 and not regions[1].any()
