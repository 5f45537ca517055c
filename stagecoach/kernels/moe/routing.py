"""What the choice of experts goes by: the rule, and the router's weights.

Dimensions: H hidden size, E experts, Q = 3 E.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Routing(NamedTuple):
    """The rule by which a token chooses its experts."""

    num_experts_per_token: int
    score_function: str  # "sigmoid" or "softmax"
    renormalize: bool
    scaling: float
    num_expert_groups: int = 1
    topk_group: int = 1


class Router(NamedTuple):
    """Weights of the choice, at least float32."""

    weight_EH: Tensor
    bias_E: Tensor | None
    parts_QH: Tensor | None = None  # of `split_in_bfloat16`, where activations are bfloat16


def split_in_bfloat16(weight_EH: Tensor) -> Tensor:
    """float32 [E, H] -> bfloat16 [3 E, H], three parts below each other whose sum it is.

    A product of bfloat16 activations with each part is exact in float32, so that tensor cores
    give the choice of experts to float32's precision.
    """
    parts = []
    rest_EH = weight_EH
    for _ in range(3):
        parts.append(rest_EH.to(torch.bfloat16))
        rest_EH = rest_EH - parts[-1].to(torch.float32)
    return torch.cat(parts)
