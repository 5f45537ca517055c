"""The tensors that a stage keeps between steps, and how many bytes they take.

Owns their shapes and dtypes. Does not decide how many slots or rows there are, and does not
know which request uses which. Layers are keyed by their number in the whole model.

Dimensions: S slots, H heads of this rank, V and K head dim, R convolution rows,
C channels of q, k and v of this rank, D width of a cache row.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from stagecoach.model.tensor_split import local_size
from stagecoach.model_config import LayerKind, ModelConfig
from stagecoach.pipeline.stage import Stage


class KdaMemory(NamedTuple):
    """State slots of one KDA layer."""

    recurrent_SHVK: Tensor  # at least float32
    conv_rows_SRC: Tensor  # the last pre-convolution rows of q, k and v, oldest first


class MlaMemory(NamedTuple):
    """Cache rows of one MLA layer: page * page_size + offset -> [normed latent | k_pe]."""

    cache_RD: Tensor


class StageMemory(NamedTuple):
    """What the layers of one stage keep, by layer number."""

    layers: dict[int, KdaMemory | MlaMemory]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryShapes:
    """What one slot and one cache row of this rank take, over all layers of the stage."""

    kda_layers: tuple[int, ...]
    mla_layers: tuple[int, ...]
    recurrent_HVK: tuple[int, int, int]
    recurrent_dtype: torch.dtype
    conv_rows_RC: tuple[int, int]
    row_width: int
    dtype: torch.dtype  # of convolution rows and cache rows

    @property
    def bytes_per_slot(self) -> int:
        heads, values, keys = self.recurrent_HVK
        rows, channels = self.conv_rows_RC
        recurrent = heads * values * keys * self.recurrent_dtype.itemsize
        return len(self.kda_layers) * (recurrent + rows * channels * self.dtype.itemsize)

    @property
    def bytes_per_row(self) -> int:
        return len(self.mla_layers) * self.row_width * self.dtype.itemsize

    def bytes_per_page(self, page_size: int) -> int:
        return page_size * self.bytes_per_row

    def allocate(self, num_slots: int, num_rows: int, device: str = "cpu") -> StageMemory:
        """Zero-filled memory of `num_slots` slots and `num_rows` cache rows."""
        layers: dict[int, KdaMemory | MlaMemory] = {}
        for layer in self.kda_layers:
            layers[layer] = KdaMemory(
                torch.zeros(
                    num_slots, *self.recurrent_HVK, dtype=self.recurrent_dtype, device=device
                ),
                torch.zeros(num_slots, *self.conv_rows_RC, dtype=self.dtype, device=device),
            )
        for layer in self.mla_layers:
            layers[layer] = MlaMemory(
                torch.zeros(num_rows, self.row_width, dtype=self.dtype, device=device)
            )
        return StageMemory(layers)


def memory_shapes(
    config: ModelConfig, stage: Stage, tp_size: int, dtype: torch.dtype
) -> MemoryShapes:
    """Shapes of one rank's memory.

    KDA state is split over the ranks by head; MLA rows are the same on every rank.
    """
    kda = config.kda
    heads = local_size("linear_attn_config.num_heads", kda.num_heads, tp_size)
    return MemoryShapes(
        kda_layers=_layers_of(config, stage, LayerKind.KDA),
        mla_layers=_layers_of(config, stage, LayerKind.MLA),
        recurrent_HVK=(heads, kda.head_dim, kda.head_dim),
        recurrent_dtype=torch.promote_types(dtype, torch.float32),
        conv_rows_RC=(kda.num_conv_rows, 3 * heads * kda.head_dim),
        row_width=config.mla.cache_row_width,
        dtype=dtype,
    )


def _layers_of(config: ModelConfig, stage: Stage, kind: LayerKind) -> tuple[int, ...]:
    return tuple(layer for layer in stage.layers if config.layer_kinds[layer] is kind)
