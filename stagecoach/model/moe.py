"""The feed-forward sublayers: a dense MLP, and routed experts with a shared MLP beside them.

Owns the projections and where the ranks meet. Routing and the experts' products are in
`kernels/moe`. Expert widths are split over the ranks, so every rank routes alike.

Dimensions: T tokens, H hidden size, E experts, K experts of a token, I width of this rank,
L width of the routed experts (latent or hidden size).
"""

import torch
from torch import Tensor

from stagecoach.config.model import ModelConfig
from stagecoach.kernels.moe import (
    Router,
    Routing,
    SharedExpert,
    choose_experts,
    routed_experts,
    split_in_bfloat16,
)
from stagecoach.kernels.quantization import ExpertWeight, Mxfp4Weight
from stagecoach.kernels.ragged import StepTensors
from stagecoach.model.norm import RmsNorm, make_activation
from stagecoach.model.parallel_linear import (
    ColumnLinear,
    FusedLinear,
    LinearPart,
    RowLinear,
    TensorParallel,
)
from stagecoach.model.tensor_split import local_size
from stagecoach.model.weight_slots import WeightKind, WeightScope


class DenseMlp:
    """down(activation(gate x, up x))."""

    def __init__(self, config: ModelConfig, weights: WeightScope, tp: TensorParallel) -> None:
        width = local_size("intermediate_size", config.dense_intermediate_size, tp.size)
        self._tp = tp
        self._activation = make_activation(config)
        self._input = FusedLinear(
            weights,
            config.hidden_size,
            tuple(LinearPart((name,), width, is_split=True) for name in ("gate_proj", "up_proj")),
        )
        self._output = RowLinear(weights, "down_proj", (config.hidden_size, width))

    def __call__(self, x_TH: Tensor, step: StepTensors) -> Tensor:
        gate, up = self._input(x_TH)
        return self._tp.all_reduce(self._output(self._activation(gate, up)))


