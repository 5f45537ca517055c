"""Links between the processes of two GPUs: `bench/links.py` checks them, and this runs it.

Sums against exact ones, eager and captured, over peer memory and NCCL; the hand-off of real fields
while one stage runs ahead and rewrites what it sent; and that both processes end.
"""

import os

import pytest
import torch

from bench.links import run_layout
from stagecoach.pipeline.topology import Topology

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.mark.parametrize(
    "topology",
    [Topology(num_stages=1, tp_size=2), Topology(num_stages=2, tp_size=1)],
    ids=["tp2", "pp2"],
)
def test_two_gpus(topology: Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setitem(os.environ, name, "lo")
    monkeypatch.setitem(os.environ, "NCCL_NVLS_ENABLE", "0")
    monkeypatch.setitem(os.environ, "TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    assert run_layout(topology, measures=False)
