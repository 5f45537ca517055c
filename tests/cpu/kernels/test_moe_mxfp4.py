"""Products of packed experts through Triton's interpreter, and the cuts of the other form."""

import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from stagecoach.kernels.activation import Activation
from stagecoach.kernels.moe import cuda, mxfp4_cuda, reference
from stagecoach.kernels.moe.mxfp4_tiles import (
    Mxfp4ProductTiles,
    Mxfp4SortedTiles,
    few_tiles,
)
from stagecoach.kernels.moe.packed_experts import PackedExperts
from stagecoach.kernels.quantization import Mxfp4Weight, unpack_mxfp4

SILU = Activation("silu")
SITU = Activation("situ", 4.0, 25.0)


def packed(*sizes: int) -> Mxfp4Weight:
    """Any codes, with scales that make rows of about unit length."""
    *rows, num_inputs = sizes
    exponent = 126 - round(math.log2(math.sqrt(num_inputs)))
    return Mxfp4Weight(
        torch.randint(256, (*rows, num_inputs // 2), dtype=torch.uint8),
        torch.randint(exponent - 3, exponent + 1, (*rows, num_inputs // 32), dtype=torch.uint8),
    )


def choices(num_tokens: int, num_chosen: int, num_experts: int) -> tuple[Tensor, Tensor]:
    """Distinct experts of each token; the last expert gets none, the first many."""
    scores = torch.rand(num_tokens, num_experts)
    scores[:, -1] = -1
    scores[::2, 0] = 2
    ids_TK = scores.topk(num_chosen).indices.int()
    return torch.rand(num_tokens, num_chosen), ids_TK


def cut(block_m: int, block_n: int, block_k: int) -> Mxfp4SortedTiles:
    product = Mxfp4ProductTiles(block_n, block_k, 4, 2)
    return Mxfp4SortedTiles(block_m, product, product)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize(
    ("tiles", "num_tokens", "latent", "width", "activation"),
    [
        (cut(16, 16, 64), 19, 64, 64, SILU),  # whole blocks of inputs
        (cut(16, 64, 64), 7, 128, 192, SITU),  # and whole segments of outputs
        (cut(16, 32, 128), 5, 96, 160, SITU),  # and not
    ],
)
def test_experts_are_the_references(
    tiles: Mxfp4SortedTiles, num_tokens: int, latent: int, width: int, activation: Activation
) -> None:
    experts = PackedExperts(packed(5, 2 * width, latent), packed(5, latent, width), activation)
    x_TL = torch.randn(num_tokens, latent)
    weights_TK, ids_TK = choices(num_tokens, 3, 5)
    gate_up_E2IL, down_ELI = (unpack_mxfp4(weight, x_TL.dtype) for weight in experts[:2])
    expected_TL = reference.routed_experts(
        x_TL, weights_TK, ids_TK.long(), gate_up_E2IL, down_ELI, activation
    )
    # Tokens that are nobody's, and an expert that only they have: its scales are no numbers.
    x_TL = torch.cat([x_TL, torch.full((2, latent), math.nan)])
    weights_TK = torch.cat([weights_TK, torch.zeros(2, 3)])
    ids_TK = torch.cat([ids_TK, torch.full((2, 3), -1, dtype=torch.int32)])
    experts.gate_up_E2IL.scale[-1] = 255
    experts.down_ELI.scale[-1] = 255
    out_TL = mxfp4_cuda.by_tiles(x_TL, weights_TK, ids_TK, experts, tiles)
    torch.testing.assert_close(out_TL[:-2], expected_TL, rtol=2e-5, atol=2e-5)
    assert (out_TL[-2:] == 0).all()


def test_every_code_and_scale_is_decoded() -> None:
    """The identity of one pair gives each weight back: from 2^-93 to 2^32 the exact one."""
    scales = [34, 60, 126, 127, 128, 159]
    codes = torch.arange(16, dtype=torch.uint8).repeat_interleave(2)
    down_ELI = Mxfp4Weight(
        (codes[0::2] | codes[1::2] << 4).repeat(1, len(scales), 1),
        torch.tensor(scales, dtype=torch.uint8).view(1, -1, 1),
    )
    product_PI = torch.eye(32)
    ids_TK = torch.zeros(32, 1, dtype=torch.int32)
    order = cuda.sort_pairs(ids_TK, 1, 16)
    gate_up = packed(1, 64, 32)
    experts = PackedExperts(gate_up, down_ELI, SILU)
    ordered_PI = mxfp4_cuda.in_operand_order(product_PI)
    out_PL = mxfp4_cuda.down(ordered_PI, order, experts, cut(16, 16, 64))
    assert torch.equal(out_PL, unpack_mxfp4(down_ELI, torch.float32)[0].T)


def test_the_door_takes_packed_experts() -> None:
    experts = PackedExperts(packed(4, 64, 32), packed(4, 32, 32), SILU)
    x_TL = torch.randn(3, 32)
    weights_TK, ids_TK = choices(3, 2, 4)
    expected_TL = reference.routed_experts(x_TL, weights_TK, ids_TK.long(), *experts)
    out_TL = cuda.routed_experts(x_TL, weights_TK, ids_TK, *experts)
    torch.testing.assert_close(out_TL, expected_TL, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("num_pairs", "num_experts"), [(16, 896), (128, 896), (4096, 896)])
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(3584, 384), (384, 3584), (3072, 3584)])
def test_few_pairs_are_cut_so_that_every_row_has_one_block(
    num_pairs: int, num_experts: int, num_inputs: int, num_outputs: int
) -> None:
    tiles = few_tiles(num_pairs, num_experts, has_many=False)
    assert tiles is not None and (num_pairs > 32) == tiles.is_sorted
    for is_gated in (False, True):
        made = tiles.cut(num_inputs, num_outputs, num_pairs, is_gated=is_gated)
        assert made.rows * made.k_warps == tiles.num_warps * (16 if is_gated else 32)
        assert 1 <= made.blocks_of_rows <= 8
        assert (made.k_warps - 1) * 128 < num_inputs
    assert few_tiles(13 * num_experts, num_experts, has_many=False) is None
    assert few_tiles(5 * num_experts, num_experts, has_many=True) is None
