"""Small random checkpoints in the published layout, from a seed.

Owns what a small Kimi-K3 or Kimi-Linear looks like and writes it file by file as the
originals are: names, dtypes, packed experts, padded A_log, shards with an index, a
byte-level `tiktoken.model`. The model name `tiny` is one of these; tests make others.
"""

import base64
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice, product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from stagecoach.config.model import parse_model_config
from stagecoach.model.checkpoint_reader import INDEX_NAME
from stagecoach.model.dummy_weights import draw_tensor, named_generator
from stagecoach.model.ledger import model_tensors
from stagecoach.model.quantization import pack_mxfp4
from stagecoach.model.weight_formats import packed_names
from stagecoach.model.weight_slots import WeightKind, WeightSlot

NUM_BASE_TOKENS = 256
NUM_SPECIAL_TOKENS = 256
VOCAB_SIZE = NUM_BASE_TOKENS + NUM_SPECIAL_TOKENS

# Offsets from the first special token, in the original's order.
_SPECIAL_TOKENS = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|end_of_msg|>",
    3: "<|open|>",
    4: "<|close|>",
    5: "<|sep|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    9: "[EOT]",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    65: "<osagent_mode>",
    254: "[UNK]",
    255: "[PAD]",
}
_BOS, _EOS, _END_OF_MESSAGE, _PAD = (NUM_BASE_TOKENS + offset for offset in (0, 1, 2, 255))


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyShape:
    """Sizes of a small model. Routed experts need widths divisible by 32 when packed."""

    num_layers: int = 9
    mla_layers: tuple[int, ...] = (3, 7, 8)  # 0-based
    hidden_size: int = 64
    num_heads: int = 4
    head_dim: int = 16  # of KDA
    dense_size: int = 96
    num_experts: int = 8
    num_experts_per_token: int = 2
    num_shared_experts: int = 2
    expert_size: int = 32
    latent_size: int | None = 32
    q_lora_rank: int | None = 24
    kv_lora_rank: int = 32
    nope_dim: int = 16
    rope_dim: int = 8
    value_dim: int = 16
    block_size: int | None = 4
    num_dense_layers: int = 1
    vocab_size: int = VOCAB_SIZE
    max_length: int = 4096
    is_head_tied: bool = False


def kimi_k3_config(shape: TinyShape) -> dict[str, Any]:
    """`config.json` of a small Kimi-K3."""
    text = _common_config(shape) | {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "mla_use_output_gate": True,
        "latent_moe_use_norm": shape.latent_size is not None,
        "routed_expert_hidden_size": shape.latent_size,
        "routed_scaling_factor": 1.0,
        "attn_res_block_size": shape.block_size,
        "quantization_config": _quantization_config(),
    }
    text["linear_attn_config"] |= {"gate_lower_bound": -5.0, "use_full_rank_gate": True}
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "text_config": text,
        "bos_token_id": _BOS,
        "eos_token_id": _END_OF_MESSAGE,
        "pad_token_id": _PAD,
        "tie_word_embeddings": shape.is_head_tied,
        "dtype": "bfloat16",
    }


def kimi_linear_config(shape: TinyShape) -> dict[str, Any]:
    """`config.json` of a small Kimi-Linear; latent width and block size do not apply."""
    return _common_config(shape) | {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "hidden_act": "silu",
        "routed_scaling_factor": 2.446,
        "bos_token_id": _BOS,
        "eos_token_id": _END_OF_MESSAGE,
        "pad_token_id": _PAD,
        "dtype": "bfloat16",
    }


