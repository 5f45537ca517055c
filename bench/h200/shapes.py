"""Models at their real sizes, and the fewest bytes that a step of them must move.

Weights are random (`--load-format dummy`): a folder holds a config and a byte tokenizer only.
"""

import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from stagecoach.costs.machine import H200
from stagecoach.draft.tiny import TinyDraftShape, mla_draft_config
from stagecoach.model.tiny import (
    TinyShape,
    kimi_k3_config,
    kimi_linear_config,
    write_byte_tokenizer,
    write_json,
)

COPY_BYTES_PER_SECOND = H200.copy_bytes_per_second  # read + written
MATRIX_FLOPS_PER_SECOND = H200.matrix_flops_per_second  # bf16, 8192 x 8192 x 8192

NUM_COUNTED_EXPERTS = 256
# Distinct experts a layer and step, counted with the peer on weights drawn alike.
DISTINCT_EXPERTS = {1: 8.0, 4: 30.0, 8: 54.2, 31: 140.0, 32: 140.0, 64: 192.0, 256: 247.3}

_KIMI_LINEAR = TinyShape(
    num_layers=27,
    mla_layers=(3, 7, 11, 15, 19, 23, 26),
    hidden_size=2304,
    num_heads=32,
    head_dim=128,
    dense_size=9216,
    num_experts=256,
    num_experts_per_token=8,
    num_shared_experts=1,
    expert_size=1024,
    latent_size=None,
    q_lora_rank=None,
    kv_lora_rank=512,
    nope_dim=128,
    rope_dim=64,
    value_dim=128,
    block_size=None,
    vocab_size=163840,
    max_length=1 << 20,
)

# Weights of the Kimi-Linear shape that `ptpc_fp8` makes a byte shorter, by its default patterns.
FP8_VALUES = 1.177e9


class LinearBytes(NamedTuple):
    """Of the Kimi-Linear shape: what a decode step reads and writes."""

    dense: float = 3.27e9  # all weights but the routed experts
    expert: float = 14.16e6  # one expert of one layer
    num_moe_layers: int = 26
    state: float = 86.8e6  # of one request: KDA state and convolution rows, read and written
    row: float = 8064.0  # of one cached token, over all MLA layers


BFLOAT16_BYTES = LinearBytes()


def kimi_linear_48b() -> dict[str, Any]:
    """`config.json` at the sizes of Kimi-Linear-48B-A3B."""
    return kimi_linear_config(_KIMI_LINEAR)


def kimi_k3_slice(num_layers: int = 8, num_experts: int = 64) -> dict[str, Any]:
    """`config.json` of Kimi-K3's first layers at their real sizes, with fewer experts.

    The pattern of attention and residual blocks is the model's; every fourth layer is MLA.
    """
    shape = TinyShape(
        num_layers=num_layers,
        mla_layers=tuple(range(3, num_layers, 4)),
        hidden_size=7168,
        num_heads=96,
        head_dim=128,
        dense_size=33792,
        num_experts=num_experts,
        num_experts_per_token=16,
        num_shared_experts=2,
        expert_size=3072,
        latent_size=3584,
        q_lora_rank=1536,
        kv_lora_rank=512,
        nope_dim=128,
        rope_dim=64,
        value_dim=128,
        block_size=12,
        vocab_size=163840,
        max_length=1 << 20,
    )
    return kimi_k3_config(shape)


def kimi_k3_draft(num_layers: int = 8) -> dict[str, Any]:
    """`config.json` of a latent-attention draft beside `kimi_k3_slice`, at the target's width."""
    shape = TinyDraftShape(
        taps=(1, num_layers // 2, num_layers - 1),
        hidden_size=7168,
        vocab_size=163840,
        num_layers=3,
        num_heads=64,
        q_lora_rank=1536,
        kv_lora_rank=512,
        nope_dim=128,
        rope_dim=64,
        value_dim=128,
        intermediate_size=14336,
        markov_rank=256,
        mask_token_id=163838,
        max_length=1 << 20,
    )
    return mla_draft_config(shape)


def write_folder(config: dict[str, Any], *, is_draft: bool = False) -> Path:
    """A folder that `--load-format dummy` can start from."""
    folder = Path(tempfile.mkdtemp(prefix="stagecoach-shape-"))
    write_json(folder / "config.json", config)
    if not is_draft:
        write_byte_tokenizer(folder, config.get("text_config", config)["vocab_size"])
    return folder


def linear_bytes(*, has_fp8_weights: bool, has_fp8_rows: bool) -> LinearBytes:
    """Of the Kimi-Linear shape with `ptpc_fp8` weights or fp8 rows of the MLA cache."""
    sizes = BFLOAT16_BYTES
    if has_fp8_weights:
        sizes = sizes._replace(dense=sizes.dense - FP8_VALUES)
    if has_fp8_rows:
        sizes = sizes._replace(row=sizes.row / 2)
    return sizes


def decode_limit_seconds(
    concurrency: int,
    context: float,
    *,
    num_stages: int = 1,
    tp_size: int = 1,
    sizes: LinearBytes = BFLOAT16_BYTES,
) -> float:
    """Time of the bytes of one decode step of the Kimi-Linear shape, over all its stages.

    With several stages a step is that of one cohort, of which as many run at a time as there
    are stages: the time until every request has another token.

    Args:
        concurrency: requests that decode.
        context: mean cached tokens of each.
        sizes: of the weights and the rows.
    """
    cohort = -(-concurrency // num_stages)
    experts = distinct_experts(cohort) * sizes.expert * sizes.num_moe_layers
    cohort_bytes = sizes.dense + experts + cohort * (sizes.state + context * sizes.row)
    num_cohorts = -(-concurrency // cohort)
    # Every cohort passes every stage; the stages work side by side once there are enough cohorts.
    side_by_side = min(num_stages, num_cohorts)
    return num_cohorts * cohort_bytes / side_by_side / tp_size / COPY_BYTES_PER_SECOND


def distinct_experts(num_tokens: int, num_experts: int = 256, num_chosen: int = 8) -> float:
    """Experts of a layer that a step reads: as counted where it was, else for even routing."""
    if num_experts == NUM_COUNTED_EXPERTS and num_tokens in DISTINCT_EXPERTS:
        return DISTINCT_EXPERTS[num_tokens]
    return num_experts * (1.0 - (1.0 - num_chosen / num_experts) ** num_tokens)
