"""However an engine ends, everybody who waits is told why, and no process stays."""

import json
import os
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from stagecoach import LLM, SamplingParams
from stagecoach.errors import (
    CapacityError,
    CheckpointError,
    EngineDeadError,
    RequestError,
    WorkerDiedError,
)
from tests.e2e.process_watch import Watch
from tests.small_engine import OPTIONS, process_engine, write_small_model

# Longer than anything here waits: it ends only because the engine does.
LONG = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True, n=2)
LIMIT_SECONDS = 5.0


def stream_until_it_breaks(llm: LLM, begun: threading.Barrier) -> None:
    for number, _ in enumerate(iter_for_ever(llm)):
        if number == 0:
            begun.wait(timeout=30)


def wait_for_windows(llm: LLM) -> None:
    """Until some have been verified; as requests never pause, others then are in flight."""
    deadline = time.monotonic() + 30
    while (stats := llm.stats().speculation) is None or stats.num_windows < 10:
        assert time.monotonic() < deadline, stats
        time.sleep(0.01)


def iter_for_ever(llm: LLM):  # type: ignore[no-untyped-def]
    while True:
        yield from llm.stream([1, 2, 3], LONG)


@pytest.mark.parametrize(
    ("victim", "is_drafted"),
    [
        ("worker[0,0]", False),
        ("worker[1,1]", False),
        ("engine loop", False),
        ("worker[0,1]", True),
        ("worker[1,0]", True),
        ("worker[1,1]", True),
    ],
)
def test_a_killed_process_ends_the_engine_and_is_named(
    folder: Path, draft_folder: Path, victim: str, *, is_drafted: bool
) -> None:
    """Also while windows of drafts are in flight."""
    speculation = {"model": str(draft_folder), "confidence_schedule": False, "watchdog": False}
    llm = process_engine(
        folder,
        pipeline_parallel_size=2,
        tensor_parallel_size=2,
        speculative_config=speculation if is_drafted else None,
    )
    process_ids = llm.client.engine.process_ids
    watch = Watch(process_ids.values())
    begun = threading.Barrier(4)
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(stream_until_it_breaks, llm, begun) for _ in range(3)]
        begun.wait(timeout=30)
        if is_drafted:
            wait_for_windows(llm)
        killed_at = time.monotonic()
        os.kill(process_ids[victim], signal.SIGKILL)
        for future in waiting:
            error = future.exception(timeout=LIMIT_SECONDS)
            assert isinstance(error, WorkerDiedError)
            assert f"{victim} was killed by SIGKILL" in str(error)
        assert time.monotonic() - killed_at < LIMIT_SECONDS
    # All others end although nobody closes anything.
    assert watch.running_after(LIMIT_SECONDS) == set()
    watch.close()
    for call in (lambda: llm.generate("hello"), llm.stats, lambda: next(llm.stream("hello"))):
        with pytest.raises(WorkerDiedError, match="was killed by SIGKILL"):
            call()
    assert isinstance(llm.client.failure, WorkerDiedError)
    llm.close()
    llm.close()


def test_a_worker_that_hangs_ends_the_engine(folder: Path) -> None:
    llm = process_engine(folder, pipeline_parallel_size=2, execute_model_timeout_seconds=1)
    process_ids = llm.client.engine.process_ids
    watch = Watch(process_ids.values())
    os.kill(process_ids["worker[1,0]"], signal.SIGSTOP)
    stopped_at = time.monotonic()
    with pytest.raises(WorkerDiedError, match="execute-model-timeout-seconds"):
        llm.generate("hello", LONG)
    # Its sockets' folder is gone though nobody has closed it.
    while llm.client.engine.folder.exists():
        assert time.monotonic() - stopped_at < LIMIT_SECONDS
        time.sleep(0.01)
    assert time.monotonic() - stopped_at < LIMIT_SECONDS
    llm.close()
    assert watch.running_after(LIMIT_SECONDS) == set()
    watch.close()


def test_the_processes_end_with_an_owner_that_is_killed(
    folder: Path, temporary_folder: Path
) -> None:
    program = (
        "import json, sys\n"
        "from stagecoach import LLM, SamplingParams\n"
        f"llm = LLM({str(folder)!r}, pipeline_parallel_size=2, **{OPTIONS!r})\n"
        "stream = llm.stream([1, 2, 3], SamplingParams(max_tokens=100, n=8, ignore_eos=True))\n"
        "next(stream)\n"
        "print(json.dumps(llm.client.engine.process_ids), flush=True)\n"
        "for _ in stream: pass\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(temporary_folder)},
    ) as owner:
        assert owner.stdout is not None
        process_ids = json.loads(owner.stdout.readline())
        assert len(process_ids) == 3
        assert len(list(temporary_folder.glob("stagecoach-*"))) == 1
        watch = Watch(process_ids.values())
        owner.kill()
        assert watch.running_after(LIMIT_SECONDS) == set()
        watch.close()


