"""The Markov bias and the rotation of pairs, as a device's kernels make them, interpreted."""

import pytest
import torch

from stagecoach.kernels.markov_bias import add_markov_bias
from stagecoach.kernels.markov_bias import cuda as markov_cuda
from stagecoach.kernels.rope import cuda as rope_cuda
from stagecoach.kernels.rope import rotate_pairs

torch.set_num_threads(1)
pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("num_rows", [1, 5, 66])
@pytest.mark.parametrize(("vocab_size", "rank"), [(100, 16), (260, 72)])
def test_the_markov_bias_is_that_of_the_reference(
    num_rows: int, vocab_size: int, rank: int
) -> None:
    """Logits of one place of a block, and tokens of one column."""
    torch.manual_seed(num_rows)
    logits_NV = torch.randn(num_rows, 3, vocab_size)[:, 1]
    ids_N = torch.randint(vocab_size, (num_rows, 4), dtype=torch.int32)[:, 2]
    first_VM, second_VM = torch.randn(2, vocab_size, rank)
    out_NV = markov_cuda.add_markov_bias(logits_NV, ids_N, first_VM, second_VM)
    expected_NV = add_markov_bias(logits_NV, ids_N, first_VM, second_VM)
    torch.testing.assert_close(out_NV, expected_NV, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("has_neighbour_pairs", [False, True])
@pytest.mark.parametrize(("num_heads", "width"), [(1, 8), (3, 20), (6, 64)])
def test_pairs_turn_as_in_the_reference(
    num_heads: int, width: int, has_neighbour_pairs: bool
) -> None:
    """The last columns of wider heads, at two dims of positions."""
    torch.manual_seed(width)
    x = torch.randn(2, 3, num_heads, 16 + width)[..., 16:]
    angles = 100 * torch.rand(2, 3, width // 2)
    out, expected = (
        rotate(x, angles.cos(), angles.sin(), has_neighbour_pairs=has_neighbour_pairs)
        for rotate in (rope_cuda.rotate_pairs, rotate_pairs)
    )
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)


def test_a_rotation_keeps_lengths_and_depends_on_distance_alone() -> None:
    """q at m and k at n: their product is a function of m - n (RoFormer, §3.2)."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 8, dtype=torch.float64)
    frequencies = torch.tensor([1.0, 0.5, 0.1, 0.01], dtype=torch.float64)

    def turned(x: torch.Tensor, position: int) -> torch.Tensor:
        angles = position * frequencies
        return rotate_pairs(x, angles.cos(), angles.sin(), has_neighbour_pairs=True)

    assert turned(q, 7).norm() == pytest.approx(float(q.norm()))
    near, far = ((turned(q, at + 3) * turned(k, at)).sum() for at in (0, 1000))
    assert float(near) == pytest.approx(float(far))
