"""The configuration of the demo draft, with every key of the published ones."""

from typing import Any

from training.target.configuration import (
    BOS_TOKEN_ID,
    END_OF_MESSAGE_ID,
    NUM_BASE_TOKENS,
    NUM_LAYERS,
    PAD_TOKEN_ID,
    VOCAB_SIZE,
    text_config,
)

MASK_TOKEN_ID = NUM_BASE_TOKENS + 253
BLOCK_LENGTH = 7


def draft_config(**changes: Any) -> dict[str, Any]:
    """The whole `config.json`; `changes` are keys to give another value."""
    target = text_config()
    rope_theta = 10_000.0
    config = {
        "architectures": ["K3DSparkModel"],
        "model_type": "k3_dspark",
        "hidden_size": target["hidden_size"],
        "intermediate_size": 768,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "q_lora_rank": 128,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "mla_use_nope": False,
        "mla_use_output_gate": False,
        "is_causal": False,
        "vocab_size": VOCAB_SIZE,
        "draft_vocab_size": VOCAB_SIZE,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": target["max_position_embeddings"],
        "rope_theta": rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta},
        "target_hidden_size": target["hidden_size"],
        "target_num_hidden_layers": NUM_LAYERS,
        "target_layer_ids": [-1, 3, 7, 8],
        "mask_token_id": MASK_TOKEN_ID,
        "block_size": BLOCK_LENGTH,
        "bos_token_id": BOS_TOKEN_ID,
        "eos_token_id": END_OF_MESSAGE_ID,
        "pad_token_id": PAD_TOKEN_ID,
        "markov_rank": 64,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "confidence_temperatures": [1.0] * BLOCK_LENGTH,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    } | changes
    return config | {"num_target_layers": len(config["target_layer_ids"])}
