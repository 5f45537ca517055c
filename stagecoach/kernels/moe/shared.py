"""The expert that every token has.

Dimensions: T tokens, L width of the experts' input, J width of the shared expert.
"""

from typing import NamedTuple

from torch import Tensor

from stagecoach.kernels.activation import Activation
from stagecoach.kernels.linear import linear
from stagecoach.kernels.quantization import LinearWeight


class SharedExpert(NamedTuple):
    """An expert of weight 1 on the input of the routed ones."""

    gate_up_2JL: LinearWeight  # gate rows first, then up rows
    down_LJ: LinearWeight

    @property
    def width(self) -> int:
        return self.down_LJ.shape[1]

    def __call__(self, x_TL: Tensor, activation: Activation) -> Tensor:
        """[T, L] -> [T, L]."""
        gate_TJ, up_TJ = linear(x_TL, self.gate_up_2JL).split(self.width, dim=-1)
        return linear(activation(gate_TJ, up_TJ), self.down_LJ)
