"""Engines whose ranks others start: torchrun, and a Ray cluster of two nodes on this machine."""

import importlib.util
import json
import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stagecoach import SamplingParams
from tests.e2e.process_watch import Watch
from tests.e2e.two_hosts import Host, complete
from tests.small_engine import OPTIONS, thread_engine

_PROMPT = [1, 2, 3]
_LIMIT_SECONDS = 120.0
_END_SECONDS = 20.0
# One stage fits a node; the server, which holds none, is on the first.
_RAY_PROGRAM = """
import json, sys
import ray
from ray.cluster_utils import Cluster
from stagecoach import LLM, SamplingParams
from stagecoach.errors import HostLostError

folder, options, prompt, answers = json.loads(sys.argv[1])
answer = open(answers, "w", encoding="utf-8")
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
second = cluster.add_node(num_cpus=2)
ray.init(address=cluster.address, logging_level="error")
params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
llm = LLM(folder, show_progress=False, launcher="ray", **options)
[output] = llm.generate([prompt], params, use_tqdm=False)
print(json.dumps(output.outputs[0].token_ids), file=answer, flush=True)
cluster.remove_node(second, allow_graceful=False)
try:
    while True:
        llm.generate([prompt], params, use_tqdm=False)
except HostLostError as error:
    print(error, file=answer, flush=True)
llm.close()
ray.shutdown()
cluster.shutdown()
"""


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with thread_engine(folder) as llm:
        [output] = llm.generate([_PROMPT], params, use_tqdm=False)
    return list(output.outputs[0].token_ids)


def test_ranks_that_torchrun_starts(folder: Path, expected: list[int], tmp_path: Path) -> None:
    host = Host([], tmp_path)
    flags = [
        *("--dtype", OPTIONS["dtype"], "--max-model-len", "128", "--max-num-seqs", "6"),
        *("--num-threads", "1", "--block-size", "8", "--device", "cpu"),
    ]
    host.run(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "stagecoach", "serve", str(folder), "-pp", "2", "--launcher", "torchrun"),
        *(*flags, "--uds", str(host.socket)),
    )
    try:
        host.wait_until_ready()
        with host.client() as client:
            assert complete(client, folder, _PROMPT, max_tokens=12) == expected
        watch = Watch(host.process_ids())
        host.process.send_signal(signal.SIGTERM)
        assert watch.running_after(_END_SECONDS) == set()
        watch.close()
    finally:
        host.close()


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray")
def test_stages_on_two_nodes_of_a_ray_cluster(
    folder: Path, expected: list[int], tmp_path: Path
) -> None:
    """And the loss of one."""
    key = tmp_path / "host-key"
    key.write_text(secrets.token_hex(32), "utf-8")
    sizes = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "device": "cpu"}
    sizes["host_key_file"] = str(key)
    # Ray tells its own news on the usual ways.
    answer = tmp_path / "answer"
    given = json.dumps([str(folder), OPTIONS | sizes, _PROMPT, str(answer)])
    done = subprocess.run(
        [sys.executable, "-c", _RAY_PROGRAM, given],
        capture_output=True,
        text=True,
        timeout=_LIMIT_SECONDS,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    tokens, lost = answer.read_text("utf-8").splitlines()
    assert json.loads(tokens) == expected
    assert "stage actor" in lost
