"""The attention of a draft's layer in a block pass, latent or grouped-query.

Owns the query and output projections and how a row is read as key and value; rows come from
`draft/rows.py`. Heads are split over the ranks.

Dimensions: N blocks, K tokens of a block, T all of them, H heads of this rank, I hidden size, R
cache rows, X row width; in latent attention N also the "nope" part of a head's query, P its
rotated part, C latent, V value width; in the grouped form D head width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from stagecoach.config.draft import DraftConfig, DraftGqaConfig, DraftMlaConfig
from stagecoach.draft.rope import Rope, Rotation
from stagecoach.kernels.block_attention import BlockPlaces, attend_blocks
from stagecoach.kernels.mla import head_product
from stagecoach.kernels.ragged import PackedBlocks, RowLayout
from stagecoach.model.norm import RmsNorm
from stagecoach.model.parallel_linear import ColumnLinear, RowLinear, TensorParallel
from stagecoach.model.tensor_split import local_size
from stagecoach.model.weight_slots import WeightScope


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
        self._layout = RowLayout(
            1, latent_size, mla.qk_rope_head_dim, latent_size, has_own_values=False
        )
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
        # Its two halves are absorbed by head, so it stays in the activations' type.
        kv_up_OC = weights.matrix(self._num_heads * sum(kv_dims), latent_size)
        weights.bind("kv_b_proj.weight", kv_up_OC, split_dim=0)
        kv_up_HOC = kv_up_OC.view(self._num_heads, -1, latent_size)
        self._key_up_HNC, value_up_HVC = kv_up_HOC.split(kv_dims, dim=1)
        self._value_up_HCV = value_up_HVC.transpose(1, 2)
        self._output = RowLinear(weights, "o_proj", (hidden_size, self._num_heads * mla.v_head_dim))

    def __call__(
        self,
        x_NKI: Tensor,
        cache_RX: Tensor,
        own_NKX: Tensor,
        places: Sequence[BlockPlaces] | PackedBlocks,
        rotation: Rotation | None,
    ) -> Tensor:
        """[N, K, I] -> [N, K, I], complete on every rank; over cached rows and the blocks' own."""
        low = x_NKI
        if self._query_down is not None and self._query_norm is not None:
            low = self._query_norm(self._query_down(x_NKI))
        q_NKHX = self._query(low).unflatten(-1, (self._num_heads, -1))
        q_nope, q_pe_NKHP = q_NKHX.tensor_split((self._nope_dim,), dim=-1)
        if self._rope is not None and rotation is not None:
            q_pe_NKHP = self._rope(q_pe_NKHP, rotation)
        q_latent_THC = head_product(q_nope.flatten(0, 1), self._key_up_HNC)
        q_latent_NKHC = q_latent_THC.unflatten(0, x_NKI.shape[:2])
        q_NKHX = torch.cat((q_latent_NKHC, q_pe_NKHP), dim=-1)
        o_latent_NKHC = attend_blocks(q_NKHX, cache_RX, own_NKX, places, self._layout, self._scale)
        o_THV = head_product(o_latent_NKHC.flatten(0, 1), self._value_up_HCV)
        return self._tp.all_reduce(self._output(o_THV.reshape(*x_NKI.shape[:2], -1)))


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
        num_kv_heads = local_size("num_key_value_heads", gqa.num_kv_heads, tp.size)
        self._scale = gqa.head_dim**-0.5
        self._layout = RowLayout(num_kv_heads, gqa.head_dim, 0, gqa.head_dim, has_own_values=True)
        width = self._num_heads * gqa.head_dim
        self._query = ColumnLinear(weights, "q_proj", (width, config.hidden_size), is_split=True)
        self._query_norm = RmsNorm(weights, "q_norm", gqa.head_dim, config.rms_norm_eps)
        self._output = RowLinear(weights, "o_proj", (config.hidden_size, width))

    def __call__(
        self,
        x_NKI: Tensor,
        cache_RX: Tensor,
        own_NKX: Tensor,
        places: Sequence[BlockPlaces] | PackedBlocks,
        rotation: Rotation | None,
    ) -> Tensor:
        """[N, K, I] -> [N, K, I], complete on every rank; over cached rows and the blocks' own."""
        q_NKHD = self._query_norm(self._query(x_NKI).unflatten(-1, (self._num_heads, -1)))
        if self._rope is not None and rotation is not None:
            q_NKHD = self._rope(q_NKHD, rotation)
        o_NKHD = attend_blocks(q_NKHD, cache_RX, own_NKX, places, self._layout, self._scale)
        return self._tp.all_reduce(self._output(o_NKHD.flatten(2)))


DraftAttention = DraftMla | DraftGqa
