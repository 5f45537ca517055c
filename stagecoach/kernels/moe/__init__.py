"""Routing to experts and the routed experts themselves."""

from stagecoach.kernels.moe.reference import route, routed_experts

__all__ = ["route", "routed_experts"]
