"""Launches `window.cu`: windows over rows of 512 + 64 bfloat16 or E4M3, on Hopper GPUs.

Owns which calls it takes and its tiles. Scratch and the sum of pieces are those of
`split_cuda.py`, whose Triton form takes all other calls.

Dimensions: as in `split_cuda.py`; P width of the second part.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton import cdiv

from stagecoach.kernels import nvrtc
from stagecoach.kernels.mla.split_cuda import (
    NUM_PROCESSORS,
    Segments,
    make_scratch,
    sum_pieces,
)
from stagecoach.kernels.quantization import FP8_DTYPE
from stagecoach.kernels.ragged import RowLayout
from stagecoach.kernels.tensor_map import TensorMap, swizzled_boxes

_SOURCE = Path(__file__).with_name("window.cu")
_LATENT, _PE = 512, 64
_TILE = 64  # positions
_TILE_BYTES = _TILE * (_LATENT + _PE) * 2
_NUM_STAGES = 2
_NUM_THREADS, _NUM_FP8_THREADS = 384, 512
_QUERY_TILES = (32, 48, 64)
# What `Shared` in the source has beside tiles, queries, shares, parts and numbers of query rows.
_BARRIER_BYTES = 64


# From so many query rows on, measured faster than Triton's form on an H200: 8 contexts of 32,768,
# 32 rows each, 96 against 120 us (limit 71), of 131,072 325 against 479 (limit 284); 96 rows 188
# against 374 (limit 71); 64 contexts of 1,024 42 against 43. With 12 rows 90 against 84, and with
# one context of 1,024 and 32 rows 14.5 against 12.2.
_FEWEST_ROWS = 17


class WindowArguments(ctypes.Structure):
    """`Arguments` in `window.cu`, field by field."""

    _fields_ = [
        ("rows", TensorMap),
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("q", "q_pe", "out", "partial_o", "partial_top", "pieces"),
                *("offsets", "starts", "first_pages", "page_ids"),
            )
        ),
        ("fp8_rows", ctypes.c_void_p),
        ("fp8_row_bytes", ctypes.c_longlong),
        *(
            (f"{name}_stride", ctypes.c_longlong)
            for name in ("q_token", "q_head", "q_pe_token", "q_pe_head")
        ),
        ("scale", ctypes.c_float),
        *(
            (name, ctypes.c_int)
            for name in (
                *("num_segments", "num_heads", "num_row_tiles", "rows_per_piece"),
                *("target_pieces", "page_size"),
            )
        ),
        # The source's struct ends at a multiple of 64 bytes, as the map in it asks for.
        ("padding", ctypes.c_ubyte * 36),
    ]


def fits(
    q_THC: Tensor, q_pe_THP: Tensor, cache_RX: Tensor, segments: Segments, layout: RowLayout
) -> bool:
    """Whether `window.cu` can take a call."""
    rows = (q_THC, q_pe_THP)
    return (
        q_THC.is_cuda
        and q_THC.dtype == torch.bfloat16
        and cache_RX.dtype in (torch.bfloat16, FP8_DTYPE)
        and layout == RowLayout(1, _LATENT, _PE, _LATENT, has_own_values=False)
        and segments.page_size % _TILE == 0
        and segments.num_segments <= _most_segments(_QUERY_TILES[0])
        and cache_RX.stride(0) * cache_RX.element_size() % 16 == 0
        and cache_RX.data_ptr() % 16 == 0
        and all(x.stride(0) % 8 == 0 == x.stride(1) % 8 and x.data_ptr() % 16 == 0 for x in rows)
        and _is_hopper(q_THC.device)
        and nvrtc.is_available()
    )


def is_faster(num_rows: int, cache_dtype: torch.dtype) -> bool:
    """Whether calls of up to `num_rows` query rows a segment were measured faster here.

    With rows of E4M3 all were: 12 rows over 8 contexts of 32,768 take 96 against 167 us.
    """
    return num_rows >= _FEWEST_ROWS or cache_dtype == FP8_DTYPE


def query_tile(num_rows: int) -> int:
    """Query rows of a thread block: as few rows and tiles as can be; 96 -> 48."""
    return min(_QUERY_TILES, key=lambda tile: (cdiv(num_rows, tile) * tile, -tile))


def attend_windows(
    q_THC: Tensor,
    q_pe_THP: Tensor,
    cache_RX: Tensor,
    segments: Segments,
    layout: RowLayout,
    scale: float,
    tile_rows: int | None = None,
) -> Tensor:
    """`split_cuda.attend_split` of windows that `fits` says yes to: [T, H, C].

    Args:
        q_THC, q_pe_THP: bfloat16.
        cache_RX: rows of 512 + 64 bfloat16 or E4M3.
        tile_rows: query rows of a thread block, 32, 48 or 64; by default as few as can be.
    """
    num_tokens, num_heads, _ = q_THC.shape
    rows_per_piece = segments.max_tokens * num_heads
    tile_rows = tile_rows or query_tile(rows_per_piece)
    num_row_tiles = cdiv(rows_per_piece, tile_rows)
    target_pieces = max(1, NUM_PROCESSORS // num_row_tiles)
    num_pieces = min(
        target_pieces + segments.num_segments,
        segments.num_segments * cdiv(segments.max_context, _TILE),
    )
    scratch = make_scratch(q_THC, num_pieces, rows_per_piece, segments, layout)
    o_THC = q_THC.new_empty(num_tokens, num_heads, _LATENT)
    is_fp8 = cache_RX.dtype == FP8_DTYPE
    rows: dict[str, Any]
    if is_fp8:
        rows = {"fp8_rows": cache_RX.data_ptr(), "fp8_row_bytes": cache_RX.stride(0)}
    else:
        rows = {"rows": swizzled_boxes(cache_RX, _TILE)}
    arguments = WindowArguments(
        **rows,
        q=q_THC.data_ptr(),
        q_pe=q_pe_THP.data_ptr(),
        out=o_THC.data_ptr(),
        partial_o=scratch.partial_o.data_ptr(),
        partial_top=scratch.partial_top.data_ptr(),
        pieces=scratch.pieces_S2.data_ptr(),
        offsets=segments.lengths.data_ptr(),
        starts=segments.starts_S.data_ptr(),
        first_pages=segments.first_pages_S.data_ptr(),
        page_ids=segments.pages_P.data_ptr(),
        q_token_stride=q_THC.stride(0),
        q_head_stride=q_THC.stride(1),
        q_pe_token_stride=q_pe_THP.stride(0),
        q_pe_head_stride=q_pe_THP.stride(1),
        scale=scale * 1.4426950408889634,  # log2(e)
        num_segments=segments.num_segments,
        num_heads=num_heads,
        num_row_tiles=num_row_tiles,
        rows_per_piece=rows_per_piece,
        target_pieces=target_pieces,
        page_size=segments.page_size,
    )
    definitions = window_definitions(tile_rows, is_fp8=is_fp8)
    kernel = nvrtc.load_kernel(_SOURCE, "attend_windows", q_THC.device, tuple(definitions.items()))
    grid = (num_pieces * num_row_tiles, 1, 1)
    num_threads = _NUM_FP8_THREADS if is_fp8 else _NUM_THREADS
    kernel.launch(grid, num_threads, arguments, definitions["SHARED_BYTES"])
    sum_pieces(scratch, o_THC, segments, layout)
    return o_THC


def window_definitions(tile_rows: int, *, is_fp8: bool) -> dict[str, int]:
    """What `window.cu` is compiled with, for `tile_rows` query rows of a thread block."""
    query_bytes = tile_rows * (_LATENT + _PE) * 2
    share_bytes = tile_rows * _TILE * 2
    part_bytes = tile_rows * _TILE * 4 if tile_rows < 64 else 512
    row_bytes = tile_rows * (4 + 2) * 4  # a number of each warp's, and two of all
    return {
        "ROWS": tile_rows,
        "IS_FP8": int(is_fp8),
        "SHARED_BYTES": _NUM_STAGES * _TILE_BYTES
        + query_bytes
        + share_bytes
        + part_bytes
        + row_bytes
        + _BARRIER_BYTES,
    }


def _most_segments(tile_rows: int) -> int:
    """As many as the room of the shares has numbers of tiles for."""
    return tile_rows * _TILE * 2 // 4


@cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9
