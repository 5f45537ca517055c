"""The rows by which a draft's layers attend: what is cached of context, and a block's own.

Owns the projections to rows of all layers as one matrix, so that a step's context is written
by one product, and the layout of a row. Both backbones are called alike. Knows no page.

Dimensions: ... any leading dims, Y draft layers (y of them in a call), H hidden size, X row
width on this rank, C latent, P rotated values, G key heads of this rank, D head width.
"""

import torch
from torch import Tensor

from stagecoach.config.draft import DraftConfig, DraftGqaConfig, DraftMlaConfig
from stagecoach.draft.rope import Rope, Rotation
from stagecoach.kernels.linear import linear
from stagecoach.kernels.norm import grouped_rms_norm
from stagecoach.model.tensor_split import local_size
from stagecoach.model.weight_slots import WeightKind, WeightScope


class MlaRows:
    """[normed latent | rotated pe], the same on every rank (DeepSeek-V2, §2.1)."""

    def __init__(
        self, config: DraftConfig, mla: DraftMlaConfig, weights: WeightScope, rope: Rope | None
    ) -> None:
        self._rope = rope
        self._width = mla.cache_row_width
        self._latent_width = mla.kv_lora_rank
        self._eps = config.rms_norm_eps
        self._weight_EH = weights.matrix(config.num_layers * self._width, config.hidden_size)
        self._norm_YC = weights.parameter(config.num_layers, mla.kv_lora_rank)
        for layer, part_XH in enumerate(self._weight_EH.split(self._width)):
            scope = weights.child(f"layers.{layer}.self_attn")
            scope.bind("kv_a_proj_with_mqa.weight", part_XH)
            scope.bind("kv_a_layernorm.weight", self._norm_YC[layer], WeightKind.NORM)

    def __call__(self, x: Tensor, rotation: Rotation | None, layers: slice) -> Tensor:
        """[..., H] at the positions of `rotation` -> [..., y, X] of the chosen layers."""
        weight_EH = self._weight_EH[layers.start * self._width : layers.stop * self._width]
        rows = linear(x, weight_EH).unflatten(-1, (-1, self._width))
        latent, pe = rows.tensor_split((self._latent_width,), dim=-1)
        if self._rope is not None and rotation is not None:
            pe = self._rope(pe, rotation)
        latent = grouped_rms_norm(latent, self._norm_YC[layers], self._eps)
        return torch.cat((latent, pe), dim=-1)


class GqaRows:
    """[normed, rotated keys | values] of this rank's key heads (Qwen3)."""

    def __init__(
        self, config: DraftConfig, gqa: DraftGqaConfig, weights: WeightScope, rope: Rope | None
    ) -> None:
        self._rope = rope
        self._num_heads = local_size("num_key_value_heads", gqa.num_kv_heads, weights.tp_size)
        self._head_dim = gqa.head_dim
        self._width = 2 * self._num_heads * gqa.head_dim
        self._eps = config.rms_norm_eps
        self._weight_EH = weights.matrix(config.num_layers * self._width, config.hidden_size)
        self._norm_YD = weights.parameter(config.num_layers, gqa.head_dim)
        for layer, part_XH in enumerate(self._weight_EH.split(self._width)):
            scope = weights.child(f"layers.{layer}.self_attn")
            for name, target in zip(("k_proj", "v_proj"), part_XH.chunk(2), strict=True):
                scope.bind(f"{name}.weight", target, split_dim=0)
            scope.bind("k_norm.weight", self._norm_YD[layer], WeightKind.NORM)

    def __call__(self, x: Tensor, rotation: Rotation | None, layers: slice) -> Tensor:
        """[..., H] at the positions of `rotation` -> [..., y, X] of the chosen layers."""
        weight_EH = self._weight_EH[layers.start * self._width : layers.stop * self._width]
        both = linear(x, weight_EH)
        both = both.unflatten(-1, (-1, 2, self._num_heads, self._head_dim))  # [..., y, 2, G, D]
        keys, values = both.unbind(-3)
        keys = grouped_rms_norm(keys, self._norm_YD[layers].unsqueeze(1), self._eps)
        if self._rope is not None and rotation is not None:
            keys = self._rope(keys.flatten(-3, -2), rotation).view_as(values)
        return torch.stack((keys, values), dim=-3).flatten(-3)


DraftRows = MlaRows | GqaRows
