"""The GPU's products of few rows through Triton's interpreter."""

import pytest
import torch
from torch.nn import functional

pytest.importorskip("triton")

from stagecoach.kernels.linear import cuda, grouped_linear, linear
from stagecoach.kernels.linear.cuda import LinearTiles, VectorTiles


def test_on_a_cpu_it_is_the_reference() -> None:
    x_TI, weight_OI = torch.randn(3, 5), torch.randn(4, 5)
    assert torch.equal(linear(x_TI, weight_OI), functional.linear(x_TI, weight_OI))


@pytest.mark.parametrize(
    ("num_rows", "tiles"),
    [
        (1, LinearTiles(16, 16, 1, 2, 3)),
        (5, LinearTiles(16, 16, 1, 2, 3)),
        (16, LinearTiles(16, 32, 4, 2, 3)),
    ],
)
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(37, 72), (32, 64)])
def test_few_rows_are_the_reference(
    num_rows: int, tiles: LinearTiles, num_outputs: int, num_inputs: int
) -> None:
    x_TI = torch.randn(num_rows, num_inputs + 3)[:, :num_inputs]
    weight_OI = torch.full((num_outputs + 1, num_inputs), float("nan"))[:num_outputs]
    weight_OI.copy_(torch.randn(num_outputs, num_inputs))
    expected_TO = functional.linear(x_TI, weight_OI)
    torch.testing.assert_close(cuda.few_rows(x_TI, weight_OI, tiles), expected_TO)
    x_2UI = x_TI.expand(2, *x_TI.shape)
    torch.testing.assert_close(cuda.linear(x_2UI, weight_OI), expected_TO.expand(2, -1, -1))


@pytest.mark.parametrize("block_outputs", [1, 4, 16])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(37, 72), (32, 64), (5, 1), (3, 31)])
def test_one_row_is_the_reference(block_outputs: int, num_outputs: int, num_inputs: int) -> None:
    x_1I = torch.randn(1, num_inputs)
    weight_OI = torch.full((num_outputs, num_inputs + 3), float("nan"))[:, :num_inputs]
    weight_OI.copy_(torch.randn(num_outputs, num_inputs))
    out_1O = cuda.one_row(x_1I, weight_OI, VectorTiles(block_outputs, 2))
    torch.testing.assert_close(out_1O, functional.linear(x_1I, weight_OI))


@pytest.mark.parametrize(
    ("num_rows", "num_inputs"), [(1, 100), (1, 600), (1, 2100), (3, 100), (9, 600), (20, 100)]
)
def test_every_size_is_the_reference(num_rows: int, num_inputs: int) -> None:
    x_TI, weight_OI = torch.randn(num_rows, num_inputs), torch.randn(20, num_inputs)
    expected_TO = functional.linear(x_TI, weight_OI)
    torch.testing.assert_close(cuda.linear(x_TI, weight_OI), expected_TO, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("num_rows", [1, 4, 40])
def test_addends_sum_to_the_product(num_rows: int) -> None:
    x_TI, weight_OI = torch.randn(num_rows, 4096), torch.randn(24, 4096)
    sums_STO = cuda.float32_sums(x_TI, weight_OI)
    assert sums_STO.dtype == torch.float32 and len(sums_STO) == (4 if num_rows == 4 else 1)
    expected_TO = functional.linear(x_TI.double(), weight_OI.double())
    torch.testing.assert_close(sums_STO.sum(0).double(), expected_TO, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("num_rows", [1, 3, 20])
def test_products_of_one_size_are_the_references(num_rows: int) -> None:
    x_TGI = torch.randn(num_rows, 50)[:, 5:45].unflatten(1, (2, 20))
    weight_GOI = torch.randn(2, 24, 20)
    expected_GTO = grouped_linear(x_TGI, weight_GOI)
    for group in range(2):
        assert torch.equal(expected_GTO[group], linear(x_TGI[:, group], weight_GOI[group]))
    out_GTO = cuda.grouped_linear(x_TGI, weight_GOI)
    assert out_GTO.shape == expected_GTO.shape and out_GTO.stride(2) == 1
    torch.testing.assert_close(out_GTO, expected_GTO, rtol=1e-5, atol=1e-5)
