"""Rotary positions of a draft (RoFormer, arXiv 2104.09864), with YaRN (arXiv 2309.00071).

Owns the frequencies; the rotation of pairs is in `kernels/rope`. Which values form a pair
differs: neighbours in latent attention (DeepSeek-V2, arXiv 2405.04434), a value of each half in
Qwen3. A rotated vector always comes out as first parts, then second parts: queries and keys
alike, so that their products are the same.

Dimensions: P values of a vector, in P / 2 pairs.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from stagecoach.config.draft import RopeConfig
from stagecoach.kernels.rope import rotate_pairs


class Rotation(NamedTuple):
    """Cosines and sines of the angles at some positions, [..., P / 2] each."""

    cos: Tensor
    sin: Tensor


class Rope:
    """Angles of positions.

    Args:
        num_values: P, even.
        dtype: in which angles are computed: float32, or float64.
        has_neighbour_pairs: pairs are (0, 1), (2, 3), ...; otherwise (0, P / 2), ...
    """

    def __init__(
        self,
        config: RopeConfig,
        num_values: int,
        dtype: torch.dtype,
        device: str = "cpu",
        *,
        has_neighbour_pairs: bool,
    ) -> None:
        self._frequencies = inverse_frequencies(config, num_values).to(device, dtype)
        self._magnitude = config.magnitude
        self._has_neighbour_pairs = has_neighbour_pairs

    def rotation(self, positions: Tensor) -> Rotation:
        """Of integer positions of any shape."""
        angles = positions.unsqueeze(-1).to(self._frequencies.dtype) * self._frequencies
        return Rotation(angles.cos().mul_(self._magnitude), angles.sin().mul_(self._magnitude))

    def __call__(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Rotate vectors.

        Args:
            x: [..., heads, P], any floating type.
            rotation: of the positions [...].

        Returns:
            [..., heads, P] in `x.dtype`: the first part of every pair, then the second.
        """
        return rotate_pairs(
            x, rotation.cos, rotation.sin, has_neighbour_pairs=self._has_neighbour_pairs
        )


def inverse_frequencies(config: RopeConfig, num_values: int) -> Tensor:
    """Angle of each pair per position: float64 [P / 2].

    With YaRN pairs that turn often within the original length keep their frequency, those that
    turn little are slowed by the factor, and between the two it is mixed linearly (NTK by
    parts, §3.2 of the paper; range rounded outwards as in the published code).
    """
    pairs = torch.arange(num_values // 2, dtype=torch.float64)
    frequencies = config.theta ** (-2.0 * pairs / num_values)
    if config.yarn_factor is None:
        return frequencies
    low, high = correction_range(config, num_values)
    slowed = ((pairs - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
    return frequencies * (1.0 - slowed) + frequencies / config.yarn_factor * slowed


def correction_range(config: RopeConfig, num_values: int) -> tuple[int, int]:
    """The pairs between which YaRN mixes: turning `beta_fast` to `beta_slow` times."""

    def pair(num_turns: float) -> float:
        wavelength = config.original_max_position_embeddings / (num_turns * 2 * math.pi)
        return num_values * math.log(wavelength) / (2 * math.log(config.theta))

    low, high = math.floor(pair(config.beta_fast)), math.ceil(pair(config.beta_slow))
    return max(low, 0), min(high, num_values - 1)
