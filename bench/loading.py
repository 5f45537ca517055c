"""How much of what the disk gives does loading a checkpoint take?

Each round reads the files of a checkpoint twice, both times out of an empty page cache: raw, by as
many threads and in pieces as large as the loader's, and through `load_stage` into one worker. The
ratio is of the two in the same round. A checkpoint is made for the run unless one is given: the
shapes of Kimi-K3, smaller, with arbitrary values.

    scripts/bench loading --gib 2 --dtype bfloat16 --out bench/results/loading.md
"""

import argparse
import dataclasses
import os
import statistics
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from bench.report import machine_line
from stagecoach.checkpoint_folder import checkpoint_folder
from stagecoach.config.model import load_model_config
from stagecoach.config.quantization import QuantizationChoice
from stagecoach.model.parallel_linear import SingleRank
from stagecoach.model.read_ahead import NUM_THREADS
from stagecoach.model.sparse import published_layout, write_sparse_checkpoint
from stagecoach.model.tiny import TinyShape, kimi_k3_config
from stagecoach.model.weight_upload import PIECE_BYTES
from stagecoach.model.weights import load_stage
from stagecoach.pipeline.stage import whole_model

SHARD_BYTES = 2**29
BLOCK_BYTES = 2**26
# Of every layer: 64 experts of 1024 x 1024, packed, and attention of 16 heads of 128.
SHAPE = TinyShape(
    hidden_size=2048,
    num_heads=16,
    head_dim=128,
    dense_size=8192,
    num_experts=64,
    num_experts_per_token=8,
    expert_size=1024,
    latent_size=1024,
    q_lora_rank=768,
    kv_lora_rank=512,
    nope_dim=128,
    rope_dim=64,
    value_dim=128,
    vocab_size=32768,
)
GIB_PER_LAYER = 0.2


class Round(NamedTuple):
    """Bytes a second of each way."""

    raw: float
    load: float


def write_checkpoint(folder: Path, gib: float) -> None:
    """About so many GiB of random bytes; a block of them repeats, which no reader can know."""
    num_layers = max(4, round(gib / GIB_PER_LAYER))
    sizes = dataclasses.asdict(SHAPE)
    sizes |= {
        "num_layers": num_layers,
        "mla_layers": tuple(range(3, num_layers, 4)),
        "block_size": 12,
    }
    config = kimi_k3_config(TinyShape(**sizes))
    layout = list(published_layout(config))
    num_bytes = sum(tensor.num_bytes for tensor in layout)
    write_sparse_checkpoint(folder, layout, config, -(-num_bytes // SHARD_BYTES))
    block = os.urandom(BLOCK_BYTES)
    for path in folder.glob("*.safetensors"):
        with path.open("r+b") as file:
            left = path.stat().st_size
            header_bytes = 8 + int.from_bytes(file.read(8), "little")
            file.seek(header_bytes)
            left -= header_bytes
            while left:
                left -= file.write(block[: min(left, BLOCK_BYTES)])


def drop_from_cache(paths: list[Path]) -> None:
    """Ask the kernel to forget what it holds of these files; needs no rights."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def read_raw(paths: list[Path], num_threads: int) -> float:
    """Seconds to read all bytes, pieces in the order of the files.

    Raises:
        OSError: a file became shorter, or the disk fails.
    """
    sizes = {path: path.stat().st_size for path in paths}
    pieces = iter([(path, start) for path in paths for start in range(0, sizes[path], PIECE_BYTES)])
    taking = threading.Lock()
    descriptors = {path: os.open(path, os.O_RDONLY) for path in paths}

    def read() -> None:
        buffer = memoryview(bytearray(PIECE_BYTES))
        while True:
            with taking:
                path, start = next(pieces, (None, 0))
            if path is None:
                return
            end = min(PIECE_BYTES, sizes[path] - start)
            done = 0
            while done < end:
                count = os.preadv(descriptors[path], [buffer[done:end]], start + done)
                if not count:
                    raise OSError(f"{path} became shorter while it was read")
                done += count

    try:
        began = time.perf_counter()
        with ThreadPoolExecutor(num_threads) as pool:
            for reading in [pool.submit(read) for _ in range(num_threads)]:
                reading.result()
        return time.perf_counter() - began
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)


def load(folder: Path, dtype: torch.dtype, device: str) -> float:
    """Seconds to have all weights on the device, packed experts as they are."""
    config = load_model_config(folder)
    began = time.perf_counter()
    model = load_stage(
        folder,
        config,
        whole_model(config.num_layers),
        SingleRank(),
        dtype,
        device=device,
        quantization=QuantizationChoice(keeps_packed=True),
    )
    if device != "cpu":
        torch.cuda.synchronize()
    assert model.num_parameter_bytes
    return time.perf_counter() - began


def main() -> None:
    """Write or find a checkpoint, measure, print the table."""
    parser = argparse.ArgumentParser(description="Loading beside raw reading of the same files.")
    parser.add_argument("--model", help="checkpoint folder; default: one is made")
    parser.add_argument("--gib", type=float, default=2.0, help="size of what is made")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to make it; default: a temporary one")
    parser.add_argument("--out", type=Path, help="file for the table, too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as made:
        folder = Path(made)
        if arguments.model is None:
            write_checkpoint(folder, arguments.gib)
        else:
            folder = checkpoint_folder(arguments.model)
        text = measure(folder, arguments)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n", encoding="utf-8")


def measure(folder: Path, arguments: argparse.Namespace) -> str:
    """The table, in Markdown."""
    paths = sorted(folder.glob("*.safetensors"))
    num_bytes = sum(path.stat().st_size for path in paths)
    if arguments.device == "cuda":
        # Neither the start of the driver nor that of the allocator is loading.
        torch.zeros(1, device="cuda")
    rounds = []
    for _ in range(arguments.rounds):
        drop_from_cache(paths)
        raw = read_raw(paths, NUM_THREADS)
        drop_from_cache(paths)
        seconds = load(folder, getattr(torch, arguments.dtype), arguments.device)
        rounds.append(Round(num_bytes / raw, num_bytes / seconds))
    ratios = [item.load / item.raw for item in rounds]
    raw, loaded = (statistics.median(values) / 1e9 for values in zip(*rounds, strict=True))
    source = f"--model {arguments.model}" if arguments.model else f"--gib {arguments.gib:g}"
    command = f"scripts/bench loading {source} --dtype {arguments.dtype}"
    return "\n".join(
        [
            "# Loading a checkpoint",
            "",
            machine_line(["torch"]),
            f"Command: `{command} --device {arguments.device} --rounds {arguments.rounds}`. "
            f"{len(paths)} files of {num_bytes / 1e9:.2f} GB, {NUM_THREADS} threads, one worker.",
            "",
            "| figure | median | range |",
            "| --- | --: | --: |",
            _row("raw reading, GB/s", raw, [item.raw / 1e9 for item in rounds]),
            _row("loading, GB/s", loaded, [item.load / 1e9 for item in rounds]),
            _row("loading / raw, round by round", statistics.median(ratios), ratios),
        ]
    )


def _row(name: str, middle: float, values: list[float]) -> str:
    return f"| {name} | {middle:.2f} | {min(values):.2f}–{max(values):.2f} |"


if __name__ == "__main__":
    main()
