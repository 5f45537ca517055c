"""The network of a draft: context rows from taps, and the layers of a block pass.

Owns all its weights and the order of its layers. The embedding, the output head and the cache
rows are the target's and come from outside; knows no request and no file.

Dimensions: T tokens, B taps, H hidden size, Y draft layers, R cache rows, D row width on this
rank, N blocks, K tokens of a block.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from stagecoach.config.draft import DraftConfig, DraftMlaConfig
from stagecoach.draft.attention import DraftAttention, DraftGqa, DraftMla
from stagecoach.draft.heads import ConfidenceHead, MarkovHead
from stagecoach.draft.rope import Rope
from stagecoach.draft.rows import DraftRows, GqaRows, MlaRows
from stagecoach.kernels.activation import silu_and_mul
from stagecoach.kernels.block_attention import BlockPlaces
from stagecoach.kernels.norm import grouped_rms_norm
from stagecoach.kernels.precision import accumulate_dtype
from stagecoach.kernels.ragged import PackedBlocks
from stagecoach.model.norm import RmsNorm
from stagecoach.model.parallel_linear import (
    ColumnLinear,
    FusedLinear,
    LinearPart,
    RowLinear,
    TensorParallel,
)
from stagecoach.model.tensor_split import local_size
from stagecoach.model.weight_formats import PLAIN, WeightFormats
from stagecoach.model.weight_slots import WeightKind, WeightScope, WeightSlot


class DraftModel:
    """One rank's share of a draft. A fresh one has NaN weights.

    Args:
        dtype: of weights and activations. Norm statistics, angles, attention scores and the two
            heads are at least float32 whatever it is.
        device: "meta" gives the slots without memory.
        formats: which matrices are quantised; projections to context rows never are.
    """

    def __init__(
        self,
        config: DraftConfig,
        tp: TensorParallel,
        dtype: torch.dtype,
        device: str = "cpu",
        formats: WeightFormats = PLAIN,
    ) -> None:
        self.config = config
        weights = WeightScope(
            dtype, device=device, tp_rank=tp.rank, tp_size=tp.size, formats=formats
        )
        self._scope = weights
        hidden_size, eps = config.hidden_size, config.rms_norm_eps
        num_taps = len(config.taps.layers)
        self._tap_norms_BH: Tensor | None = None
        if config.has_tap_norms:
            self._tap_norms_BH = weights.parameter(num_taps, hidden_size)
            for tap in range(num_taps):
                weights.bind(f"fc_norm.{tap}.weight", self._tap_norms_BH[tap], WeightKind.NORM)
        self._context_proj = ColumnLinear(
            weights, "context_proj", (hidden_size, num_taps * hidden_size), is_split=False
        )
        self._context_norm = RmsNorm(weights, "context_norm", hidden_size, eps)
        self._rope = _rope(config, dtype, device)
        self._rows = _rows(config, weights, self._rope)
        self._layers = [
            DraftLayer(config, weights.child(f"layers.{layer}"), self._rope, tp)
            for layer in range(config.num_layers)
        ]
        self._final_norm = RmsNorm(weights, "final_norm", hidden_size, eps)
        self.markov_head: MarkovHead | None = None
        self.confidence_head: ConfidenceHead | None = None
        if tp.rank == 0:
            self.markov_head = MarkovHead(config, weights.child("markov_head"))
            if config.has_confidence_head:
                self.confidence_head = ConfidenceHead(config, weights.child("confidence_head"))
        weights.check_covered()

    @property
    def slots(self) -> list[WeightSlot]:
        """Every checkpoint tensor that this rank needs, with its place."""
        return self._scope.slots

    @property
    def num_parameter_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self._scope.parameters)

    def context_rows(self, taps_TBH: Tensor, positions_T: Tensor) -> Tensor:
        """What the layers may later see of tokens that the target has run: [T, Y, D].

        Args:
            taps_TBH: the target's taps, in ascending order of their ids.
            positions_T: int64.
        """
        if self._tap_norms_BH is not None:
            taps_TBH = grouped_rms_norm(taps_TBH, self._tap_norms_BH, self.config.rms_norm_eps)
        context_TH = self._context_norm(self._context_proj(taps_TBH.flatten(1)))
        rotation = self._rope.rotation(positions_T) if self._rope else None
        return self._rows(context_TH, rotation, slice(0, self.config.num_layers))

    def block(
        self,
        hidden_NKH: Tensor,
        positions_NK: Tensor,
        draft_rows_YRD: Tensor,
        places: Sequence[BlockPlaces] | PackedBlocks,
    ) -> Tensor:
        """Run blocks through all layers and the final norm.

        Args:
            hidden_NKH: embeddings of the blocks' tokens.
            positions_NK: int64.
            draft_rows_YRD: the cache; only rows that `places` names are read, none is written.
            places: what each token sees, run by run.

        Returns:
            [N, K, H], on every rank.
        """
        rotation = self._rope.rotation(positions_NK) if self._rope else None
        for number, layer in enumerate(self._layers):
            x_NKH = layer.attention_norm(hidden_NKH)
            own_NKD = self._rows(x_NKH, rotation, slice(number, number + 1)).squeeze(2)
            cache_RD = draft_rows_YRD[number]
            attended = layer.attention(x_NKH, cache_RD, own_NKD, places, rotation)
            hidden_NKH = hidden_NKH + attended
            hidden_NKH = hidden_NKH + layer.mlp(layer.mlp_norm(hidden_NKH))
        return self._final_norm(hidden_NKH)


class DraftLayer:
    """The weights of one layer but those of its rows, which all layers have in common."""

    def __init__(
        self, config: DraftConfig, weights: WeightScope, rope: Rope | None, tp: TensorParallel
    ) -> None:
        hidden_size, eps = config.hidden_size, config.rms_norm_eps
        self.attention_norm = RmsNorm(weights, "input_layernorm", hidden_size, eps)
        self.attention = _attention(config, weights.child("self_attn"), rope, tp)
        self.mlp_norm = RmsNorm(weights, "post_attention_layernorm", hidden_size, eps)
        self.mlp = DraftMlp(config, weights.child("mlp"), tp)


class DraftMlp:
    """down(silu(gate x) * up x)."""

    def __init__(self, config: DraftConfig, weights: WeightScope, tp: TensorParallel) -> None:
        width = local_size("intermediate_size", config.intermediate_size, tp.size)
        parts = tuple(
            LinearPart((name,), width, is_split=True) for name in ("gate_proj", "up_proj")
        )
        self._tp = tp
        self._input = FusedLinear(weights, config.hidden_size, parts)
        self._output = RowLinear(weights, "down_proj", (config.hidden_size, width))

    def __call__(self, x_NKH: Tensor) -> Tensor:
        gate, up = self._input(x_NKH)
        return self._tp.all_reduce(self._output(silu_and_mul(gate, up)))


def _rope(config: DraftConfig, dtype: torch.dtype, device: str) -> Rope | None:
    if config.rope is None:
        return None
    return Rope(
        config.rope,
        config.attention.rotated_width,
        accumulate_dtype(dtype),
        device,
        has_neighbour_pairs=isinstance(config.attention, DraftMlaConfig),
    )


def _rows(config: DraftConfig, weights: WeightScope, rope: Rope | None) -> DraftRows:
    if isinstance(config.attention, DraftMlaConfig):
        return MlaRows(config, config.attention, weights, rope)
    return GqaRows(config, config.attention, weights, rope)


def _attention(
    config: DraftConfig, weights: WeightScope, rope: Rope | None, tp: TensorParallel
) -> DraftAttention:
    if isinstance(config.attention, DraftMlaConfig):
        return DraftMla(config, config.attention, weights, rope, tp)
    return DraftGqa(config, config.attention, weights, rope, tp)
