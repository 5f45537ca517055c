"""KDA windows on a GPU: which form runs them, and their launches.

`walk.cu` and `window.cu` are all of it in one kernel, for heads of 128: the first for windows of
several tokens, the second for single tokens, for rows that the copy engine does not take and for
more replayed rows than the first has room for.
Triton's form, the convolution and `window_kernel.py`, is for all other heads and where no CUDA
compiler is at hand.
"""

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from triton import next_power_of_2

from stagecoach.kernels import nvrtc
from stagecoach.kernels.kda.tensors import KdaInputs, KdaMemory, KdaWeights
from stagecoach.kernels.kda.window_kernel import kda_window_kernel
from stagecoach.kernels.ragged import PackedGroup
from stagecoach.kernels.short_conv.cuda import convolve_heads
from stagecoach.observe.log import get_logger

_log = get_logger(__name__)

_SOURCE = Path(__file__).with_name("window.cu")
_WALK_SOURCE = _SOURCE.with_name("walk.cu")
_HEAD_DIM = 128
_NUM_TAPS = 4
_TILE = 8  # tokens
_NUM_THREADS = 256
# `Shared` in the source, without the rows before the convolution and those that are replayed.
_VALUES_OF_TILE = 6 * 8 * 128 + 8 * 65 * 4 + 16 * 136 + 16 * 8 + 8 + 8 + 3 * 128 * 4 + 2 * 128
_ROW_WIDTH = 3 * _HEAD_DIM
_NUM_WALK_THREADS = 640
# `Shared` of the walk, without rows in the activations' type: twice `Tokens`, vectors, sums, taps;
# then a few scalars, units and barriers.
_VALUES_OF_TOKENS = 2 * 8 * 128 + 2 * 8 * 136 + 2 * 32 + 8
_VALUES_OF_WALK = 2 * _VALUES_OF_TOKENS + 2 * 8 * 260 + 4 * 128 + 64 + 256 + 3 * 128 * 4 + 128
_BYTES_OF_UNITS = 12 * 4 + 6 * 9 * 4 + 15 * 8
_COPY_BYTES = 16  # what the copy engine moves lies at multiples of it
_MAX_SHARED_BYTES = 227 * 1024


