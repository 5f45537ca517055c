"""The KDA layer: gated delta rule linear attention (Kimi Linear, arXiv 2510.26692, §3).

Owns the projections and the order of the operators. The recurrence, its chunked form, the
convolution and the gate are in `kernels/`; which slots are read and written is in the step.

Dimensions: T tokens, I hidden size, H heads of this rank, K = V head dim, C = 3 H K channels.
"""

from torch import Tensor

from stagecoach.config.model import ModelConfig
from stagecoach.kernels.kda import KdaInputs, KdaMemory, KdaWeights, kda_attention
from stagecoach.kernels.ragged import StepTensors
from stagecoach.model.parallel_linear import (
    FusedLinear,
    GroupedLinear,
    LinearPart,
    RowLinear,
    TensorParallel,
)
from stagecoach.model.stage_memory import MlaMemory
from stagecoach.model.tensor_split import local_size
from stagecoach.model.weight_slots import WeightKind, WeightScope


class KdaLayer:
    """Heads are split over the ranks; the two low-rank inputs are computed on every rank."""

    def __init__(self, config: ModelConfig, weights: WeightScope, tp: TensorParallel) -> None:
        kda = config.kda
        self._tp = tp
        self._num_heads = local_size("linear_attn_config.num_heads", kda.num_heads, tp.size)
        self._head_dim = kda.head_dim
        width = self._num_heads * kda.head_dim
        low_rank = LinearPart(("f_a_proj",), kda.head_dim, is_split=False)
        gate = (
            (LinearPart(("g_proj",), width, is_split=True), low_rank)
            if kda.has_full_rank_gate
            else (low_rank._replace(names=("g_a_proj", "f_a_proj")),)
        )
        self._input = FusedLinear(
            weights,
            config.hidden_size,
            (
                LinearPart(("q_proj", "k_proj", "v_proj"), width, is_split=True),
                *gate,
                LinearPart(("b_proj",), self._num_heads, is_split=True),
            ),
        )
        names = ("f_b_proj",) if kda.has_full_rank_gate else ("g_b_proj", "f_b_proj")
        self._up = GroupedLinear(weights, names, (width, kda.head_dim))
        conv_C1W = weights.parameter(
            3 * width, 1, kda.conv_kernel_size, kind=WeightKind.CONVOLUTION
        )
        for name, target in zip("qkv", conv_C1W.split(width), strict=True):
            weights.bind(f"{name}_conv1d.weight", target, WeightKind.CONVOLUTION, split_dim=0)
        a_log_H = weights.parameter(self._num_heads, kind=WeightKind.DECAY)
        weights.bind("A_log", a_log_H, WeightKind.DECAY, split_dim=0)
        dt_bias = weights.parameter(width, kind=WeightKind.DECAY_BIAS)
        weights.bind("dt_bias", dt_bias, WeightKind.DECAY_BIAS, split_dim=0)
        norm_V = weights.parameter(kda.head_dim, kind=WeightKind.HEAD_NORM)
        weights.bind("o_norm.weight", norm_V, WeightKind.HEAD_NORM)
        self._weights = KdaWeights(
            conv_CW=conv_C1W[:, 0],
            a_log_H=a_log_H,
            dt_bias_HK=dt_bias.view(self._num_heads, kda.head_dim),
            norm_V=norm_V,
            lower_bound=kda.gate_lower_bound,
            eps=config.rms_norm_eps,
        )
        self._output = RowLinear(weights, "o_proj", (config.hidden_size, width))

    def __call__(self, x_TI: Tensor, step: StepTensors, memory: KdaMemory | MlaMemory) -> Tensor:
        """[T, I] -> [T, I]; reads and writes the slots that the step's segments name."""
        assert isinstance(memory, KdaMemory)
        channels_TC, *full_rank, low_TK, beta_TH = self._input(x_TI)
        gates = [*full_rank, *self._up(low_TK)]
        heads = (step.num_tokens, self._num_heads, self._head_dim)
        gate_THV, decay_THK = (gate.view(heads) for gate in gates)
        inputs = KdaInputs(channels_TC, decay_THK, beta_TH, gate_THV)
        o_THV = kda_attention(inputs, self._weights, memory, step)
        return self._tp.all_reduce(self._output(o_THV.flatten(1)))
