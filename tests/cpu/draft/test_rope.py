"""Rotary positions against published numbers and transformers' functions."""

import pytest
import torch
from transformers import DeepseekV3Config, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from stagecoach.config.draft import RopeConfig
from stagecoach.draft.rope import Rope, correction_range, inverse_frequencies

pytestmark = pytest.mark.cpu

PUBLISHED = RopeConfig(
    theta=50000.0,
    yarn_factor=32.0,
    original_max_position_embeddings=32768,
    mscale=1.0,
    mscale_all_dim=1.0,
)


def test_the_published_correction_range() -> None:
    assert correction_range(PUBLISHED, 64) == (15, 26)


@pytest.mark.parametrize(("factor", "mscale_all_dim"), [(32.0, 1.0), (4.0, 0.0), (8.0, 0.707)])
def test_frequencies_are_those_of_transformers(factor: float, mscale_all_dim: float) -> None:
    config = RopeConfig(
        theta=50000.0,
        yarn_factor=factor,
        original_max_position_embeddings=4096,
        mscale_all_dim=mscale_all_dim,
    )
    rope = {
        "rope_type": "yarn",
        "rope_theta": config.theta,
        "factor": factor,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": mscale_all_dim,
    }
    theirs = Qwen3Config(head_dim=64, max_position_embeddings=131072, rope_parameters=rope)
    frequencies, magnitude = ROPE_INIT_FUNCTIONS["yarn"](theirs, device="cpu")
    torch.testing.assert_close(
        inverse_frequencies(config, 64).float(), frequencies, rtol=1e-6, atol=0
    )
    assert config.magnitude == pytest.approx(magnitude)


def test_without_yarn_frequencies_fall_by_powers() -> None:
    frequencies = inverse_frequencies(RopeConfig(theta=10000.0), 8)
    torch.testing.assert_close(
        frequencies, torch.tensor([1.0, 0.1, 0.01, 0.001], dtype=torch.float64)
    )


@pytest.mark.parametrize("has_neighbour_pairs", [True, False])
def test_rotation_is_that_of_transformers(has_neighbour_pairs: bool) -> None:
    rope = Rope(PUBLISHED, 64, torch.float32, has_neighbour_pairs=has_neighbour_pairs)
    positions = torch.tensor([0, 1, 77, 30000])
    x = torch.randn(4, 3, 64, generator=torch.Generator().manual_seed(0))
    rotation = rope.rotation(positions)
    cos, sin = (torch.cat([part, part], dim=-1) for part in rotation)
    apply = apply_rotary_pos_emb_interleave if has_neighbour_pairs else apply_rotary_pos_emb
    theirs, _ = apply(x, x, cos, sin, unsqueeze_dim=1)
    torch.testing.assert_close(rope(x, rotation), theirs, rtol=0, atol=0)


@pytest.mark.parametrize("has_neighbour_pairs", [True, False])
def test_products_depend_on_the_distance_alone(has_neighbour_pairs: bool) -> None:
    rope = Rope(PUBLISHED, 64, torch.float64, has_neighbour_pairs=has_neighbour_pairs)
    q, k = torch.randn(2, 1, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def product(q_position: int, k_position: int) -> float:
        turned = [
            rope(x, rope.rotation(torch.tensor(position)))
            for x, position in ((q, q_position), (k, k_position))
        ]
        return float((turned[0] * turned[1]).sum())

    assert product(9, 4) == pytest.approx(product(100_009, 100_004), rel=1e-9)
    assert product(9, 4) != pytest.approx(product(9, 5), rel=1e-3)


def test_a_narrow_type_comes_back_narrow() -> None:
    rope = Rope(PUBLISHED, 64, torch.float32, has_neighbour_pairs=True)
    x = torch.ones(2, 1, 64, dtype=torch.bfloat16)
    assert rope(x, rope.rotation(torch.tensor([0, 5]))).dtype == torch.bfloat16


def test_deepseek_reads_the_same_keys() -> None:
    """The class whose attention is the oracle of the latent backbone has YaRN as we have it."""
    config = DeepseekV3Config(
        qk_rope_head_dim=64,
        max_position_embeddings=1048576,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 50000.0,
            "factor": 32.0,
            "original_max_position_embeddings": 32768,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    )
    frequencies, magnitude = ROPE_INIT_FUNCTIONS["yarn"](config, device="cpu")
    torch.testing.assert_close(
        inverse_frequencies(PUBLISHED, 64).float(), frequencies, rtol=1e-6, atol=0
    )
    assert magnitude == 1.0
