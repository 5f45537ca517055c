"""MXFP4: the codes one by one, and packing as the inverse of unpacking."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stagecoach.kernels.quantization import MXFP4_GROUP_SIZE, Mxfp4Weight, unpack_mxfp4
from stagecoach.model.quantization import pack_mxfp4

pytestmark = pytest.mark.cpu

VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def test_every_code_and_the_order_of_nibbles() -> None:
    """Low nibble first; bit 3 is the sign; the scale is a power of two with bias 127."""
    codes = list(range(16)) * 2
    packed = torch.tensor(
        [[codes[2 * place] | codes[2 * place + 1] << 4 for place in range(16)]], dtype=torch.uint8
    )
    scale = torch.tensor([[127 + 3]], dtype=torch.uint8)
    expected = [sign * value * 8.0 for sign in (1, -1) for value in VALUES] * 2
    assert unpack_mxfp4(Mxfp4Weight(packed, scale), torch.float32).tolist() == [expected]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("exponent", [-127, -40, -1, 0, 7, 40, 124])
def test_values_are_exact_in_every_type(dtype: torch.dtype, exponent: int) -> None:
    packed = torch.full((2, 16), 0x7F, dtype=torch.uint8)  # -6 below 6
    scale = torch.full((2, 1), 127 + exponent, dtype=torch.uint8)
    weight = unpack_mxfp4(Mxfp4Weight(packed, scale), dtype)
    assert weight.dtype == dtype and weight.shape == (2, 32)
    assert weight[0, :2].tolist() == [-6 * 2.0**exponent, 6 * 2.0**exponent]


def test_each_group_has_its_own_scale() -> None:
    packed = torch.full((1, 32), 0x22, dtype=torch.uint8)
    scale = torch.tensor([[127, 130]], dtype=torch.uint8)
    weight = unpack_mxfp4(Mxfp4Weight(packed, scale), torch.float32)
    assert weight[0, :32].unique().tolist() == [1.0]
    assert weight[0, 32:].unique().tolist() == [8.0]


@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 4))
def test_packing_what_was_unpacked_changes_nothing(seed: int, rows: int, groups: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (rows, 16 * groups), generator=generator).to(torch.uint8)
    scale = torch.randint(100, 150, (rows, groups), generator=generator).to(torch.uint8)
    weight = unpack_mxfp4(Mxfp4Weight(packed, scale), torch.float32)
    again = unpack_mxfp4(pack_mxfp4(weight), torch.float32)
    assert torch.equal(again, weight)


@given(st.integers(0, 2**32 - 1), st.floats(-30, 30))
def test_no_power_of_two_fits_a_group_better(seed: int, magnitude: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(3, MXFP4_GROUP_SIZE, generator=generator) * 2.0**magnitude
    packed, scale = pack_mxfp4(weight)
    assert packed.dtype == scale.dtype == torch.uint8
    error = (unpack_mxfp4(Mxfp4Weight(packed, scale), torch.float32) - weight).square().sum(-1)
    grid = torch.tensor(sorted({sign * value for value in VALUES for sign in (1, -1)}))
    for row in range(3):
        for exponent in range(int(scale[row]) - 127 - 3, int(scale[row]) - 127 + 4):
            levels = grid * 2.0**exponent
            nearest = (weight[row, :, None] - levels).abs().min(-1).values.square().sum()
            assert error[row] <= nearest * (1 + 1e-4)


def test_zeros_pack_to_zeros() -> None:
    assert not unpack_mxfp4(pack_mxfp4(torch.zeros(2, 64)), torch.float32).any()


def test_columns_must_come_in_groups() -> None:
    with pytest.raises(ValueError, match="groups of 32, not 40"):
        pack_mxfp4(torch.zeros(2, 40))
