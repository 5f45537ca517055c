"""The tensors that a stage keeps between steps, and how many bytes they take.

Owns their shapes and dtypes. Does not decide how many slots or rows there are, and does not
know which request uses which. Layers are keyed by their number in the whole model.

Dimensions: S slots, H heads of this rank, V and K head dim, N rows of a slot (of a record: k,
the most drafts of a window; of a convolution: k more than its history), X = 2K + V values of
a recorded row, C channels of q, k and v of this rank, R cache rows, D width of a cache row,
Y draft layers.
"""

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from stagecoach.config.draft import DraftConfig
from stagecoach.config.model import LayerKind, ModelConfig
from stagecoach.kernels.kda import KdaMemory as KdaMemory  # part of what a stage keeps
from stagecoach.model.tensor_split import local_size
from stagecoach.pipeline.stage import Stage


class MlaMemory(NamedTuple):
    """Cache rows of one MLA layer: page * page_size + offset -> [normed latent | k_pe]."""

    cache_RD: Tensor


class StageMemory(NamedTuple):
    """What the layers of one stage keep, by layer number."""

    layers: dict[int, KdaMemory | MlaMemory]
    draft_rows_YRD: Tensor | None  # the drafter's context; None where no drafter runs


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryShapes:
    """What one slot and one cache row of this rank take, over all layers of the stage."""

    kda_layers: tuple[int, ...]
    mla_layers: tuple[int, ...]
    recurrent_HVK: tuple[int, int, int]
    recurrent_dtype: torch.dtype  # of states and records
    conv_rows_NC: tuple[int, int]
    record_NHX: tuple[int, int, int]
    row_width: int
    num_draft_layers: int  # 0 where no drafter runs
    draft_row_width: int
    dtype: torch.dtype  # of convolution rows
    row_dtype: torch.dtype  # of cache rows
    draft_row_dtype: torch.dtype

    @property
    def bytes_per_slot(self) -> int:
        return self._bytes_of_slot(num_states=1, num_recorded=prod(self.record_NHX))

    @property
    def bytes_per_slot_of_snapshots(self) -> int:
        """What a slot would take that kept the state after each row of a window instead.

        That is k + 1 states and no record; the convolution rows are the same.
        """
        return self._bytes_of_slot(num_states=1 + self.record_NHX[0], num_recorded=0)

    @property
    def bytes_per_row(self) -> int:
        target = len(self.mla_layers) * self.row_width * self.row_dtype.itemsize
        draft = self.num_draft_layers * self.draft_row_width * self.draft_row_dtype.itemsize
        return target + draft

    def bytes_per_page(self, page_size: int) -> int:
        return page_size * self.bytes_per_row

    def allocate(
        self, num_slots: int, num_rows: int, device: str = "cpu", *, is_pinned: bool = False
    ) -> StageMemory:
        """Zero-filled memory of `num_slots` slots and `num_rows` cache rows.

        Args:
            is_pinned: host memory that an accelerator copies from and to.
        """

        def zeros(*shape: int, dtype: torch.dtype = self.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device, pin_memory=is_pinned)

        layers: dict[int, KdaMemory | MlaMemory] = {}
        for layer in self.kda_layers:
            layers[layer] = KdaMemory(
                recurrent_SHVK=zeros(num_slots, *self.recurrent_HVK, dtype=self.recurrent_dtype),
                conv_rows_SNC=zeros(num_slots, *self.conv_rows_NC),
                record_SNHX=zeros(num_slots, *self.record_NHX, dtype=self.recurrent_dtype),
            )
        for layer in self.mla_layers:
            layers[layer] = MlaMemory(zeros(num_rows, self.row_width, dtype=self.row_dtype))
        draft_rows_YRD = None
        if self.num_draft_layers:
            draft_rows_YRD = zeros(
                self.num_draft_layers, num_rows, self.draft_row_width, dtype=self.draft_row_dtype
            )
        return StageMemory(layers, draft_rows_YRD)

    def _bytes_of_slot(self, num_states: int, num_recorded: int) -> int:
        num_wide = num_states * prod(self.recurrent_HVK) + num_recorded
        conv_bytes = prod(self.conv_rows_NC) * self.dtype.itemsize
        return len(self.kda_layers) * (num_wide * self.recurrent_dtype.itemsize + conv_bytes)


def memory_shapes(
    config: ModelConfig,
    stage: Stage,
    tp_size: int,
    dtype: torch.dtype,
    num_draft_tokens: int = 0,
    draft: DraftConfig | None = None,
    row_dtype: torch.dtype | None = None,
    draft_row_dtype: torch.dtype | None = None,
) -> MemoryShapes:
    """Shapes of one rank's memory.

    KDA state is split over the ranks by head; MLA rows are the same on every rank.

    Args:
        config: the target model.
        stage: whose layers the memory is for.
        tp_size: ranks that share the stage.
        dtype: of the activations.
        num_draft_tokens: k, the most drafts of a window; 0 without speculation.
        draft: the draft model, whose context rows the last stage keeps beside its own.
        row_dtype: of cache rows; None: `dtype`.
        draft_row_dtype: of the draft's; None: `dtype`.
    """
    kda = config.kda
    heads = local_size("linear_attn_config.num_heads", kda.num_heads, tp_size)
    drafter = draft if stage.is_last else None
    return MemoryShapes(
        kda_layers=_layers_of(config, stage, LayerKind.KDA),
        mla_layers=_layers_of(config, stage, LayerKind.MLA),
        recurrent_HVK=(heads, kda.head_dim, kda.head_dim),
        recurrent_dtype=torch.promote_types(dtype, torch.float32),
        conv_rows_NC=(kda.num_conv_rows + num_draft_tokens, 3 * heads * kda.head_dim),
        record_NHX=(num_draft_tokens, heads, 3 * kda.head_dim),
        row_width=config.mla.cache_row_width,
        num_draft_layers=drafter.num_layers if drafter else 0,
        draft_row_width=drafter.cache_row_width(tp_size) if drafter else 0,
        dtype=dtype,
        row_dtype=row_dtype or dtype,
        draft_row_dtype=draft_row_dtype or dtype,
    )


def _layers_of(config: ModelConfig, stage: Stage, kind: LayerKind) -> tuple[int, ...]:
    return tuple(layer for layer in stage.layers if config.layer_kinds[layer] is kind)
