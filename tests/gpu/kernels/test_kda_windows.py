"""KDA of a whole step on a GPU against the reference, and its two forms against each other."""

import pytest
import torch

pytest.importorskip("triton")

from stagecoach.kernels.kda import KdaMemory
from stagecoach.kernels.kda.window_cuda import kda_windows, kda_windows_triton
from tests.kda_cases import errors_of, make_layer, mixed_cases, window_cases
from tests.packed_group import make_packed_group

_NAMES = [case.name for case in (*window_cases("cpu"), *mixed_cases("cpu"))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", _NAMES)
def test_equals_the_reference(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    cases = {case.name: case for case in (*window_cases("cuda"), *mixed_cases("cuda"))}
    with torch.no_grad():
        errors = errors_of(cases[name], dtype)
    assert max(errors.values()) < (1e-5 if dtype == torch.float32 else 1.5e-2), errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_captured_launch_takes_other_segments(dtype: torch.dtype) -> None:
    """Replayed after lengths, slots and replays changed in place, it does what they say."""
    captured, other = (
        make_packed_group(
            lengths,
            [20] * len(lengths),
            replay,
            [length - 1 for length in lengths],
            read_slots=slots,
            write_slots=slots,
            capacity_segments=4,
            capacity_tokens=32,
            device="cuda",
            bounds={"max_length": 8, "max_replay": 7, "max_drafts": 7},
        ).packed
        for lengths, replay, slots in (
            ([8, 8, 8, 8], [3, 3, 3, 3], [1, 2, 3, 4]),
            ([2, 1, 7], [0, 7, 2], [6, 5, 1]),
        )
    )
    layer = make_layer(32, 4, dtype, num_slots=8, num_drafts=7)
    memory = KdaMemory(*(pool.clone() for pool in layer.memory))
    out_THV, expected_THV = (torch.zeros_like(layer.inputs.decay_THK) for _ in range(2))
    kda_windows(layer.inputs, layer.weights, memory, captured, out_THV)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kda_windows(layer.inputs, layer.weights, memory, captured, out_THV)
    for ours, fresh in zip(memory, layer.memory, strict=True):
        ours.copy_(fresh)
    for fixed, changed in zip(captured, other, strict=True):
        if isinstance(fixed, torch.Tensor) and fixed.shape == changed.shape:
            fixed.copy_(changed)
    out_THV.zero_()
    graph.replay()
    kda_windows(layer.inputs, layer.weights, layer.memory, other, expected_THV)
    torch.cuda.synchronize()
    assert torch.equal(out_THV, expected_THV)
    for ours, expected in zip(memory, layer.memory, strict=True):
        assert torch.equal(ours, expected)
    assert not out_THV[10:].any(), "an output of nobody's token was written"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("repeats", [1, 12])
def test_both_forms_agree(dtype: torch.dtype, repeats: int) -> None:
    """Of few heads, and of more than blocks fit on a GPU: then each block has several."""
    num_heads = 8 if repeats == 1 else 32
    lengths, replay, num_drafts = ([8, 1, 5, 9], [3, 0, 7, 2], [7, 0, 4, 8])
    group = make_packed_group(
        lengths * repeats,
        [9] * 4 * repeats,
        replay * repeats,
        num_drafts * repeats,
        device="cuda",
    ).packed
    layer = make_layer(23 * repeats, num_heads, dtype, num_slots=4 * repeats + 1)
    results = []
    for run in (kda_windows, kda_windows_triton):
        memory = KdaMemory(*(pool.clone() for pool in layer.memory))
        out_THV = torch.full_like(layer.inputs.decay_THK, torch.nan)
        run(layer.inputs, layer.weights, memory, group, out_THV)
        results.append((out_THV, memory.recurrent_SHVK, memory.conv_rows_SNC))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for ours, other in zip(*results, strict=True):
        torch.testing.assert_close(ours, other, rtol=tolerance, atol=tolerance)
