"""Configs and tensor lists of published drafts for Kimi-K3, as their model cards and files say."""

from typing import Any

# Inferact/Kimi-K3-DSpark, config.json.
MLA_CONFIG: dict[str, Any] = {
    "architectures": ["K3DSparkModel"],
    "model_type": "k3_dspark",
    "hidden_size": 7168,
    "intermediate_size": 14336,
    "num_hidden_layers": 5,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "mla_use_nope": False,
    "mla_use_output_gate": False,
    "vocab_size": 163840,
    "draft_vocab_size": 163840,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1048576,
    "rope_theta": 50000,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 32,
        "original_max_position_embeddings": 32768,
        "rope_theta": 50000,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "num_target_layers": 5,
    "target_hidden_size": 7168,
    "target_num_hidden_layers": 93,
    "target_layer_ids": [2, 23, 47, 71, 89],
    "mask_token_id": 163837,
    "bos_token_id": 163584,
    "eos_token_id": 163586,
    "pad_token_id": 163839,
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "_torchspec_version": "0.1.0",
}

# RadixArk/Kimi-K3-DSpark, config.json as far as it bears on the architecture.
GQA_CONFIG: dict[str, Any] = {
    "architectures": ["DSparkDraftModel"],
    "model_type": "qwen3",
    "block_size": 7,
    "hidden_size": 7168,
    "intermediate_size": 14336,
    "num_hidden_layers": 5,
    "num_attention_heads": 64,
    "num_key_value_heads": 16,
    "head_dim": 64,
    "num_target_layers": 93,
    "vocab_size": 163840,
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1048576,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "tie_word_embeddings": False,
    "layer_types": ["full_attention"] * 5,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "dflash_config": {"target_layer_ids": [7, 23, 51, 67, 83], "mask_token_id": 163824},
}

NUM_MLA_PARAMETERS = 3_562_312_961  # with 163,840 x 7,168 of the embedding's copy
NUM_GQA_PARAMETERS = 2_249_289_601

_HEADS = {
    "markov_head.markov_w1.weight": (163840, 256),
    "markov_head.markov_w2.weight": (163840, 256),
    "confidence_head.proj.weight": (1, 7424),
    "confidence_head.proj.bias": (1,),
}
_LAYER = {
    "input_layernorm.weight": (7168,),
    "post_attention_layernorm.weight": (7168,),
    "mlp.gate_proj.weight": (14336, 7168),
    "mlp.up_proj.weight": (14336, 7168),
    "mlp.down_proj.weight": (7168, 14336),
}
_MLA_LAYER = _LAYER | {
    "self_attn.q_a_proj.weight": (1536, 7168),
    "self_attn.q_a_layernorm.weight": (1536,),
    "self_attn.q_b_proj.weight": (12288, 1536),
    "self_attn.kv_a_proj_with_mqa.weight": (576, 7168),
    "self_attn.kv_a_layernorm.weight": (512,),
    "self_attn.kv_b_proj.weight": (16384, 512),
    "self_attn.o_proj.weight": (7168, 8192),
}
_GQA_LAYER = _LAYER | {
    "self_attn.q_proj.weight": (4096, 7168),
    "self_attn.k_proj.weight": (1024, 7168),
    "self_attn.v_proj.weight": (1024, 7168),
    "self_attn.q_norm.weight": (64,),
    "self_attn.k_norm.weight": (64,),
    "self_attn.o_proj.weight": (7168, 4096),
}


def mla_tensors() -> dict[str, tuple[int, ...]]:
    """The 68 tensors of Inferact/Kimi-K3-DSpark."""
    return {
        "context_proj.weight": (7168, 35840),
        "context_norm.weight": (7168,),
        "final_norm.weight": (7168,),
        "embed_tokens.weight": (163840, 7168),
        **_layers(_MLA_LAYER),
        **_HEADS,
    }


def gqa_tensors() -> dict[str, tuple[int, ...]]:
    """The 62 tensors of RadixArk/Kimi-K3-DSpark."""
    return {
        "fc.weight": (7168, 35840),
        "hidden_norm.weight": (7168,),
        "norm.weight": (7168,),
        **_layers(_GQA_LAYER),
        **_HEADS,
    }


def _layers(tensors: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {
        f"layers.{layer}.{name}": shape for layer in range(5) for name, shape in tensors.items()
    }
