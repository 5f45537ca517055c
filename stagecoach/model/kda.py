"""The KDA layer: gated delta rule linear attention (Kimi Linear, arXiv 2510.26692, §3).

Owns the projections and the order of the operators. The recurrence, its chunked form, the
convolution and the gate are in `kernels/`; which slots are read and written is in the step.

Dimensions: T tokens, I hidden size, H heads of this rank, K = V head dim, C = 3 H K channels.
"""

import torch
from torch import Tensor

from stagecoach.kernels.kda.reference import (
    kda_chunked,
    kda_gate,
    kda_recurrent,
    normalize_qk,
)
from stagecoach.kernels.ragged import SegmentGroup, StepTensors
from stagecoach.kernels.short_conv.reference import short_convolution
from stagecoach.model.norm import GatedHeadNorm
from stagecoach.model.parallel_linear import (
    ColumnLinear,
    FusedLinear,
    LinearPart,
    RowLinear,
    TensorParallel,
)
from stagecoach.model.stage_memory import KdaMemory, MlaMemory
from stagecoach.model.tensor_split import local_size
from stagecoach.model.weight_slots import WeightKind, WeightScope
from stagecoach.model_config import ModelConfig


class KdaLayer:
    """Heads are split over the ranks; the two low-rank inputs are computed on every rank."""

    def __init__(self, config: ModelConfig, weights: WeightScope, tp: TensorParallel) -> None:
        kda = config.kda
        self._tp = tp
        self._num_heads = local_size("linear_attn_config.num_heads", kda.num_heads, tp.size)
        self._head_dim = kda.head_dim
        self._gate_lower_bound = kda.gate_lower_bound
        width = self._num_heads * kda.head_dim
        gate = (
            LinearPart(("g_proj",), width, is_split=True)
            if kda.has_full_rank_gate
            else LinearPart(("g_a_proj",), kda.head_dim, is_split=False)
        )
        self._input = FusedLinear(
            weights,
            config.hidden_size,
            (
                LinearPart(("q_proj", "k_proj", "v_proj"), width, is_split=True),
                gate,
                LinearPart(("f_a_proj",), kda.head_dim, is_split=False),
                LinearPart(("b_proj",), self._num_heads, is_split=True),
            ),
        )
        low_rank = (width, kda.head_dim)
        self._decay_up = ColumnLinear(weights, "f_b_proj", low_rank, is_split=True)
        self._gate_up = (
            None
            if kda.has_full_rank_gate
            else ColumnLinear(weights, "g_b_proj", low_rank, is_split=True)
        )
        conv_C1W = weights.parameter(
            3 * width, 1, kda.conv_kernel_size, kind=WeightKind.CONVOLUTION
        )
        for name, target in zip("qkv", conv_C1W.split(width), strict=True):
            weights.bind(f"{name}_conv1d.weight", target, WeightKind.CONVOLUTION, split_dim=0)
        self._conv_CW = conv_C1W[:, 0]
        self._a_log_H = weights.parameter(self._num_heads, kind=WeightKind.DECAY)
        weights.bind("A_log", self._a_log_H, WeightKind.DECAY, split_dim=0)
        dt_bias = weights.parameter(width, kind=WeightKind.DECAY_BIAS)
        weights.bind("dt_bias", dt_bias, WeightKind.DECAY_BIAS, split_dim=0)
        self._dt_bias_HK = dt_bias.view(self._num_heads, kda.head_dim)
        self._norm = GatedHeadNorm(weights, "o_norm", kda.head_dim, config.rms_norm_eps)
        self._output = RowLinear(weights, "o_proj", (config.hidden_size, width))

    def __call__(self, x_TI: Tensor, step: StepTensors, memory: KdaMemory | MlaMemory) -> Tensor:
        """[T, I] -> [T, I]; reads and writes the slots that the step's segments name."""
        assert isinstance(memory, KdaMemory)
        channels_TC, gate, decay_low, beta_TH = self._input(x_TI)
        if self._gate_up is not None:
            gate = self._gate_up(gate)
        heads = (step.num_tokens, self._num_heads, self._head_dim)
        decay_THK = kda_gate(
            self._decay_up(decay_low).view(heads),
            self._a_log_H,
            self._dt_bias_HK,
            self._gate_lower_bound,
        )
        beta_TH = beta_TH.to(decay_THK.dtype).sigmoid()
        outputs = []
        for span, group, is_window in step.spans():
            q_THK, k_THK, v_THV = self._convolve(channels_TC[span], memory, group)
            recur = kda_recurrent if is_window else kda_chunked
            outputs.append(
                recur(
                    q_THK,
                    k_THK,
                    v_THV,
                    decay_THK[span],
                    beta_TH[span],
                    memory.recurrent_SHVK,
                    memory.record_SNHX,
                    group,
                )
            )
        o_THV = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        o_THV = self._norm(o_THV, gate.reshape(heads))
        return self._tp.all_reduce(self._output(o_THV.flatten(1)))

    def _convolve(
        self, channels_TC: Tensor, memory: KdaMemory, group: SegmentGroup
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Short convolution of one group, cut into heads; q and k normalised."""
        mixed_TC = short_convolution(channels_TC, self._conv_CW, memory.conv_rows_SNC, group)
        q, k, v = mixed_TC.view(len(channels_TC), 3, self._num_heads, self._head_dim).unbind(1)
        return *normalize_qk(q, k), v