def test_closing_ends_the_callers_that_wait(folder: Path) -> None:
    llm = process_engine(folder, pipeline_parallel_size=2)
    watch = Watch(llm.client.engine.process_ids.values())
    begun = threading.Barrier(3)
    with ThreadPoolExecutor(2) as pool:
        waiting: list[Future[None]] = [
            pool.submit(stream_until_it_breaks, llm, begun) for _ in range(2)
        ]
        begun.wait(timeout=30)
        llm.close()
        assert watch.running_after(0.1) == set()
        for future in waiting:
            error = future.exception(timeout=LIMIT_SECONDS)
            assert isinstance(error, EngineDeadError) and "closed" in str(error)
    watch.close()
    llm.close()
    with pytest.raises(EngineDeadError, match="closed"):
        llm.generate("hello")


def test_a_refused_request_harms_nobody(folder: Path) -> None:
    with process_engine(folder) as llm:
        good = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
        expected = llm.generate("hello", good)[0].outputs
        # Each of these would reach the loop as a message that it cannot read.
        for bad in (
            SamplingParams(stop=3),  # type: ignore[arg-type]
            SamplingParams(stop_token_ids=("x",)),  # type: ignore[arg-type]
            SamplingParams(ignore_eos=3),  # type: ignore[arg-type]
            SamplingParams(temperature=2**70),
        ):
            with pytest.raises(RequestError):
                llm.generate("hello", bad)
        assert llm.generate("hello", good)[0].outputs == expected


def broken(folder: Path, tensor: str) -> Path:
    """The shard that holds a tensor."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    [name] = [name for name in index["weight_map"] if name.endswith(tensor)]
    return folder / index["weight_map"][name]


LAST_LAYER = "layers.3.self_attn.o_proj.weight"


def drop(shard: Path) -> None:
    tensors = load_file(shard)
    save_file({name: t for name, t in tensors.items() if not name.endswith(LAST_LAYER)}, shard)


def reshape(shard: Path) -> None:
    tensors = load_file(shard)
    name = next(name for name in tensors if name.endswith(LAST_LAYER))
    tensors[name] = tensors[name][:-1].contiguous()
    save_file(tensors, shard)


def truncate(shard: Path) -> None:
    with shard.open("r+b") as file:
        (header,) = struct.unpack("<Q", file.read(8))
        file.truncate(8 + header + 10)


def scramble(shard: Path) -> None:
    shard.write_bytes(b"\x00" * 100)


@pytest.mark.parametrize("damage", [drop, reshape, truncate, scramble])
def test_a_damaged_checkpoint_fails_the_start(tmp_path: Path, damage) -> None:  # type: ignore[no-untyped-def]
    folder = write_small_model(tmp_path / "model")
    shard = broken(folder, LAST_LAYER)
    damage(shard)
    began = time.monotonic()
    with pytest.raises(CheckpointError) as caught:
        process_engine(folder, pipeline_parallel_size=2, tensor_parallel_size=2)
    assert time.monotonic() - began < 10
    assert "Traceback" not in str(caught.value)
    named = LAST_LAYER if damage in (drop, reshape) else shard.name
    assert named in str(caught.value)


def test_too_little_memory_fails_the_start_with_the_numbers(folder: Path) -> None:
    with pytest.raises(CapacityError) as caught:
        process_engine(folder, pipeline_parallel_size=2, kv_cache_memory_bytes=10_000)
    text = str(caught.value)
    assert "may use 10000 bytes (--kv-cache-memory-bytes)" in text
    assert "7 state slots" in text and "--max-num-seqs=6" in text
    assert "It fits with --kv-cache-memory-bytes=" in text
    # And what it advises works.
    advised = int(text.partition("It fits with --kv-cache-memory-bytes=")[2].split()[0])
    with process_engine(folder, pipeline_parallel_size=2, kv_cache_memory_bytes=advised) as llm:
        assert llm.generate([1] * 120, SamplingParams(max_tokens=8, ignore_eos=True))


def test_two_engines_run_side_by_side_and_one_after_the_other(folder: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    with process_engine(folder) as first, process_engine(folder) as second:
        expected = first.generate("hello", params)[0].outputs
        assert second.generate("hello", params)[0].outputs == expected
        first.close()
        assert second.generate("hello", params)[0].outputs == expected


def test_a_long_path_for_temporary_files_is_no_obstacle(
    folder: Path, temporary_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of Unix sockets end at 107 bytes."""
    deep = temporary_folder / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with process_engine(folder) as llm:
        assert llm.generate("hello", SamplingParams(max_tokens=1))
