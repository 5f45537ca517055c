"""The MLA layer: multi-head latent attention without positions (NoPE).

Owns the projections, the cache row and the two ways to attend: windows in the latent space
(the key and value projections absorbed into the query and the output), chunks with keys and
values projected from the cached rows. Attention itself is in `kernels/mla`.

Dimensions: T tokens, I hidden size, H heads of this rank, N and P the two parts of a head's
query ("nope" and "pe"; neither is rotated), C latent width, V value width, D = C + P cache
row.
"""

import torch
from torch import Tensor

from stagecoach.config.model import ModelConfig
from stagecoach.kernels.mla import head_product, mla_decode, mla_prefill, write_rows
from stagecoach.kernels.ragged import PackedGroup, SegmentGroup, StepTensors
from stagecoach.model.norm import RmsNorm
from stagecoach.model.parallel_linear import (
    ColumnLinear,
    FusedLinear,
    LinearPart,
    RowLinear,
    TensorParallel,
)
from stagecoach.model.stage_memory import KdaMemory, MlaMemory
from stagecoach.model.tensor_split import local_size
from stagecoach.model.weight_slots import WeightScope


class MlaLayer:
    """Heads are split over the ranks; latents and cache rows are the same on each."""

    def __init__(self, config: ModelConfig, weights: WeightScope, tp: TensorParallel) -> None:
        mla = config.mla
        self._tp = tp
        self._num_heads = local_size("num_attention_heads", mla.num_heads, tp.size)
        self._latent_size = mla.kv_lora_rank
        self._nope_dim = mla.qk_nope_head_dim
        self._qk_dim = mla.qk_head_dim
        kv_dims = [mla.qk_nope_head_dim, mla.v_head_dim]
        self._scale = mla.softmax_scale
        query_width = self._num_heads * mla.qk_head_dim
        value_width = self._num_heads * mla.v_head_dim
        is_low_rank = mla.q_lora_rank is not None
        parts = [
            LinearPart(("q_a_proj",), mla.q_lora_rank or 0, is_split=False)
            if is_low_rank
            else LinearPart(("q_proj",), query_width, is_split=True),
            LinearPart(("kv_a_proj_with_mqa",), mla.cache_row_width, is_split=False),
        ]
        if mla.has_output_gate:
            parts.append(LinearPart(("g_proj",), value_width, is_split=True))
        self._input = FusedLinear(weights, config.hidden_size, tuple(parts))
        self._query_norm: RmsNorm | None = None
        self._query_up: ColumnLinear | None = None
        if mla.q_lora_rank is not None:
            self._query_norm = RmsNorm(
                weights, "q_a_layernorm", mla.q_lora_rank, mla.latent_norm_eps
            )
            self._query_up = ColumnLinear(
                weights, "q_b_proj", (query_width, mla.q_lora_rank), is_split=True
            )
        self._latent_norm = RmsNorm(
            weights, "kv_a_layernorm", mla.kv_lora_rank, mla.latent_norm_eps
        )
        # Its two halves are absorbed by head, so it stays in the activations' type.
        self._kv_up_OC = weights.matrix(self._num_heads * sum(kv_dims), mla.kv_lora_rank)
        weights.bind("kv_b_proj.weight", self._kv_up_OC, split_dim=0)
        kv_up_HOC = self._kv_up_OC.view(self._num_heads, -1, mla.kv_lora_rank)
        self._key_up_HNC, value_up_HVC = kv_up_HOC.split(kv_dims, dim=1)
        self._value_up_HCV = value_up_HVC.transpose(1, 2)
        self._output = RowLinear(weights, "o_proj", (config.hidden_size, value_width))

    def __call__(self, x_TI: Tensor, step: StepTensors, memory: KdaMemory | MlaMemory) -> Tensor:
        """[T, I] -> [T, I]; writes the tokens' cache rows, then attends to each context."""
        assert isinstance(memory, MlaMemory)
        query, latent_row_TD, *gate = self._input(x_TI)
        if self._query_up is not None and self._query_norm is not None:
            query = self._query_up(self._query_norm(query))
        q_THD = query.unflatten(-1, (self._num_heads, self._qk_dim))
        gate_THV = gate[0].unflatten(-1, (self._num_heads, -1)) if gate else None
        latent_TC, k_pe_TP = latent_row_TD.tensor_split((self._latent_size,), dim=-1)
        write_rows(
            memory.cache_RD,
            latent_TC,
            k_pe_TP,
            self._latent_norm.weight_H,
            self._latent_norm.eps,
            step.cache_rows_T,
        )
        outputs = []
        for span, group, is_window in step.spans():
            attend = self._window if is_window else self._chunk
            gate_span = None if gate_THV is None else gate_THV[span]
            outputs.append(attend(q_THD[span], gate_span, memory.cache_RD, group))
        o_THV = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return self._tp.all_reduce(self._output(o_THV.flatten(1)))

    def _window(
        self,
        q_THD: Tensor,
        gate_THV: Tensor | None,
        cache_RD: Tensor,
        group: SegmentGroup | PackedGroup,
    ) -> Tensor:
        """Attention in the latent space: q_nope W_UK against rows, then o W_UV: [T, H, V]."""
        q_nope_THN, q_pe_THP = q_THD.tensor_split((self._nope_dim,), dim=-1)
        q_latent_THC = head_product(q_nope_THN, self._key_up_HNC)
        o_latent_THC = mla_decode(q_latent_THC, q_pe_THP, cache_RD, group, self._scale)
        return head_product(o_latent_THC, self._value_up_HCV, gate_THV)

    def _chunk(
        self,
        q_THD: Tensor,
        gate_THV: Tensor | None,
        cache_RD: Tensor,
        group: SegmentGroup | PackedGroup,
    ) -> Tensor:
        """Attention over keys and values that are made from rows: [T, H, V]."""
        return mla_prefill(q_THD, cache_RD, self._kv_up_OC, group, self._scale, gate_THV)
