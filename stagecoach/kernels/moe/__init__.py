"""Routing to experts and the routed experts themselves."""

from stagecoach.kernels.moe.door import choose_experts, routed_experts
from stagecoach.kernels.moe.reference import route
from stagecoach.kernels.moe.routing import Router, Routing, split_in_bfloat16
from stagecoach.kernels.moe.shared import SharedExpert

__all__ = [
    "Router",
    "Routing",
    "SharedExpert",
    "choose_experts",
    "route",
    "routed_experts",
    "split_in_bfloat16",
]
