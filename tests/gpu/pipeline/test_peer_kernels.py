"""The kernels of peer memory on one GPU, at the sizes in use: all regions lie on it."""

import pytest
import torch

from stagecoach.pipeline.peer_links import HopReceiver, HopSender, RegionLayout
from tests.peer_regions import Regions, Stage

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [2, 4])
def test_sums(size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, in rank order, rounded once; sizes that are no whole tile, word or program."""
    stage = Stage(size, monkeypatch, "cuda")
    for num_values in (1, 7, 2304, 18_432, 64 * 2304, 100_003, 500_000):
        parts = [torch.randn(num_values, device="cuda").to(dtype) * 2**rank for rank in range(size)]
        expected = torch.zeros(num_values, device="cuda")
        for part in parts:
            expected += part.float()
        given = [part.clone() for part in parts]
        for total in stage.exchange(
            lambda exchange, rank, given=given: exchange.all_reduce(given[rank])
        ):
            assert torch.equal(total, expected.to(dtype)), f"{num_values} values"


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((3, 40), torch.bfloat16), ((8, 40_960), torch.bfloat16), ((9, 3), torch.int64)],
)
def test_joins(shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(2, monkeypatch, "cuda")
    for _ in range(3):
        parts = [torch.randint(99, shape, device="cuda").to(dtype) for _ in range(2)]
        for joined in stage.exchange(
            lambda exchange, rank, parts=parts: exchange.all_gather(parts[rank])
        ):
            assert torch.equal(joined, torch.stack(parts))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_hops_captured_and_not(dtype: torch.dtype) -> None:
    layout = RegionLayout(1)
    regions = Regions(2, layout, "cuda")
    sender = HopSender(regions.of(0), 1, layout)  # type: ignore[arg-type]
    receiver = HopReceiver(regions.of(1), 0, layout)  # type: ignore[arg-type]
    tensors = [torch.randn(size, device="cuda").to(dtype) for size in (1, 2304, 3, 1_000_000)]
    received = [torch.full_like(tensor, float("nan")) for tensor in tensors]

    def send_and_receive() -> None:
        for tensor in tensors:
            sender.send(tensor)
        for into in received:
            receiver.receive(into)

    send_and_receive()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        send_and_receive()
    for turn in range(6):
        for tensor, into in zip(tensors, received, strict=True):
            tensor.fill_(turn)
            into.fill_(float("nan"))
        if turn % 2:
            send_and_receive()
        else:
            graph.replay()
        assert all(torch.equal(*pair) for pair in zip(tensors, received, strict=True))
