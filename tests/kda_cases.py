"""Layers, steps and what is compared: KDA on a device against the reference.

For the tests and for `bench/kernels/kda_window.py`.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from stagecoach.kernels.kda import KdaInputs, KdaMemory, KdaWeights, kda_attention
from tests.packed_group import GroupPair, make_packed_group, make_reference_step, make_step

NUM_DRAFTS = 16


class Layer(NamedTuple):
    inputs: KdaInputs
    weights: KdaWeights
    memory: KdaMemory


def make_layer(
    num_tokens: int,
    num_heads: int,
    dtype: torch.dtype,
    *,
    num_slots: int,
    head_dim: int = 128,
    num_drafts: int = NUM_DRAFTS,
    lower_bound: float | None = -5.0,
    are_rows_aligned: bool = True,
    device: str = "cuda",
) -> Layer:
    """Random inputs as a fused projection leaves them, and memory of states of a running model.

    Rows of the fused tensor begin at multiples of 16 bytes, or 8 where they are not aligned.
    """
    width = num_heads * head_dim

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device)

    # q, k and v, the output gate, and the rates: columns of one tensor.
    num_columns = 4 * width + 32 + num_heads
    num_columns += -num_columns % 8 + (0 if are_rows_aligned else 8 // dtype.itemsize)
    fused = normal(num_tokens, num_columns).to(dtype)
    inputs = KdaInputs(
        channels_TC=fused[:, : 3 * width],
        decay_THK=normal(num_tokens, num_heads, head_dim).to(dtype),
        beta_TH=fused[:, 4 * width : 4 * width + num_heads],
        gate_THV=fused[:, 3 * width : 4 * width].unflatten(1, (num_heads, head_dim)),
    )
    weights = KdaWeights(
        conv_CW=normal(3 * width, 4) * 0.5,
        a_log_H=torch.rand(num_heads, device=device) * 2.7,
        dt_bias_HK=normal(num_heads, head_dim) - 2,
        norm_V=1 + 0.1 * normal(head_dim),
        lower_bound=lower_bound,
        eps=1e-5,
    )
    record = torch.cat(
        (
            torch.rand(num_slots, num_drafts, num_heads, head_dim, device=device),
            torch.nn.functional.normalize(
                normal(num_slots, num_drafts, num_heads, head_dim), dim=-1
            ),
            normal(num_slots, num_drafts, num_heads, head_dim),
        ),
        dim=-1,
    )
    memory = KdaMemory(
        recurrent_SHVK=normal(num_slots, num_heads, head_dim, head_dim) * 0.3,
        conv_rows_SNC=normal(num_slots, 3 + num_drafts, 3 * width).to(dtype),
        record_SNHX=record,
    )
    for pool in memory:
        pool[0] = 0
    return Layer(inputs, weights, memory)


class Case(NamedTuple):
    name: str
    windows: GroupPair | None
    chunks: GroupPair | None = None
    num_heads: int = 4
    head_dim: int = 128
    lower_bound: float | None = -5.0
    are_rows_aligned: bool = True


def errors_of(case: Case, dtype: torch.dtype, device: str = "cuda") -> dict[str, float]:
    """‖ours − exact‖ / ‖exact‖ of the output and of what changed in each pool, all of its slots.

    The reference runs in float64; what stands at tokens that are nobody's is NaN.
    """
    groups = [group for group in (case.windows, case.chunks) if group is not None]
    num_tokens = sum(group.packed.num_tokens for group in groups)
    layer = make_layer(
        num_tokens,
        case.num_heads,
        dtype,
        num_slots=48,
        head_dim=case.head_dim,
        lower_bound=case.lower_bound,
        are_rows_aligned=case.are_rows_aligned,
        device=device,
    )
    real, offset = [], 0
    for group in groups:
        real += range(offset, offset + group.num_real_tokens)
        offset += group.packed.num_tokens
    nobody = sorted(set(range(num_tokens)) - set(real))
    for x in layer.inputs:
        x[nobody] = torch.nan
    wide = _in_float64(layer, real)
    before = [pool.clone() for pool in wide.memory]
    o_THV = kda_attention(*layer, make_step(case.windows, case.chunks))[real]
    exact_THV = kda_attention(*wide, make_reference_step(case.windows, case.chunks))
    errors = {"output": _relative(o_THV.cpu().double(), exact_THV)}
    pools = zip(layer.memory._fields, layer.memory, wide.memory, before, strict=True)
    for name, ours, exact, old in pools:
        ours = ours.cpu().double()
        if case.windows is not None and name != "recurrent_SHVK":
            _take_undefined(exact, ours, case.windows, 0 if name == "record_SNHX" else 3)
        errors[name] = _relative(ours - old, exact - old)
    return errors


def _relative(ours: Tensor, exact: Tensor) -> float:
    error = float((ours - exact).norm() / exact.norm().clamp(min=1e-30))
    return error if error == error else float("inf")


def _take_undefined(exact: Tensor, ours: Tensor, windows: GroupPair, num_before: int) -> None:
    """The rows that the reference writes behind the drafts of the shorter windows."""
    group = windows.segments
    pairs = zip(group.write_slots_B.tolist(), group.num_drafts_B.tolist(), strict=True)
    for slot, num_drafts in pairs:
        behind = slice(num_before + num_drafts, num_before + group.max_drafts)
        exact[slot, behind] = ours[slot, behind]


def _in_float64(layer: Layer, real: list[int]) -> Layer:
    def wide(x: Tensor) -> Tensor:
        return x.cpu().double()

    return Layer(
        KdaInputs(*(wide(x[real]) for x in layer.inputs)),
        layer.weights._replace(
            **{
                name: wide(value)
                for name, value in layer.weights._asdict().items()
                if isinstance(value, Tensor)
            }
        ),
        KdaMemory(*(wide(pool) for pool in layer.memory)),
    )


def window_cases(device: str) -> Iterator[Case]:
    """Ragged windows of every kind: lengths, replays, slots, saves, empty places."""

    def group(lengths: list[int], replay: list[int], **others: object) -> GroupPair:
        starts = [9 + 3 * index for index in range(len(lengths))]
        drafts = [length - 1 for length in lengths]
        return make_packed_group(lengths, starts, replay, drafts, device=device, **others)

    for length in (1, 2, 5, 8, 9, 17):
        yield Case(f"W={length}", group([length] * 3, [0, min(3, length - 1), length - 1]))
    yield Case("ragged", group([8, 1, 3, 5, 2, 8], [7, 0, 2, 5, 1, 0]))
    yield Case("ragged beyond 8", group([17, 1, 9, 12], [16, 8, 3, 0]))
    yield Case(
        "empty places",
        group([4, 1, 3], [3, 0, 1], capacity_segments=7, capacity_tokens=40),
    )
    yield Case(
        "other slots, saves",
        group(
            [5, 1, 3, 8],
            [4, 3, 2, 7],
            read_slots=[1, 2, 3, 4],
            write_slots=[5, 6, 3, 8],
            saves=[(0, 6, 9), (0, 10, 10), (1, 10, 11), (1, 12, 12), (2, 16, 13), (3, 12, 14)],
        ),
    )
    yield Case(
        "single tokens, saves",
        group(
            [1, 1, 1],
            [4, 0, 7],
            read_slots=[1, 2, 3],
            write_slots=[5, 2, 6],
            saves=[(0, 6, 9), (0, 10, 10), (1, 13, 11), (2, 9, 12)],
        ),
    )
    yield Case("from nothing", group([1, 4], [0, 0], read_slots=[0, 0]))
    yield Case("unbounded gate", group([8, 2], [3, 1]), lower_bound=None)
    # The copy engine does not take rows that begin between its multiples of 16 bytes.
    yield Case("rows not aligned", group([8, 2, 9], [3, 1, 2]), are_rows_aligned=False)
    yield Case("heads of 64", group([8, 2], [3, 1]), head_dim=64)
    yield Case("one head", group([8, 1, 3], [3, 0, 1]), num_heads=1)


def mixed_cases(device: str) -> Iterator[Case]:
    """Windows beside chunks, and chunks alone."""
    windows = make_packed_group([8, 2], [9, 30], [3, 0], [7, 1], device=device)
    chunks = make_packed_group(
        [1, 100, 64, 257],
        [0, 4, 0, 64],
        [0, 2, 0, 0],
        read_slots=[0, 5, 0, 7],
        write_slots=[4, 6, 8, 7],
        saves=[(1, 6, 10), (3, 128, 12), (3, 200, 13)],
        capacity_segments=6,
        capacity_tokens=450,
        device=device,
    )
    yield Case("chunks", None, chunks)
    yield Case("windows and chunks", windows, chunks)
