"""Block passes against transformers' attention of the models that the drafts are built from.

A draft's layer attends as a DeepSeek-V3 or Qwen3 layer would whose input rows are the context
and behind it the block's normed tokens, without a causal mask.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DeepseekV3Config, Qwen3Config
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from stagecoach.draft.tiny import TinyDraftShape, gqa_draft_config, mla_draft_config
from tests.cpu.draft.draft_runs import Stage, make_requests, target_tables
from tests.cpu.draft.oracle import Oracle

pytestmark = pytest.mark.cpu

SHAPE = TinyDraftShape(num_kv_heads=2)


def deepseek_attention(config: dict[str, Any]) -> tuple[nn.Module, nn.Module]:
    keys = (
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "q_lora_rank",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "rope_parameters",
        "max_position_embeddings",
    )
    hf = DeepseekV3Config(**{key: config[key] for key in keys}, rope_interleave=True)
    hf._attn_implementation = "eager"
    attention = deepseek.DeepseekV3Attention(hf, layer_idx=0)
    for norm in (attention.q_a_layernorm, attention.kv_a_layernorm):
        norm.variance_epsilon = config["rms_norm_eps"]
    return attention, deepseek.DeepseekV3RotaryEmbedding(hf)


def qwen3_attention(config: dict[str, Any]) -> tuple[nn.Module, nn.Module]:
    keys = (
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "rope_parameters",
        "max_position_embeddings",
    )
    hf = Qwen3Config(**{key: config[key] for key in keys}, num_hidden_layers=1)
    hf._attn_implementation = "eager"
    return qwen3.Qwen3Attention(hf, layer_idx=0), qwen3.Qwen3RotaryEmbedding(hf)


class PublishedLayers(Oracle):
    """The oracle with transformers' attention in place of ours."""

    def attention(self, context: Tensor, block: Tensor, name: str) -> Tensor:
        is_mla = self.config["model_type"] == "k3_dspark"
        module, rope = (deepseek_attention if is_mla else qwen3_attention)(self.config)
        module = module.float()
        module.load_state_dict(
            {
                key.removeprefix(name): tensor.float()
                for key, tensor in self.tensors.items()
                if key.startswith(name)
            }
        )
        rows = torch.cat([context, block])[None].float()
        positions = torch.arange(rows.shape[1])[None]
        nothing_hidden = torch.zeros(1, 1, rows.shape[1], rows.shape[1])
        with torch.no_grad():
            output, _ = module(rows, rope(rows, positions), attention_mask=nothing_hidden)
        return output[0, len(context) :].double()


@pytest.mark.parametrize(
    "config",
    [
        mla_draft_config(SHAPE),
        mla_draft_config(TinyDraftShape(yarn_factor=None, q_lora_rank=24)),
        gqa_draft_config(SHAPE),
        gqa_draft_config(SHAPE)
        | {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ],
    ids=["mla with yarn", "mla", "gqa", "gqa with yarn"],
)
def test_a_block_pass_is_that_of_published_attention(
    config: dict[str, Any], write_draft: Callable[[dict[str, Any]], Path]
) -> None:
    """transformers DeepseekV3Attention and Qwen3Attention, eager, float32: 1e-5."""
    folder = write_draft(config)
    request = make_requests([19], len(SHAPE.taps))[0]
    stage = Stage.read(folder, dtype=torch.float32)
    stage.write_all([request])
    seen: list[Tensor] = []

    def choose(place: int, logits_NV: Tensor, drafts_NJ: Tensor) -> Tensor:
        seen.append(logits_NV[0])
        return torch.tensor([3])

    stage.propose([request], [7], choose)
    oracle = PublishedLayers.read(folder)
    embedding, head = target_tables()
    block = oracle.block(request.taps, embedding[[7] + [SHAPE.mask_token_id] * 6], head)
    for place, logits in enumerate(seen):
        expected = block.logits[place] + oracle.markov_bias(3 if place else 7)
        error = (logits.double() - expected).abs().max() / expected.abs().max()
        assert error < 1e-5, place
