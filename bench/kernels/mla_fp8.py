"""Latent attention over cached rows of E4M3 on a GPU: `python -m bench.kernels.mla_fp8 ACTION`.

`check` compares decode, chunks, a drafter's blocks and stored rows with their references; `time`
gives decode and blocks beside those over rows of bfloat16 and the limit.
"""

import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import NamedTuple

import torch
from torch import Tensor

from bench.kernels.compiling import compile_together
from bench.kernels.mla import (
    PAGE_SIZE,
    DecodeShape,
    check_together,
    compile_decode,
    time_decode,
)
from bench.kernels.mla_cases import GROUPED_ROWS, LATENT_ROWS, fp8_cases
from bench.kernels.timing import Report, graph_time_us, limit_us, run_command
from stagecoach.kernels.block_attention.cuda import attend_blocks
from stagecoach.kernels.mla.split_cuda import SplitTile
from stagecoach.kernels.quantization import FP8_DTYPE
from stagecoach.kernels.ragged import PackedBlocks, RowLayout


def check(report: Report) -> None:
    check_together(report, fp8_cases())


_FP8 = tuple(
    (shape._replace(is_fp8=True), window_rows)
    for shape, window_rows in (
        (DecodeShape(8, 32_768, 32, 1), (32,)),
        (DecodeShape(8, 131_072, 32, 1), (32,)),
        (DecodeShape(8, 32_768, 12, 1), (32,)),
        (DecodeShape(8, 131_072, 96, 1), (48,)),
        (DecodeShape(64, 1_024, 12, 1), (32,)),
        (DecodeShape(64, 1_024, 32, 1), (32,)),
        (DecodeShape(8, 8_192, 32, 8), (64,)),
    )
)


def time(report: Report) -> None:
    """Decode over E4M3 rows in both forms, over bfloat16 rows in CUDA; blocks over both."""
    with ProcessPoolExecutor(8, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_decode, [shape for shape, _ in _FP8]))
    for shape, window_rows in _FP8:
        plain = shape._replace(is_fp8=False)
        time_decode(report, plain, window_rows, has_triton=shape.heads == 12)
        time_decode(report, shape, window_rows, has_triton=True)
    time_blocks(report)


class BlockShape(NamedTuple):
    """A drafter's blocks of one context length."""

    layout: RowLayout
    dtype: torch.dtype  # of cached rows
    blocks: int = 8
    context: int = 32_768
    heads: int = 32
    tokens: int = 7

    @property
    def key_width(self) -> int:
        return self.layout.key_width + self.layout.second_width

    @property
    def row_width(self) -> int:
        values = self.layout.value_width if self.layout.has_own_values else 0
        return self.layout.num_groups * (self.key_width + values)

    @property
    def limit(self) -> float:
        return limit_us(
            self.blocks * self.context * self.row_width * self.dtype.itemsize,
            2.0
            * (self.blocks * self.tokens * self.heads * self.context)
            * (self.key_width + self.layout.value_width),
        )


def blocks_call(shape: BlockShape, tile: SplitTile | None = None) -> Callable[[], Tensor]:
    """The attention of all blocks, with a tile instead of the one from the table."""
    pages_of_block = shape.context // PAGE_SIZE
    num_pages = shape.blocks * pages_of_block
    ones_N = torch.ones(shape.blocks, dtype=torch.int32, device="cuda")
    blocks = PackedBlocks(
        num_blocks=shape.blocks,
        max_context=shape.context,
        anchor_ids_N=ones_N,
        starts_N=ones_N * shape.context,
        is_real_N=ones_N,
        first_pages_N=torch.arange(shape.blocks, dtype=torch.int32, device="cuda") * pages_of_block,
        pages_P=(1 + torch.randperm(num_pages, device="cuda")).int(),
        block_size=PAGE_SIZE,
    )

    def normal(*size: int) -> Tensor:
        return torch.randn(size, device="cuda", dtype=torch.bfloat16)

    cache_RX = normal((num_pages + 1) * PAGE_SIZE, shape.row_width).to(shape.dtype)
    q_NKHD = normal(shape.blocks, shape.tokens, shape.heads, shape.key_width)
    own_NKX = normal(shape.blocks, shape.tokens, shape.row_width)
    return lambda: attend_blocks(q_NKHD, cache_RX, own_NKX, blocks, shape.layout, 0.05, tile)


def time_blocks(report: Report) -> None:
    shapes = [
        BlockShape(layout, dtype)
        for layout in (LATENT_ROWS, GROUPED_ROWS)
        for dtype in (torch.bfloat16, FP8_DTYPE)
    ]
    compile_together([blocks_call(shape._replace(context=PAGE_SIZE)) for shape in shapes])
    for shape in shapes:
        kind = "E4M3" if shape.dtype == FP8_DTYPE else "bfloat16"
        name = f"blocks {shape.blocks}x{shape.context} H{shape.heads} "
        name += f"G{shape.layout.num_groups} {kind}"
        report.time(name, graph_time_us(blocks_call(shape), 8, 3), shape.limit)


if __name__ == "__main__":
    sys.exit(run_command("mla_fp8", __doc__, {"check": check, "time": time}))
