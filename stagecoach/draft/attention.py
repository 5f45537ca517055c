"""The attention of a draft's layer in a block pass, latent or grouped-query.

Owns the query and output projections and how a row is read as key and value; rows come from
`draft/rows.py`. Heads are split over the ranks.

Dimensions: N blocks, K tokens of a block, S places that a block sees, H heads of this rank,
I hidden size, X row width; in latent attention N also the "nope" part of a head's query,
P its rotated part, C latent, V value width; in the grouped form D head width.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stagecoach.draft.rope import Rope, Rotation
from stagecoach.draft_config import DraftConfig, DraftGqaConfig, DraftMlaConfig
from stagecoach.kernels.block_attention import block_attention
from stagecoach.model.norm import RmsNorm
from stagecoach.model.parallel_linear import ColumnLinear, RowLinear, TensorParallel
from stagecoach.model.tensor_split import local_size
from stagecoach.model.weight_slots import WeightScope


class SeenRows(NamedTuple):
    """What the blocks of one run see in one layer."""

    rows_NSX: Tensor
    is_hidden_NKS: Tensor


class DraftMla:
    """Absorbed latent attention: queries and outputs live in the latent space."""

    def __init__(
        self,
        config: DraftConfig,
        mla: DraftMlaConfig,
        weights: WeightScope,
        rope: Rope | None,
        tp: TensorParallel,
    ) -> None:
        hidden_size, latent_size = config.hidden_size, mla.kv_lora_rank
        self._tp = tp
        self._rope = rope
        self._num_heads = local_size("num_attention_heads", mla.num_heads, tp.size)
        self._latent_size = latent_size
        self._nope_dim = mla.qk_nope_head_dim
        self._scale = mla.softmax_scale(config.rope)
        query_width = self._num_heads * mla.qk_head_dim
        kv_dims = [mla.qk_nope_head_dim, mla.v_head_dim]
        self._query_down: ColumnLinear | None = None
        self._query_norm: RmsNorm | None = None
        if mla.q_lora_rank is None:
            self._query = ColumnLinear(weights, "q_proj", (query_width, hidden_size), is_split=True)
        else:
            down = (mla.q_lora_rank, hidden_size)
            self._query_down = ColumnLinear(weights, "q_a_proj", down, is_split=False)
            self._query_norm = RmsNorm(
                weights, "q_a_layernorm", mla.q_lora_rank, config.rms_norm_eps
            )
            up = (query_width, mla.q_lora_rank)
            self._query = ColumnLinear(weights, "q_b_proj", up, is_split=True)
        kv_up = ColumnLinear(
            weights, "kv_b_proj", (self._num_heads * sum(kv_dims), latent_size), is_split=True
        )
        kv_up_HOC = kv_up.weight_OI.view(self._num_heads, -1, latent_size)
        self._key_up_HNC, value_up_HVC = kv_up_HOC.split(kv_dims, dim=1)
        self._value_up_HCV = value_up_HVC.transpose(1, 2)
        self._output = RowLinear(weights, "o_proj", (hidden_size, self._num_heads * mla.v_head_dim))

    def __call__(
        self, x_NKI: Tensor, seen: Sequence[SeenRows], rotation: Rotation | None
    ) -> Tensor:
        """[N, K, I] -> [N, K, I], complete on every rank; `seen` in order of the blocks."""
        low = x_NKI
        if self._query_down is not None and self._query_norm is not None:
            low = self._query_norm(self._query_down(x_NKI))
        q_NKHX = self._query(low).unflatten(-1, (self._num_heads, -1))
        q_nope, q_pe_NKHP = q_NKHX.tensor_split((self._nope_dim,), dim=-1)
        if self._rope is not None and rotation is not None:
            q_pe_NKHP = self._rope(q_pe_NKHP, rotation)
        q_latent_HTC = torch.bmm(q_nope.flatten(0, 1).transpose(0, 1), self._key_up_HNC)
        q_latent_NKHC = q_latent_HTC.transpose(0, 1).unflatten(0, x_NKI.shape[:2])
        q_NKHX = torch.cat((q_latent_NKHC, q_pe_NKHP), dim=-1)
        o_latent_NKHC = _attend(q_NKHX, seen, self._keys_and_values, self._scale)
        o_latent_HTC = o_latent_NKHC.flatten(0, 1).transpose(0, 1)
        o_THV = torch.bmm(o_latent_HTC, self._value_up_HCV).transpose(0, 1)
        return self._tp.all_reduce(self._output(o_THV.reshape(*x_NKI.shape[:2], -1)))

    def _keys_and_values(self, rows_NSX: Tensor) -> tuple[Tensor, Tensor]:
        keys_NS1X = rows_NSX.unsqueeze(2)
        return keys_NS1X, keys_NS1X[..., : self._latent_size]


class DraftGqa:
    """Grouped-query attention with a norm on each head's query and key (Qwen3)."""

    def __init__(
        self,
        config: DraftConfig,
        gqa: DraftGqaConfig,
        weights: WeightScope,
        rope: Rope | None,
        tp: TensorParallel,
    ) -> None:
        self._tp = tp
        self._rope = rope
        self._num_heads = local_size("num_attention_heads", gqa.num_heads, tp.size)
        self._num_kv_heads = local_size("num_key_value_heads", gqa.num_kv_heads, tp.size)
        self._scale = gqa.head_dim**-0.5
        width = self._num_heads * gqa.head_dim
        self._query = ColumnLinear(weights, "q_proj", (width, config.hidden_size), is_split=True)
        self._query_norm = RmsNorm(weights, "q_norm", gqa.head_dim, config.rms_norm_eps)
        self._output = RowLinear(weights, "o_proj", (config.hidden_size, width))

    def __call__(
        self, x_NKI: Tensor, seen: Sequence[SeenRows], rotation: Rotation | None
    ) -> Tensor:
        """[N, K, I] -> [N, K, I], complete on every rank; `seen` in order of the blocks."""
        q_NKHD = self._query_norm(self._query(x_NKI).unflatten(-1, (self._num_heads, -1)))
        if self._rope is not None and rotation is not None:
            q_NKHD = self._rope(q_NKHD, rotation)
        o_NKHD = _attend(q_NKHD, seen, self._keys_and_values, self._scale)
        return self._tp.all_reduce(self._output(o_NKHD.flatten(2)))

    def _keys_and_values(self, rows_NSX: Tensor) -> tuple[Tensor, Tensor]:
        k_NSGD, v_NSGD = rows_NSX.unflatten(-1, (2, self._num_kv_heads, -1)).unbind(2)
        return k_NSGD, v_NSGD


DraftAttention = DraftMla | DraftGqa


def _attend(
    q_NKHD: Tensor,
    seen: Sequence[SeenRows],
    keys_and_values: Callable[[Tensor], tuple[Tensor, Tensor]],
    scale: float,
) -> Tensor:
    """`block_attention` of all blocks, run by run: [N, K, H, V]."""
    runs = q_NKHD.split([len(run.rows_NSX) for run in seen])
    parts = [
        block_attention(q_run, *keys_and_values(run.rows_NSX), run.is_hidden_NKS, scale)
        for q_run, run in zip(runs, seen, strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