class WindowArguments(ctypes.Structure):
    """`Arguments` in `window_arguments.cuh`, field by field."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("channels", "decay", "beta", "gate", "out", "conv_rows"),
                *("conv", "a_log", "dt_bias", "norm", "states", "records"),
                *("offsets", "read_slots", "write_slots", "replay"),
                *("first_save", "save_tokens", "save_slots"),
            )
        ),
        *(
            (f"{name}_stride", ctypes.c_longlong)
            for name in ("channels", "decay", "beta", "gate", "out")
        ),
        *((f"{name}_stride", ctypes.c_longlong) for name in ("states", "records", "conv_rows")),
        ("num_heads", ctypes.c_int),
        ("num_ahead", ctypes.c_int),
        ("has_bound", ctypes.c_int),
        ("lower_bound", ctypes.c_float),
        ("eps", ctypes.c_float),
        ("num_segments", ctypes.c_int),
        ("max_replay", ctypes.c_int),
    ]


def kda_windows(
    inputs: KdaInputs,
    weights: KdaWeights,
    memory: KdaMemory,
    group: PackedGroup,
    out_THV: Tensor,
) -> None:
    """The convolution, `reference.kda_recurrent` and the gated norm, of windows.

    One read and one write of each state, whatever the length of the window.

    Args:
        inputs: of the windows' tokens.
        weights: of the layer.
        memory: pools of the layer, updated in place.
        group: of windows: an anchor, then drafts.
        out_THV: written for the tokens of the windows.
    """
    _, num_heads, head_dim = out_THV.shape
    # What a captured launch replays may be anything up to the bound.
    num_rows = memory.record_SNHX.shape[1]
    assert max(group.max_replay, group.max_drafts) <= num_rows, f"{num_rows} rows: {group}"
    for x_THD in (inputs.decay_THK, inputs.gate_THV, out_THV):
        assert x_THD.stride()[1:] == (head_dim, 1), f"strides {x_THD.stride()} of a head"
    assert inputs.channels_TC.stride(1) == 1, "channels of neighbours lie together"
    assert num_heads == 1 or inputs.beta_TH.stride(1) == 1, "rates of neighbours lie together"
    assert all(x.dtype == out_THV.dtype for x in (*inputs, memory.conv_rows_SNC)), "one type"
    assert all(pool.is_contiguous() for pool in memory), "pools lie in one piece"
    for pool in (memory.recurrent_SHVK, memory.record_SNHX):
        assert pool.dtype == torch.float32, f"{pool.dtype} of states and records"
    if _is_for_cuda(inputs, weights, group, out_THV) and _has_compiler():
        launch = _walk if _is_for_walk(inputs, weights, memory, group) else _launch_items
        launch(_arguments(inputs, weights, memory, group, out_THV), group, out_THV)
    else:
        kda_windows_triton(inputs, weights, memory, group, out_THV)


def _launch_items(arguments: WindowArguments, group: PackedGroup, out_THV: Tensor) -> None:
    """One block for each head of each segment."""
    kernel = nvrtc.load_kernel(
        _SOURCE,
        "kda_windows",
        out_THV.device,
        tuple(window_definitions(out_THV.dtype).items()),
    )
    grid = (out_THV.shape[1], group.num_segments, 1)
    kernel.launch(grid, _NUM_THREADS, arguments, _shared_bytes(out_THV.dtype, group))


def _walk(arguments: WindowArguments, group: PackedGroup, out_THV: Tensor) -> None:
    """One block for each multiprocessor."""
    kernel = nvrtc.load_kernel(
        _WALK_SOURCE,
        "kda_walk",
        out_THV.device,
        tuple(walk_definitions(out_THV.dtype).items()),
    )
    num_items = out_THV.shape[1] * group.num_segments
    num_blocks = min(num_items, _num_multiprocessors(out_THV.device))
    shared_bytes = _walk_shared_bytes(out_THV.dtype, group)
    kernel.launch((num_blocks, 1, 1), _NUM_WALK_THREADS, arguments, shared_bytes)


def _is_for_cuda(
    inputs: KdaInputs, weights: KdaWeights, group: PackedGroup, out_THV: Tensor
) -> bool:
    """Whether `window.cu` takes it: four channels a load, of heads and taps as it has them."""
    rows = (inputs.channels_TC, inputs.decay_THK, inputs.gate_THV, out_THV)
    # A tensor-parallel split may leave tokens apart by an odd number.
    is_aligned = all(
        x.stride(0) % 4 == 0 and x.data_ptr() % (4 * x.element_size()) == 0 for x in rows
    )
    return (
        is_aligned
        and out_THV.shape[2] == _HEAD_DIM
        and weights.conv_CW.shape[1] == _NUM_TAPS
        and _shared_bytes(out_THV.dtype, group) <= _MAX_SHARED_BYTES
    )


def _is_for_walk(
    inputs: KdaInputs, weights: KdaWeights, memory: KdaMemory, group: PackedGroup
) -> bool:
    """Whether `walk.cu` takes what `window.cu` takes, and is the faster of the two."""
    rows = (inputs.channels_TC, inputs.decay_THK, inputs.gate_THV)
    copied = (*rows, *memory, weights.conv_CW, weights.dt_bias_HK)
    return (
        group.max_length > 1
        and all(x.stride(0) * x.element_size() % _COPY_BYTES == 0 for x in rows)
        and all(x.data_ptr() % _COPY_BYTES == 0 for x in copied)
        and _walk_shared_bytes(inputs.gate_THV.dtype, group) <= _MAX_SHARED_BYTES
        and _has_copy_engine(inputs.gate_THV.device)
    )


@cache
def _has_copy_engine(device: torch.device) -> bool:
    """Whether it is a Hopper GPU: registers also go from warpgroup to warpgroup there."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def window_definitions(dtype: torch.dtype) -> dict[str, int]:
    """What `window.cu` is compiled with, for activations of `dtype`."""
    raw = (_NUM_TAPS - 1 + _TILE) * _ROW_WIDTH * dtype.itemsize
    return {
        "ACTIVATION_IS_BF16": int(dtype == torch.bfloat16),
        "SHARED_BYTES": 4 * _VALUES_OF_TILE + raw,
    }


def _shared_bytes(dtype: torch.dtype, group: PackedGroup) -> int:
    replayed = 4 * _ROW_WIDTH * max(1, group.max_replay)
    return window_definitions(dtype)["SHARED_BYTES"] + replayed


def walk_definitions(dtype: torch.dtype) -> dict[str, int]:
    """What `walk.cu` is compiled with, for activations of `dtype`."""
    rows = (_NUM_TAPS - 1 + _TILE) * _ROW_WIDTH + 2 * _TILE * _HEAD_DIM
    return {
        "ACTIVATION_IS_BF16": int(dtype == torch.bfloat16),
        "SHARED_BYTES": 4 * _VALUES_OF_WALK + _BYTES_OF_UNITS + rows * dtype.itemsize,
    }