def write_tiny_model(
    folder: Path, config: dict[str, Any], seed: int, *, max_shard_bytes: int = 1 << 20
) -> None:
    """Write a complete random model folder: configs, tokenizer and weights.

    Args:
        folder: made if it is not there.
        config: a parsed `config.json`, such as `kimi_k3_config` returns. Experts are packed
            as MXFP4 if it has a quantization_config.
        seed: of the weights.
        max_shard_bytes: a shard is closed before it grows beyond this.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    write_json(
        folder / "generation_config.json",
        {"bos_token_id": _BOS, "eos_token_id": _END_OF_MESSAGE, "pad_token_id": _PAD},
    )
    write_byte_tokenizer(folder)
    write_shards(folder, dict(random_tensors(config, seed)), max_shard_bytes)


def random_tensors(config: dict[str, Any], seed: int) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a random model by raw checkpoint name, in their stored dtypes.

    Scales are chosen so that every part of the network matters: matrices keep the variance,
    norms scatter around one, correction biases change some choices of experts.
    """
    model_config = parse_model_config(config)
    text = config.get("text_config", config)
    is_packed = "quantization_config" in text
    num_heads = model_config.kda.num_heads
    # The original pads 96 heads to 128.
    num_padding = 4 * -(-num_heads // 3) - num_heads if config["model_type"] == "kimi_k3" else None
    for name, slot in model_tensors(model_config).items():
        tensor = _random_tensor(slot, seed)
        raw_name = model_config.tensor_prefix + name
        if slot.kind is WeightKind.EXPERT and is_packed:
            packed = pack_mxfp4(tensor)
            yield from zip(packed_names(raw_name), packed, strict=True)
            continue
        if slot.kind is WeightKind.DECAY:
            tensor = (
                tensor.view(1, 1, -1, 1)
                if num_padding is None
                else torch.cat([tensor, torch.zeros(num_padding)])
            )
        yield raw_name, tensor if slot.kind.is_stored_as_float32 else tensor.bfloat16()


def write_shards(folder: Path, tensors: Mapping[str, Tensor], max_shard_bytes: int) -> None:
    """Write safetensors shards and `model.safetensors.index.json`, tensors in the given order."""
    shards: list[dict[str, Tensor]] = [{}]
    num_bytes = 0
    for name, tensor in tensors.items():
        if shards[-1] and num_bytes + tensor.nbytes > max_shard_bytes:
            shards.append({})
            num_bytes = 0
        shards[-1][name] = tensor.contiguous()
        num_bytes += tensor.nbytes
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{len(shards):06d}.safetensors"
        save_file(shard, folder / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file_name)
    total = sum(tensor.nbytes for tensor in tensors.values())
    write_json(folder / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_byte_tokenizer(folder: Path, vocab_size: int = VOCAB_SIZE) -> None:
    """A `tiktoken.model` of bytes, then pairs and triples of them, and its special tokens."""
    num_base_tokens = vocab_size - NUM_SPECIAL_TOKENS
    strings = chain.from_iterable(product(range(256), repeat=length) for length in (1, 2, 3))
    lines = [
        f"{base64.b64encode(bytes(string)).decode()} {rank}"
        for rank, string in enumerate(islice(strings, num_base_tokens))
    ]
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n", encoding="ascii")
    added = {
        str(num_base_tokens + offset): {
            "content": content,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for offset, content in _SPECIAL_TOKENS.items()
    }
    write_json(
        folder / "tokenizer_config.json",
        {
            "added_tokens_decoder": added,
            "bos_token": "[BOS]",
            "eos_token": "[EOS]",
            "pad_token": "[PAD]",
            "unk_token": "[UNK]",
            "tokenizer_class": "TikTokenTokenizer",
            "model_max_length": 1048576,
        },
    )


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _random_tensor(slot: WeightSlot, seed: int) -> Tensor:
    generator = named_generator(slot.name, seed)
    if slot.kind in (WeightKind.MATRIX, WeightKind.ROUTER, WeightKind.EXPERT):
        is_embedding = slot.name == "model.embed_tokens.weight"
        std = 1.0 if is_embedding else 1.0 / math.sqrt(slot.shape[-1])
        return torch.empty(slot.shape).normal_(0.0, std, generator=generator)
    tensor = draw_tensor(slot, seed)
    if slot.kind in (WeightKind.NORM, WeightKind.HEAD_NORM, WeightKind.ROUTER_BIAS):
        tensor += torch.empty(slot.shape).normal_(0.0, 0.1, generator=generator)
    return tensor


def _common_config(shape: TinyShape) -> dict[str, Any]:
    mla = sorted(layer + 1 for layer in shape.mla_layers)
    return {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_heads,
        "intermediate_size": shape.dense_size,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": shape.max_length,
        "q_lora_rank": shape.q_lora_rank,
        "kv_lora_rank": shape.kv_lora_rank,
        "qk_nope_head_dim": shape.nope_dim,
        "qk_rope_head_dim": shape.rope_dim,
        "v_head_dim": shape.value_dim,
        "mla_use_nope": True,
        "num_experts": shape.num_experts,
        "num_experts_per_token": shape.num_experts_per_token,
        "num_shared_experts": shape.num_shared_experts,
        "moe_intermediate_size": shape.expert_size,
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True,
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": shape.num_dense_layers,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": shape.is_head_tied,
        "linear_attn_config": {
            "full_attn_layers": mla,
            "kda_layers": [n for n in range(1, shape.num_layers + 1) if n not in mla],
            "num_heads": shape.num_heads,
            "head_dim": shape.head_dim,
            "short_conv_kernel_size": 4,
        },
    }


def _quantization_config() -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "input_activations": None,
                "weights": {
                    "num_bits": 4,
                    "type": "float",
                    "strategy": "group",
                    "group_size": 32,
                    "symmetric": True,
                    "dynamic": False,
                    "scale_dtype": "torch.uint8",
                },
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
    }
