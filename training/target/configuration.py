"""The configuration of the demo target, with every key of the published one."""

from typing import Any

VOCAB_SIZE = 4096
NUM_BASE_TOKENS = 3840
NUM_LAYERS = 9
FULL_ATTENTION_LAYERS = [4, 8, 9]  # 1-based, as published

BOS_TOKEN_ID = NUM_BASE_TOKENS
EOS_TOKEN_ID = NUM_BASE_TOKENS + 1
END_OF_MESSAGE_ID = NUM_BASE_TOKENS + 2
END_OF_TURN_ID = NUM_BASE_TOKENS + 9
MEDIA_PAD_ID = NUM_BASE_TOKENS + 21
PAD_TOKEN_ID = NUM_BASE_TOKENS + 255


def text_config() -> dict[str, Any]:
    """The `text_config` section."""
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 256,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "intermediate_size": 768,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "q_lora_rank": 128,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "num_experts": 16,
        "num_experts_per_token": 2,
        "num_shared_experts": 2,
        "moe_intermediate_size": 128,
        "routed_expert_hidden_size": 128,
        "latent_moe_use_norm": True,
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True,
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "attn_res_block_size": 4,
        "num_nextn_predict_layers": 0,
        "linear_attn_config": {
            "full_attn_layers": FULL_ATTENTION_LAYERS,
            "kda_layers": [
                layer for layer in range(1, NUM_LAYERS + 1) if layer not in FULL_ATTENTION_LAYERS
            ],
            "num_heads": 4,
            "head_dim": 64,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
            "use_full_rank_gate": True,
        },
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "mxfp4-pack-quantized",
            "quantization_status": "compressed",
            "kv_cache_scheme": None,
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {
                        "num_bits": 4,
                        "type": "float",
                        "strategy": "group",
                        "group_size": 32,
                        "symmetric": True,
                        "dynamic": False,
                        "scale_dtype": "torch.uint8",
                    },
                    "input_activations": None,
                }
            },
            "ignore": [
                "re:.*self_attn.*",
                "re:.*shared_experts.*",
                r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
                "re:.*lm_head.*",
                "re:.*vision_tower.*",
                "re:.*mm_projector.*",
            ],
        },
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "use_cache": True,
        "pad_token_id": PAD_TOKEN_ID,
        "bos_token_id": BOS_TOKEN_ID,
        "eos_token_id": END_OF_MESSAGE_ID,
        "dtype": "bfloat16",
    }


def root_config() -> dict[str, Any]:
    """The whole `config.json`. There is no vision tower, so no `vision_config`."""
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "text_config": text_config(),
        "media_placeholder_token_id": MEDIA_PAD_ID,
        "ignore_index": -100,
        "pad_token_id": PAD_TOKEN_ID,
        "bos_token_id": BOS_TOKEN_ID,
        "eos_token_id": END_OF_MESSAGE_ID,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def generation_config() -> dict[str, Any]:
    """The `generation_config.json`: greedy, because exact answers are what is scored."""
    return {
        "bos_token_id": BOS_TOKEN_ID,
        "eos_token_id": END_OF_MESSAGE_ID,
        "pad_token_id": PAD_TOKEN_ID,
        "do_sample": False,
        "temperature": 0.0,
    }