def _walk_shared_bytes(dtype: torch.dtype, group: PackedGroup) -> int:
    """With the state that comes and that which goes, and rows to replay on two states."""
    buffer = 4 * (_HEAD_DIM * _HEAD_DIM + _ROW_WIDTH * group.max_replay)
    return walk_definitions(dtype)["SHARED_BYTES"] + 2 * buffer


@cache
def _has_compiler() -> bool:
    if nvrtc.is_available():
        return True
    _log.warning("cuda.bindings is not installed: KDA windows run in Triton, up to 3 times slower")
    return False


def _arguments(
    inputs: KdaInputs,
    weights: KdaWeights,
    memory: KdaMemory,
    group: PackedGroup,
    out_THV: Tensor,
) -> WindowArguments:
    for weight in weights[:4]:
        assert weight.dtype == torch.float32 and weight.is_contiguous(), "weights: float32"
    tensors = {
        "channels": inputs.channels_TC,
        "decay": inputs.decay_THK,
        "beta": inputs.beta_TH,
        "gate": inputs.gate_THV,
        "out": out_THV,
        "conv_rows": memory.conv_rows_SNC,
        "conv": weights.conv_CW,
        "a_log": weights.a_log_H,
        "dt_bias": weights.dt_bias_HK,
        "norm": weights.norm_V,
        "states": memory.recurrent_SHVK,
        "records": memory.record_SNHX,
        "offsets": group.offsets_S,
        "read_slots": group.read_slots_B,
        "write_slots": group.write_slots_B,
        "replay": group.replay_B,
    }
    if group.saves is not None:
        tensors["first_save"] = group.saves.first_S
        tensors["save_tokens"] = group.saves.num_tokens_E
        tensors["save_slots"] = group.saves.slots_E
    strides = {
        f"{name}_stride": tensors[name].stride(0)
        for name in (
            *("channels", "decay", "beta", "gate", "out"),
            *("states", "records", "conv_rows"),
        )
    }
    return WindowArguments(
        **{name: tensor.data_ptr() for name, tensor in tensors.items()},
        **strides,
        num_heads=out_THV.shape[1],
        num_ahead=_num_multiprocessors(out_THV.device),
        has_bound=int(weights.lower_bound is not None),
        lower_bound=weights.lower_bound or 0.0,
        eps=weights.eps,
        num_segments=group.num_segments,
        max_replay=group.max_replay,
    )


@cache
def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def kda_windows_triton(
    inputs: KdaInputs,
    weights: KdaWeights,
    memory: KdaMemory,
    group: PackedGroup,
    out_THV: Tensor,
) -> None:
    """The same in Triton, token after token, for any head size."""
    _, num_heads, head_dim = out_THV.shape
    q_THK, k_THK, v_THV = convolve_heads(
        inputs.channels_TC, weights.conv_CW, memory.conv_rows_SNC, num_heads, group
    )
    saves = group.saves
    block = next_power_of_2(head_dim)
    kda_window_kernel[(num_heads, group.num_segments)](
        q_THK,
        k_THK,
        v_THV,
        inputs.decay_THK,
        inputs.beta_TH,
        inputs.gate_THV,
        out_THV,
        weights.a_log_H,
        weights.dt_bias_HK,
        weights.norm_V,
        memory.recurrent_SHVK,
        memory.record_SNHX,
        group.offsets_S,
        group.read_slots_B,
        group.write_slots_B,
        group.replay_B,
        # Any address where nothing is saved: it is not looked at.
        group.offsets_S if saves is None else saves.first_S,
        group.offsets_S if saves is None else saves.num_tokens_E,
        group.offsets_S if saves is None else saves.slots_E,
        weights.lower_bound or 0.0,
        weights.eps,
        *(x.stride(0) for x in (q_THK, k_THK, v_THV)),
        *(x.stride(0) for x in (inputs.decay_THK, inputs.beta_TH, inputs.gate_THV, out_THV)),
        memory.recurrent_SHVK.stride(0),
        memory.record_SNHX.stride(0),
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        BLOCK=block,
        HAS_BOUND=weights.lower_bound is not None,
        HAS_SAVES=saves is not None,
        num_warps=max(1, min(16, block * block // 1024)),
    )
