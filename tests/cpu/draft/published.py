"""Configs and tensor lists of published drafts for Kimi-K3, as their model cards and files say."""

from typing import Any

from stagecoach.published import published_config

# Inferact/Kimi-K3-DSpark, config.json.
MLA_CONFIG: dict[str, Any] = published_config("kimi-k3-dspark")
# RadixArk/Kimi-K3-DSpark, config.json as far as it bears on the architecture.
GQA_CONFIG: dict[str, Any] = published_config("kimi-k3-dspark-gqa")

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
