"""Muon for matrices inside the network, Adam for everything else."""

from collections import defaultdict

import torch
from torch import Tensor, nn

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


class Muon:
    """Momentum whose updates are made orthogonal, scaled to the size of Adam's updates.

    Matrices of one shape are treated together; stacked experts are matrices one by one.
    """

    def __init__(
        self, parameters: list[nn.Parameter], *, momentum: float = 0.95, weight_decay: float = 0.05
    ) -> None:
        self._groups: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        for parameter in parameters:
            self._groups[parameter.shape].append(parameter)
        self._momentum, self._weight_decay = momentum, weight_decay
        self._buffers = {
            shape: torch.zeros(len(group), *shape, device=group[0].device)
            for shape, group in self._groups.items()
        }

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Apply one update."""
        for shape, group in self._groups.items():
            gradient = torch.stack([parameter.grad for parameter in group])
            buffer = self._buffers[shape]
            buffer.lerp_(gradient, 1 - self._momentum)
            update = gradient.lerp(buffer, self._momentum)
            update = orthogonalize(update.flatten(0, -3)).view(update.shape)
            scale = 0.2 * max(shape[-2:]) ** 0.5
            torch._foreach_mul_(group, 1 - rate * self._weight_decay)
            torch._foreach_add_(group, list(update.float().unbind(0)), alpha=-rate * scale)

    def state(self) -> list[Tensor]:
        """What to keep for resuming."""
        return list(self._buffers.values())

    def load(self, state: list[Tensor]) -> None:
        """Resume."""
        for buffer, kept in zip(self._buffers.values(), state, strict=True):
            buffer.copy_(kept)


def orthogonalize(matrices: Tensor) -> Tensor:
    """Five Newton-Schulz steps towards the nearest orthogonal matrix of each."""
    a, b, c = _NEWTON_SCHULZ
    x = matrices.bfloat16()
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x


# Matrices that Muon leaves alone: the router, single output rows, and the convolutions.
_ADAM_NAMES = ("res_proj", "conv1d", "moe.gate.", "self_attn.b_proj")


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], dict[str, list[nn.Parameter]]]:
    """The parameters for Muon, and those for Adam by kind."""
    matrices: list[nn.Parameter] = []
    others: dict[str, list[nn.Parameter]] = {"embedding": [], "head": [], "rest": []}
    for name, parameter in model.named_parameters():
        if "embed_tokens" in name:
            others["embedding"].append(parameter)
        elif "lm_head" in name:
            others["head"].append(parameter)
        elif parameter.ndim < 2 or any(part in name for part in _ADAM_NAMES):
            others["rest"].append(parameter)
        else:
            matrices.append(parameter)
    return matrices, others
