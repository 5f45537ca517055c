"""KDA between the projections on a GPU: the convolution, then windows or chunks."""

import torch
from torch import Tensor

from stagecoach.kernels.kda.chunk_cuda import kda_chunked_packed
from stagecoach.kernels.kda.tensors import KdaInputs, KdaMemory, KdaWeights
from stagecoach.kernels.kda.window_cuda import kda_windows
from stagecoach.kernels.norm import gated_rms_norm
from stagecoach.kernels.ragged import PackedGroup, StepTensors
from stagecoach.kernels.short_conv.cuda import convolve_heads


def kda_attention(
    inputs: KdaInputs, weights: KdaWeights, memory: KdaMemory, step: StepTensors
) -> Tensor:
    """`door.kda_attention` of packed groups: nothing is asked of the device.

    Returns:
        [T, H, V] in the type of the activations; undefined for tokens that are nobody's.
    """
    num_heads = inputs.beta_TH.shape[1]
    o_THV = torch.empty(inputs.gate_THV.shape, dtype=inputs.gate_THV.dtype, device=inputs[0].device)
    for span, group, is_window in step.spans():
        assert isinstance(group, PackedGroup)
        part = KdaInputs(*(x[span] for x in inputs))
        if is_window:
            kda_windows(part, weights, memory, group, o_THV[span])
            continue
        q_THK, k_THK, v_THV = convolve_heads(
            part.channels_TC, weights.conv_CW, memory.conv_rows_SNC, num_heads, group
        )
        raw_THV = kda_chunked_packed(
            q_THK,
            k_THK,
            v_THV,
            part.decay_THK,
            part.beta_TH,
            weights.a_log_H,
            weights.dt_bias_HK,
            weights.lower_bound,
            memory.recurrent_SHVK,
            memory.record_SNHX,
            group,
        )
        o_THV[span] = gated_rms_norm(raw_THV, part.gate_THV, weights.norm_V, weights.eps)
    return o_THV
