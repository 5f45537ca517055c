"""Random weights in place of a checkpoint's, the same for every split.

Each tensor is drawn from generators seeded by its name and then cut, so that ranks and stages
of any number together hold one model. A GPU draws large ones itself, so it has other numbers
than a CPU; packed weights are drawn as codes, so those are others again.
"""

import hashlib
import math

import torch
from torch import Tensor

from stagecoach.kernels.quantization import Fp8Weight, Mxfp4Weight
from stagecoach.model.quantization import store_fp8
from stagecoach.model.weight_slots import WeightKind, WeightSlot

_MATRIX_STD = 0.02
_DECAY_RATE_RANGE = (1.0, 16.0)
_TIME_STEP_RANGE = (0.001, 0.1)
# Of FP4 codes drawn alike: 2^-7 times their deviation of 2.9 is about that of other matrices.
_PACKED_SCALE = 127 - 7


# Rows that one generator draws: as many as have so many values.
_PIECE_VALUES = 2**24
_DRAWN_ON_DEVICE = (
    WeightKind.MATRIX,
    WeightKind.ROUTER,
    WeightKind.EXPERT,
    WeightKind.DRAFT_HEAD,
)


def fill_slot(slot: WeightSlot, seed: int) -> None:
    """Draw a slot's tensor and keep this rank's part, where its parameter lies."""
    target = slot.target
    if isinstance(target, Mxfp4Weight):
        _fill_packed(target, slot, seed)
    elif target.is_cuda and slot.kind in _DRAWN_ON_DEVICE:
        fill_matrix(slot, seed)
    elif isinstance(target, Fp8Weight):
        store_fp8(target, draw_tensor(slot, seed)[slot.region])
    else:
        target.copy_(draw_tensor(slot, seed)[slot.region])


def fill_matrix(slot: WeightSlot, seed: int, piece_values: int = _PIECE_VALUES) -> None:
    """Draw the pieces of a matrix that this rank has a part of, on its device.

    A piece is some whole rows, drawn from N(0, 0.02) by a generator of its own, in the type of the
    parameter, or bfloat16 where that is quantised: no more than one of them is held beside it.
    """
    target = slot.target
    assert not isinstance(target, Mxfp4Weight), f"{slot.name} is drawn as codes"
    plain = target.weight if isinstance(target, Fp8Weight) else target
    dtype = torch.bfloat16 if isinstance(target, Fp8Weight) else target.dtype
    num_rows, *row_shape = slot.shape
    rows, *columns = slot.region
    rows_per_piece = max(1, piece_values // math.prod(row_shape))
    for piece in range(rows.start // rows_per_piece, -(-rows.stop // rows_per_piece)):
        start = piece * rows_per_piece
        end = min(start + rows_per_piece, num_rows)
        values = plain.new_empty((end - start, *row_shape), dtype=dtype)
        generator = named_generator(f"{slot.name}[{piece}]", seed, plain.device)
        values.normal_(0.0, _MATRIX_STD, generator=generator)
        first, last = max(start, rows.start), min(end, rows.stop)
        part = values[(slice(first - start, last - start), *columns)]
        place = slice(first - rows.start, last - rows.start)
        if isinstance(target, Fp8Weight):
            store_fp8(target.part(place), part)
        else:
            target[place].copy_(part)


def _fill_packed(target: Mxfp4Weight, slot: WeightSlot, seed: int) -> None:
    """Codes drawn alike from all sixteen; one scale."""
    num_rows, num_columns = slot.shape
    rows, columns = slot.region
    device = target.packed.device
    generator = named_generator(slot.name, seed, device)
    shape = (num_rows, num_columns // 2)
    codes = torch.randint(256, shape, dtype=torch.uint8, device=device, generator=generator)
    target.packed.copy_(codes[rows, columns.start // 2 : columns.stop // 2])
    target.scale.fill_(_PACKED_SCALE)


def draw_tensor(slot: WeightSlot, seed: int) -> Tensor:
    """The whole float32 tensor of a slot, before it is cut to the slot's region.

    Norms are ones, the router's bias zeros, matrices N(0, 0.02). Decay rates are drawn as
    Mamba-2 (arXiv 2405.21060, reference code) initialises them: A uniform in 1..16, the bias
    the inverse softplus of a log-uniform time step in 0.001..0.1.
    """
    generator = named_generator(slot.name, seed)
    kind, shape = slot.kind, slot.shape
    if kind in (WeightKind.NORM, WeightKind.HEAD_NORM):
        return torch.ones(shape)
    if kind is WeightKind.ROUTER_BIAS:
        return torch.zeros(shape)
    if kind is WeightKind.DECAY:
        low, high = _DECAY_RATE_RANGE
        return torch.empty(shape).uniform_(low, high, generator=generator).log()
    if kind is WeightKind.DECAY_BIAS:
        low, high = map(math.log, _TIME_STEP_RANGE)
        step = torch.empty(shape).uniform_(low, high, generator=generator).exp()
        return step + torch.log(-torch.expm1(-step))
    if kind is WeightKind.CONVOLUTION:
        bound = 1.0 / math.sqrt(shape[-1])
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)
    return torch.empty(shape).normal_(0.0, _MATRIX_STD, generator=generator)


def named_generator(name: str, seed: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator that depends on nothing but a name, a seed and the kind of device."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)
