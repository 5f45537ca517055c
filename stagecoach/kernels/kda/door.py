"""KDA between the projections: convolution, gate, recurrence and gated norm of a whole step.

On CPU it is the composition of the references, on a GPU that of `cuda.py`; which of them, the
step's groups say.
"""

import torch
from torch import Tensor

from stagecoach.kernels.kda.reference import kda_chunked, kda_gate, kda_recurrent, normalize_qk
from stagecoach.kernels.kda.tensors import KdaInputs, KdaMemory, KdaWeights
from stagecoach.kernels.norm.reference import gated_rms_norm
from stagecoach.kernels.ragged import PackedGroup, StepTensors
from stagecoach.kernels.short_conv.reference import short_convolution


def kda_attention(
    inputs: KdaInputs, weights: KdaWeights, memory: KdaMemory, step: StepTensors
) -> Tensor:
    """What a KDA layer computes between its projections; reads and writes the step's slots.

    Args:
        inputs: [T, ...] projections of the step's tokens.
        weights: of the layer.
        memory: pools of the layer, updated in place.
        step: windows and chunks; the groups are all packed, or none is.

    Returns:
        [T, H, V] in the type of `inputs.gate_THV`.
    """
    if any(isinstance(group, PackedGroup) for group in (*step.windows, *step.chunks)):
        from stagecoach.kernels.kda import cuda  # Triton is only there with a GPU

        return cuda.kda_attention(inputs, weights, memory, step)
    num_tokens, num_heads, num_keys = inputs.decay_THK.shape
    decay_THK = kda_gate(inputs.decay_THK, weights.a_log_H, weights.dt_bias_HK, weights.lower_bound)
    beta_TH = inputs.beta_TH.to(decay_THK.dtype).sigmoid()
    outputs = []
    for span, group, is_window in step.spans():
        assert not isinstance(group, PackedGroup)
        mixed_TC = short_convolution(
            inputs.channels_TC[span], weights.conv_CW, memory.conv_rows_SNC, group
        )
        q_THK, k_THK, v_THV = mixed_TC.view(len(mixed_TC), 3, num_heads, num_keys).unbind(1)
        recur = kda_recurrent if is_window else kda_chunked
        outputs.append(
            recur(
                *normalize_qk(q_THK, k_THK),
                v_THV,
                decay_THK[span],
                beta_TH[span],
                memory.recurrent_SHVK,
                memory.record_SNHX,
                group,
            )
        )
    o_THV = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    assert len(o_THV) == num_tokens
    return gated_rms_norm(o_THV, inputs.gate_THV, weights.norm_V, weights.eps)
