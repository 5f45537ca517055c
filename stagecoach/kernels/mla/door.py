"""Latent attention wherever the tensors lie: the reference on CPU, Triton on a GPU.

Dimensions: as in `reference.py`; K inputs and O outputs of a head's matrix.
"""

from torch import Tensor

from stagecoach.kernels.mla import reference
from stagecoach.kernels.ragged import PackedGroup, SegmentGroup


def write_rows(
    cache_RD: Tensor,
    latent_TC: Tensor,
    k_pe_TP: Tensor,
    norm_weight_C: Tensor,
    eps: float,
    cache_rows_T: Tensor,
) -> None:
    """`reference.write_rows`; on a GPU nothing is written where `cache_rows_T` (int32) is -1."""
    if cache_RD.is_cuda:
        from stagecoach.kernels.mla import cuda

        cuda.write_rows(cache_RD, latent_TC, k_pe_TP, norm_weight_C, eps, cache_rows_T)
    else:
        reference.write_rows(cache_RD, latent_TC, k_pe_TP, norm_weight_C, eps, cache_rows_T)


def head_product(x_THK: Tensor, weight_HKO: Tensor, gate_THO: Tensor | None = None) -> Tensor:
    """`reference.head_product`: [T, H, O] in `x_THK.dtype`."""
    if x_THK.is_cuda:
        from stagecoach.kernels.mla import cuda

        return cuda.head_product(x_THK, weight_HKO, gate_THO)
    return reference.head_product(x_THK, weight_HKO, gate_THO)


def mla_decode(
    q_latent_THC: Tensor,
    q_pe_THP: Tensor,
    cache_RD: Tensor,
    group: SegmentGroup | PackedGroup,
    scale: float,
) -> Tensor:
    """`reference.mla_decode`: [T, H, C] in `q_latent_THC.dtype`."""
    if isinstance(group, PackedGroup):
        from stagecoach.kernels.mla import cuda

        return cuda.mla_decode(q_latent_THC, q_pe_THP, cache_RD, group, scale)
    return reference.mla_decode(q_latent_THC, q_pe_THP, cache_RD, group, scale)


def mla_prefill(
    q_THD: Tensor,
    cache_RD: Tensor,
    kv_up_OC: Tensor,
    group: SegmentGroup | PackedGroup,
    scale: float,
    gate_THV: Tensor | None = None,
) -> Tensor:
    """`reference.mla_prefill`: [T, H, V] in `q_THD.dtype`."""
    if isinstance(group, PackedGroup):
        from stagecoach.kernels.mla import cuda

        return cuda.mla_prefill(q_THD, cache_RD, kv_up_OC, group, scale, gate_THV)
    return reference.mla_prefill(q_THD, cache_RD, kv_up_OC, group, scale, gate_THV)
