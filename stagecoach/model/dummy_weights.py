"""Random weights in place of a checkpoint's, the same for every split.

Each tensor is drawn whole from a generator seeded by its name and then cut, so that ranks
and stages of any number together hold one model.
"""

import hashlib
import math

import torch
from torch import Tensor

from stagecoach.model.weight_slots import WeightKind, WeightSlot

_MATRIX_STD = 0.02
_DECAY_RATE_RANGE = (1.0, 16.0)
_TIME_STEP_RANGE = (0.001, 0.1)


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


def named_generator(name: str, seed: int) -> torch.Generator:
    """A generator that depends on nothing but a name and a seed."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
