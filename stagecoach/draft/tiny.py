"""Small random drafts in the published layouts, from a seed.

Owns what a small draft looks like, latent or grouped-query, and writes it as the originals are:
one bfloat16 file, with or without copies of the target's embedding and head. The name
`tiny-draft` is one of these; tests make others.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from stagecoach.config.draft import DraftGqaConfig, parse_draft_config
from stagecoach.draft.load import GQA_NAMES, draft_tensors
from stagecoach.model.dummy_weights import named_generator
from stagecoach.model.tiny import VOCAB_SIZE, write_json
from stagecoach.model.weight_slots import WeightKind, WeightSlot


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyDraftShape:
    """Sizes of a small draft."""

    taps: tuple[int, ...] = (2, 5, 8)  # as they stand in the file
    hidden_size: int = 64
    vocab_size: int = VOCAB_SIZE
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 4  # of the grouped form
    head_dim: int = 16  # of the grouped form
    q_lora_rank: int | None = 24
    kv_lora_rank: int = 32
    nope_dim: int = 16
    rope_dim: int = 8
    value_dim: int = 16
    intermediate_size: int = 96
    markov_rank: int = 16
    mask_token_id: int = VOCAB_SIZE - 3
    yarn_factor: float | None = 4.0
    max_length: int = 4096


def mla_draft_config(shape: TinyDraftShape) -> dict[str, Any]:
    """`config.json` of a small draft with latent attention; any key of it may be changed."""
    rope: dict[str, Any] = {"rope_theta": 50000.0, "rope_type": "default"}
    if shape.yarn_factor is not None:
        rope |= {
            "rope_type": "yarn",
            "factor": shape.yarn_factor,
            "original_max_position_embeddings": 64,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        }
    return _common_config(shape) | {
        "architectures": ["K3DSparkModel"],
        "model_type": "k3_dspark",
        "num_key_value_heads": shape.num_heads,
        "q_lora_rank": shape.q_lora_rank,
        "kv_lora_rank": shape.kv_lora_rank,
        "qk_nope_head_dim": shape.nope_dim,
        "qk_rope_head_dim": shape.rope_dim,
        "v_head_dim": shape.value_dim,
        "mla_use_nope": False,
        "mla_use_output_gate": False,
        "rope_theta": rope["rope_theta"],
        "rope_parameters": rope,
        "target_hidden_size": shape.hidden_size,
        "target_layer_ids": list(shape.taps),
        "num_target_layers": len(shape.taps),
        "mask_token_id": shape.mask_token_id,
        "draft_vocab_size": shape.vocab_size,
    }


def gqa_draft_config(shape: TinyDraftShape) -> dict[str, Any]:
    """`config.json` of a small draft on Qwen3 layers; any key of it may be changed."""
    return _common_config(shape) | {
        "architectures": ["DSparkDraftModel"],
        "model_type": "qwen3",
        "block_size": 7,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "layer_types": ["full_attention"] * shape.num_layers,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "dflash_config": {
            "target_layer_ids": list(shape.taps),
            "mask_token_id": shape.mask_token_id,
        },
    }


def write_tiny_draft(
    folder: Path, config: dict[str, Any], seed: int, *, has_target_copies: bool = False
) -> None:
    """Write a random draft's config and weights.

    Args:
        folder: made if it is not there.
        config: a parsed `config.json`, such as `mla_draft_config` returns.
        seed: of the weights.
        has_target_copies: the file holds an embedding and a head too, as some originals do;
            random ones, because nobody reads them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    draft = parse_draft_config(config)
    is_gqa = isinstance(draft.attention, DraftGqaConfig)
    raw_names = {ours: raw for raw, ours in GQA_NAMES.items()} if is_gqa else {}
    tensors = {
        raw_names.get(name, name): _random_tensor(slot, seed).bfloat16()
        for name, slot in draft_tensors(draft).items()
    }
    if has_target_copies:
        for name in ("embed_tokens.weight", "lm_head.weight"):
            rows = torch.empty(draft.vocab_size, draft.hidden_size)
            tensors[name] = rows.normal_(generator=named_generator(name, seed)).bfloat16()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _random_tensor(slot: WeightSlot, seed: int) -> Tensor:
    """Scales are chosen so that every part of the network matters."""
    tensor = torch.empty(slot.shape).normal_(generator=named_generator(slot.name, seed))
    if slot.kind is WeightKind.NORM:
        return 1.0 + 0.1 * tensor
    is_looked_up = slot.name == "markov_head.markov_w1.weight"
    return tensor if is_looked_up else tensor / math.sqrt(slot.shape[-1])


def _common_config(shape: TinyDraftShape) -> dict[str, Any]:
    return {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": shape.max_length,
        "markov_rank": shape.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