class MoeMlp:
    """Routed experts at latent or full width, plus the shared MLP on the full input.

    With a latent width: up(norm(sum of experts of down(x))) + shared(x), as in the published
    Kimi-K3 modelling code; without it the sum of experts of x, as in Kimi-Linear.

    Args:
        is_packed: the routed experts stay MXFP4 in memory.
    """

    def __init__(
        self, config: ModelConfig, weights: WeightScope, tp: TensorParallel, *, is_packed: bool
    ) -> None:
        moe = config.moe
        assert moe is not None, "a MoE layer needs its configuration"
        self._tp = tp
        self._routing = Routing(
            moe.num_experts_per_token,
            moe.score_function,
            moe.renormalize,
            moe.routed_scaling_factor,
            moe.num_expert_groups,
            moe.topk_group,
        )
        self._activation = make_activation(config)
        hidden_size = config.hidden_size
        expert_width = local_size("moe_intermediate_size", moe.intermediate_size, tp.size)
        shared_width = moe.shared_intermediate_size // tp.size
        routed_size = moe.latent_size or hidden_size
        has_shared = shared_width > 0
        self._has_latent = moe.latent_size is not None
        parts = []
        if moe.latent_size is not None:
            parts.append(LinearPart(("routed_expert_down_proj",), routed_size, is_split=False))
        if has_shared:
            for name in ("shared_experts.gate_proj", "shared_experts.up_proj"):
                parts.append(LinearPart((name,), shared_width, is_split=True))
        self._input = FusedLinear(weights, hidden_size, tuple(parts)) if parts else None
        router_EH = weights.matrix(moe.num_experts, hidden_size, kind=WeightKind.ROUTER)
        weights.bind("gate.weight", router_EH, WeightKind.ROUTER)
        bias_E = weights.parameter(moe.num_experts, kind=WeightKind.ROUTER_BIAS)
        weights.bind("gate.e_score_correction_bias", bias_E, WeightKind.ROUTER_BIAS)
        self._router = Router(router_EH, bias_E)
        matrix = weights.mxfp4_matrix if is_packed else weights.matrix
        self._gate_up_E2IL: ExpertWeight = matrix(moe.num_experts, 2 * expert_width, routed_size)
        self._down_ELI: ExpertWeight = matrix(moe.num_experts, routed_size, expert_width)
        self._dtype = weights.dtype
        self._bind_experts(weights.child("experts"), expert_width)
        self._latent_norm: RmsNorm | None = None
        self._latent_up: ColumnLinear | None = None
        if moe.latent_size is not None:
            if moe.has_latent_norm:
                self._latent_norm = RmsNorm(
                    weights, "routed_expert_norm", routed_size, config.rms_norm_eps
                )
            self._latent_up = ColumnLinear(
                weights, "routed_expert_up_proj", (hidden_size, routed_size), is_split=False
            )
        self._shared_output: RowLinear | None = None
        self._shared: SharedExpert | None = None  # where it has the routed experts' input
        if has_shared:
            self._shared_output = RowLinear(
                weights, "shared_experts.down_proj", (hidden_size, shared_width)
            )
            if self._input is not None and self._input.is_one_product and not self._has_latent:
                self._shared = SharedExpert(self._input.weight_OI, self._shared_output.weight_OI)

    def _bind_experts(self, weights: WeightScope, width: int) -> None:
        """w1 is the gate, w3 the up projection, w2 the down projection."""
        for expert in range(self._down_ELI.shape[0]):
            gate_up_2IL = _part(self._gate_up_E2IL, expert)
            for name, target, split_dim in (
                ("w1", _part(gate_up_2IL, slice(0, width)), 0),
                ("w3", _part(gate_up_2IL, slice(width, 2 * width)), 0),
                ("w2", _part(self._down_ELI, expert), 1),
            ):
                weights.bind(
                    f"{expert}.{name}.weight", target, WeightKind.EXPERT, split_dim=split_dim
                )

    def prepare(self) -> None:
        """Derive what the forward needs; once, after all slots are filled."""
        weight_EH = self._router.weight_EH
        if weight_EH.is_cuda and self._dtype == torch.bfloat16:
            self._router = self._router._replace(parts_QH=split_in_bfloat16(weight_EH))

    def __call__(self, x_TH: Tensor, step: StepTensors) -> Tensor:
        if not self._has_latent:
            routed_TH = self._routed(x_TH, x_TH, step)
            if self._shared is None and self._shared_output is not None:
                assert self._input is not None, "a shared expert has projections"
                routed_TH = routed_TH + self._shared_output(self._activation(*self._input(x_TH)))
            return self._tp.all_reduce(routed_TH)
        assert self._input is not None, "a latent width comes with its projection"
        latent_TL, *shared = self._input(x_TH)
        routed_TL = self._routed(x_TH, latent_TL, step)
        if self._shared_output is None:
            return self._from_latent(self._tp.all_reduce(routed_TL))
        gate, up = shared
        shared_TH = self._shared_output(self._activation(gate, up))
        if self._tp.size > 1:
            # One collective for both. The routed sum must be complete before its norm.
            width = routed_TL.shape[1]
            both = self._tp.all_reduce(torch.cat([routed_TL, shared_TH], dim=-1))
            routed_TL, shared_TH = both[:, :width], both[:, width:]
        return self._from_latent(routed_TL) + shared_TH

    def _routed(self, x_TH: Tensor, latent_TL: Tensor, step: StepTensors) -> Tensor:
        """This rank's addend of the experts' weighted sum, [T, L]."""
        # The choice of experts flips on rounding, so its product is never below float32.
        weights_TK, expert_ids_TK = choose_experts(
            x_TH, self._router, self._routing, step.num_real_1
        )
        return routed_experts(
            latent_TL,
            weights_TK,
            expert_ids_TK,
            self._gate_up_E2IL,
            self._down_ELI,
            self._activation,
            self._shared,
        )

    def _from_latent(self, routed_TL: Tensor) -> Tensor:
        """[T, L] -> [T, H]."""
        if self._latent_norm is not None:
            routed_TL = self._latent_norm(routed_TL)
        assert self._latent_up is not None, "a latent width comes with its projection"
        return self._latent_up(routed_TL)


def _part(weight: ExpertWeight, index: int | slice) -> ExpertWeight:
    return weight.part(index) if isinstance(weight, Mxfp4Weight) else weight[index]
