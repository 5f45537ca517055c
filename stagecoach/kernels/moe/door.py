"""The choice of experts and their products, wherever the tensors lie.

Formulas, shapes and types are those of `reference.py`. On a GPU expert ids are int32, and tokens
that are nobody's choose no expert: id -1, weight 0, and zeros for output.

Dimensions: T tokens, H hidden size, E experts, K experts a token, L latent width, I intermediate
width.
"""

from torch import Tensor
from torch.nn import functional

from stagecoach.kernels.activation import Activation
from stagecoach.kernels.moe import reference
from stagecoach.kernels.moe.routing import Router, Routing
from stagecoach.kernels.moe.shared import SharedExpert
from stagecoach.kernels.quantization import ExpertWeight


def choose_experts(
    x_TH: Tensor, router: Router, routing: Routing, num_real_1: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Router product and choice.

    Args:
        x_TH: [T, H], any floating type; the product is never below float32.
        num_real_1: int32 [1] on a GPU: tokens from there on are nobody's. None: all are real.

    Returns:
        weights [T, K] and expert ids [T, K], as `reference.route`.
    """
    if x_TH.is_cuda:
        from stagecoach.kernels.moe import cuda

        return cuda.choose_experts(x_TH, router, routing, num_real_1)
    logits_TE = functional.linear(x_TH.to(router.weight_EH.dtype), router.weight_EH)
    return reference.route(logits_TE, router.bias_E, *routing)


def routed_experts(
    x_TL: Tensor,
    weights_TK: Tensor,
    expert_ids_TK: Tensor,
    gate_up_E2IL: ExpertWeight,
    down_ELI: ExpertWeight,
    activation: Activation,
    shared: SharedExpert | None = None,
) -> Tensor:
    """`reference.routed_experts` plus what a shared expert makes: [T, L] in `x_TL.dtype`.

    Both matrices are plain or both are packed; the shared expert's may be Fp8Weights.
    """
    if x_TL.is_cuda:
        from stagecoach.kernels.moe import cuda

        # Kernels take the shared expert along only where all matrices are alike.
        along = shared if shared is not None and _are_plain(gate_up_E2IL, *shared) else None
        out_TL = cuda.routed_experts(
            x_TL, weights_TK, expert_ids_TK, gate_up_E2IL, down_ELI, activation, along
        )
        return out_TL if shared is None or along else out_TL + shared(x_TL, activation)
    out_TL = reference.routed_experts(
        x_TL, weights_TK, expert_ids_TK, gate_up_E2IL, down_ELI, activation
    )
    return out_TL if shared is None else out_TL + shared(x_TL, activation)


def _are_plain(*weights: object) -> bool:
    return all(isinstance(weight, Tensor) for weight in weights)
