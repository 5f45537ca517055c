"""The chunked KDA kernels on a GPU against the reference in float64."""

import dataclasses

import pytest
import torch

from tests.kda_chunk_cases import CASES, ChunkCase, compare, draw, run_device

_TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 1e-2}


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", _TOLERANCES)
@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name: str, dtype: torch.dtype, head_dim: int) -> None:
    case = dataclasses.replace(CASES[name], head_dim=head_dim, num_heads=4)
    errors = compare(case, dtype, "cuda")
    assert errors.output < _TOLERANCES[dtype] and errors.state < _TOLERANCES[dtype], errors
    assert not errors.touched, "a slot changed that no segment names"


def test_a_graph_replays_other_segments() -> None:
    """Captured at one division of the tokens, replayed at another: the same numbers."""
    small = ChunkCase(
        lengths=(30, 40), head_dim=128, capacity_segments=4, capacity_tokens=300, saves=()
    )
    other = dataclasses.replace(small, lengths=(130, 5, 100))
    pair, other_pair = small.make_group("cuda"), other.make_group("cuda")
    drawn = draw(other, other_pair, torch.bfloat16, "cuda", seed=3)
    run_device(small, drawn._replace(state_SHVK=drawn.state_SHVK.clone()), pair)
    captured = drawn._replace(state_SHVK=drawn.state_SHVK.clone())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o_THV = run_device(small, captured, pair)
    for ours, theirs in zip(pair.packed, other_pair.packed, strict=True):
        if isinstance(ours, torch.Tensor) and ours.shape == theirs.shape:
            ours.copy_(theirs)
    graph.replay()
    expected_THV = run_device(other, drawn, other_pair)
    real = slice(other_pair.num_real_tokens)
    assert torch.equal(o_THV[real], expected_THV[real])
    assert torch.equal(captured.state_SHVK[1:4], drawn.state_SHVK[1:4])
