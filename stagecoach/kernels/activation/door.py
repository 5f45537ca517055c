"""Gated activations wherever the tensors lie, and the value that says which one a model has.

Formulas, shapes and types are those of `reference.py`.
"""

from typing import Literal, NamedTuple

from torch import Tensor

from stagecoach.kernels.activation import reference


class Activation(NamedTuple):
    """The gated activation of a model's feed-forward blocks: (gate, up) -> their product."""

    kind: Literal["silu", "situ"]
    beta: float = 1.0  # of situ: bound of the gate
    linear_beta: float | None = None  # of situ: bound of `up`; None passes it unchanged

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """[...] and [...] of one type -> [...]."""
        if self.kind == "silu":
            return silu_and_mul(gate, up)
        return situ_and_mul(gate, up, self.beta, self.linear_beta)


def situ_and_mul(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    """`reference.situ_and_mul`: [...] in `gate.dtype`."""
    if gate.is_cuda:
        from stagecoach.kernels.activation import cuda

        return cuda.gated_product(gate, up, is_situ=True, beta=beta, linear_beta=linear_beta)
    return reference.situ_and_mul(gate, up, beta, linear_beta)


def silu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """`reference.silu_and_mul`: [...] in `gate.dtype`."""
    if gate.is_cuda:
        from stagecoach.kernels.activation import cuda

        return cuda.gated_product(gate, up, is_situ=False, beta=1.0, linear_beta=None)
    return reference.silu_and_mul(gate, up)
