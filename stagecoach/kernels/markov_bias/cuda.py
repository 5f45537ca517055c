"""Launches the Markov bias on a GPU: checks, and how many blocks and columns one program takes."""

from typing import NamedTuple

import torch
from torch import Tensor
from triton import next_power_of_2

from stagecoach.kernels.markov_bias.bias_kernel import markov_bias_kernel

MOST_ROWS = 64


class BiasTile(NamedTuple):
    """Columns and ranks of one program."""

    columns: int
    ranks: int
    num_warps: int
    num_stages: int


def choose_tile(num_rows: int) -> BiasTile:
    """The fastest of those measured on an H200 with 163,840 columns of rank 256."""
    return BiasTile(64, 128, 4, 3) if num_rows <= 16 else BiasTile(128, 64, 4, 4)


def add_markov_bias(
    logits_NV: Tensor,
    token_ids_N: Tensor,
    first_VM: Tensor,
    second_VM: Tensor,
    tile: BiasTile | None = None,
) -> Tensor:
    """`reference.add_markov_bias`, float32 and contiguous; rows lie in one piece."""
    num_rows, vocab_size = logits_NV.shape
    assert first_VM.dtype == second_VM.dtype, (first_VM.dtype, second_VM.dtype)
    assert first_VM.dtype in (torch.bfloat16, torch.float32), f"weights of {first_VM.dtype}"
    assert len(second_VM) == vocab_size and first_VM.shape[1] == second_VM.shape[1]
    assert logits_NV.stride(1) == first_VM.stride(1) == second_VM.stride(1) == 1, (
        "rows in one piece"
    )
    out_NV = logits_NV.new_empty((num_rows, vocab_size), dtype=torch.float32)
    if not num_rows:
        return out_NV
    block_rows = min(MOST_ROWS, max(16, next_power_of_2(num_rows)))
    tile = tile or choose_tile(num_rows)
    # Programs of the same columns are neighbours, so that they find W2 in the L2 cache.
    grid = (-(-num_rows // block_rows), -(-vocab_size // tile.columns))
    markov_bias_kernel[grid](
        logits_NV,
        token_ids_N,
        first_VM,
        second_VM,
        out_NV,
        num_rows,
        vocab_size,
        first_VM.shape[1],
        logits_NV.stride(0),
        token_ids_N.stride(0),
        first_VM.stride(0),
        second_VM.stride(0),
        BLOCK_N=block_rows,
        BLOCK_V=tile.columns,
        BLOCK_M=tile.ranks,
        IS_WIDE=first_VM.dtype == torch.float32,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out_NV
