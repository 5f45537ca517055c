"""The GPU's products with E4M3 matrices through Triton's interpreter."""

import math

import pytest
import torch

pytest.importorskip("triton")

from stagecoach.kernels.linear import cuda, fp8_cuda, reference
from stagecoach.kernels.linear.fp8_cuda import Fp8Tiles, Fp8VectorTiles
from stagecoach.kernels.quantization import FP8_DTYPE, Fp8Weight, quantize_fp8
from stagecoach.kernels.quantization.cuda import quantize_rows


def activations(num_rows: int, num_inputs: int) -> torch.Tensor:
    """Rows of different sizes, the last of zeros, with a stride.

    The interpreter loses the carry where rounding to E4M3 reaches the next power of two; there
    is no such value.
    """
    x_TI = (torch.randn(num_rows, num_inputs + 3) * 100).clamp(-440, 440)
    rounded_TI = x_TI.to(FP8_DTYPE).float()
    is_carried_TI = rounded_TI.frexp().exponent != x_TI.frexp().exponent
    x_TI = x_TI.where(~is_carried_TI, rounded_TI)
    x_TI[:, 0] = 448
    x_TI *= (2.0 ** torch.arange(-20, 20)[:num_rows])[:, None]
    if num_rows > 1:
        x_TI[-1] = 0
    return x_TI[:, :num_inputs]


@pytest.mark.parametrize("num_columns", [1, 5, 64, 200, 9000])
def test_rows_are_quantised_as_in_the_reference(num_columns: int) -> None:
    x_TI = activations(4, num_columns)
    expected = quantize_fp8(x_TI)
    values_TI, factors_T = quantize_rows(x_TI)
    assert torch.equal(factors_T, expected.scale)
    assert torch.equal(values_TI.float(), expected.weight.float())
    assert torch.equal(quantize_rows(x_TI, torch.float32)[0], expected.weight.float())


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_row_that_is_no_number_stays_none() -> None:
    x_TI = activations(3, 20).contiguous()
    x_TI[1, 7] = math.nan
    weight = quantize_fp8(torch.randn(16, 20))
    out_TO = fp8_cuda.by_blocks(x_TI, weight, Fp8Tiles(16, 16, 32, 1, 4, 2))
    assert out_TO.isnan().all(1).tolist() == [False, True, False]
    assert fp8_cuda.one_row(x_TI[1:2], weight, Fp8VectorTiles(4, 1)).isnan().all()


@pytest.mark.parametrize(
    ("num_rows", "tiles"),
    [
        (5, Fp8Tiles(16, 16, 32, 1, 4, 2)),
        (19, Fp8Tiles(16, 16, 32, 3, 4, 2)),
        (1, Fp8VectorTiles(4, 1)),
    ],
)
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(37, 72), (32, 128)])
def test_products_are_the_references(
    num_rows: int, tiles: Fp8Tiles | Fp8VectorTiles, num_outputs: int, num_inputs: int
) -> None:
    x_TI = activations(num_rows, num_inputs)
    weight = quantize_fp8(torch.randn(num_outputs, num_inputs))
    expected_TO = reference.linear(x_TI, weight)
    if isinstance(tiles, Fp8Tiles):
        out_TO = fp8_cuda.by_blocks(x_TI, weight, tiles)
    else:
        out_TO = fp8_cuda.one_row(x_TI, weight, tiles)
    torch.testing.assert_close(out_TO, expected_TO, rtol=1e-5, atol=1e-5)


def test_the_doors_take_quantised_weights() -> None:
    weight_GOI = quantize_fp8(torch.randn(2, 12, 40))
    x_TGI = activations(6, 40).contiguous().view(3, 2, 40)
    expected_GTO = reference.grouped_linear(x_TGI, weight_GOI)
    torch.testing.assert_close(cuda.grouped_linear(x_TGI, weight_GOI), expected_GTO)
    out_TGO = cuda.linear(x_TGI, Fp8Weight(weight_GOI.weight[0], weight_GOI.scale[0]))
    expected_TGO = reference.linear(x_TGI, weight_GOI.part(0))
    torch.testing.assert_close(out_TGO, expected_TGO)
