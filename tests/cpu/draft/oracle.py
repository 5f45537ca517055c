"""A draft by its formulas over whole rows: no cache, no fused matrix, one request at a time.

Reads a checkpoint's tensors under their published names and the raw keys of its config.json.
Latent attention is expanded to heads and rotates complex numbers; grouped attention repeats its
key heads and rotates by a matrix. All in float64.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from safetensors.torch import load_file
from torch import Tensor

from stagecoach.json_file import read_json_object


class Block(NamedTuple):
    hidden: Tensor  # [K, H] after the final norm
    logits: Tensor  # [K, V] of the target's head, without the Markov bias


@dataclass
class Oracle:
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    is_causal: bool = False

    @classmethod
    def read(cls, folder: Path, *, is_causal: bool = False) -> Self:
        tensors = load_file(folder / "model.safetensors")
        return cls(
            read_json_object(folder / "config.json"),
            {name: tensor.double() for name, tensor in tensors.items()},
            is_causal,
        )

    def norm(self, x: Tensor, name: str) -> Tensor:
        variance = (x * x).mean(-1, keepdim=True)
        return x / (variance + self.config["rms_norm_eps"]).sqrt() * self.weight(name)

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weight(name).t()

    def weight(self, name: str) -> Tensor:
        if self.config["model_type"] == "qwen3":
            name = {"context_proj": "fc", "context_norm": "hidden_norm", "final_norm": "norm"}.get(
                name, name
            )
        return self.tensors[name + ".weight"]

    def context(self, taps: Tensor) -> Tensor:
        """[P, taps, H] -> [P, H]."""
        if self.config.get("fc_norm"):
            taps = torch.stack(
                [self.norm(taps[:, tap], f"fc_norm.{tap}") for tap in range(taps.shape[1])], dim=1
            )
        joined = torch.cat(list(taps.unbind(1)), dim=-1)
        return self.norm(self.linear(joined, "context_proj"), "context_norm")

    def block(self, taps: Tensor, token_embeddings: Tensor, head: Tensor) -> Block:
        """The block whose tokens stand right behind the context.

        Args:
            taps: [P, taps, H] of every token of the context.
            token_embeddings: [K, H] of the anchor and the masks.
            head: [V, H].
        """
        context = self.context(taps)
        hidden = token_embeddings
        for layer in range(self.config["num_hidden_layers"]):
            name = f"layers.{layer}."
            normed = self.norm(hidden, name + "input_layernorm")
            hidden = hidden + self.attention(context, normed, name + "self_attn.")
            x = self.norm(hidden, name + "post_attention_layernorm")
            gate = self.linear(x, name + "mlp.gate_proj")
            inner = gate * torch.sigmoid(gate) * self.linear(x, name + "mlp.up_proj")
            hidden = hidden + self.linear(inner, name + "mlp.down_proj")
        hidden = self.norm(hidden, "final_norm")
        return Block(hidden, hidden @ head.t())

    def attention(self, context: Tensor, block: Tensor, name: str) -> Tensor:
        rows = torch.cat([context, block])
        positions = torch.arange(len(rows), dtype=torch.float64)
        is_mla = self.config["model_type"] == "k3_dspark"
        q, k, v, scale = (self.mla if is_mla else self.gqa)(rows, positions, name)
        outputs = []
        for place in range(len(block)):
            row = len(context) + place
            end = row + 1 if self.is_causal else len(rows)
            scores = torch.einsum("hd,shd->hs", q[row], k[:end]) * scale
            outputs.append(torch.einsum("hs,shv->hv", scores.softmax(-1), v[:end]).flatten())
        return self.linear(torch.stack(outputs), name + "o_proj")

    def mla(
        self, rows: Tensor, positions: Tensor, name: str
    ) -> tuple[Tensor, Tensor, Tensor, float]:
        config = self.config
        heads, nope, pe = (
            config[key] for key in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim")
        )
        if config["q_lora_rank"]:
            low = self.norm(self.linear(rows, name + "q_a_proj"), name + "q_a_layernorm")
            q = self.linear(low, name + "q_b_proj")
        else:
            q = self.linear(rows, name + "q_proj")
        q = q.view(len(rows), heads, nope + pe)
        down = self.linear(rows, name + "kv_a_proj_with_mqa")
        latent = self.norm(down[:, : config["kv_lora_rank"]], name + "kv_a_layernorm")
        up = self.linear(latent, name + "kv_b_proj").view(len(rows), heads, -1)
        k_pe = down[:, None, config["kv_lora_rank"] :].expand(-1, heads, -1)
        q_pe, scale = q[..., nope:], (nope + pe) ** -0.5
        if not config["mla_use_nope"]:
            turns = torch.polar(*self.turns(positions, pe))[:, None]
            q_pe, k_pe = (
                torch.view_as_real(
                    torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turns
                ).flatten(-2)
                for x in (q_pe, k_pe)
            )
            rope = config["rope_parameters"]
            if rope["rope_type"] == "yarn":
                scale *= (0.1 * rope["mscale_all_dim"] * math.log(rope["factor"]) + 1) ** 2
        q = torch.cat([q[..., :nope], q_pe], dim=-1)
        return q, torch.cat([up[..., :nope], k_pe], dim=-1), up[..., nope:], scale

    def gqa(
        self, rows: Tensor, positions: Tensor, name: str
    ) -> tuple[Tensor, Tensor, Tensor, float]:
        config = self.config
        dim = config["head_dim"]
        q, k, v = (
            self.linear(rows, f"{name}{part}_proj").view(len(rows), -1, dim) for part in "qkv"
        )
        q, k = self.norm(q, name + "q_norm"), self.norm(k, name + "k_norm")
        lengths, angles = self.turns(positions, dim)
        cos, sin = lengths * angles.cos(), lengths * angles.sin()
        turn = torch.cat(
            [
                torch.cat([torch.diag_embed(cos), torch.diag_embed(-sin)], dim=-1),
                torch.cat([torch.diag_embed(sin), torch.diag_embed(cos)], dim=-1),
            ],
            dim=-2,
        )
        q, k = (torch.einsum("sde,she->shd", turn, x) for x in (q, k))
        repeats = config["num_attention_heads"] // config["num_key_value_heads"]
        k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
        return q, k, v, dim**-0.5

    def turns(self, positions: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        """Lengths and angles of each position's pairs."""
        rope = self.config["rope_parameters"]
        theta = rope["rope_theta"]
        frequencies = []
        for pair in range(dim // 2):
            frequency = theta ** (-2 * pair / dim)
            if rope["rope_type"] == "yarn":
                original = rope["original_max_position_embeddings"]
                low, high = (
                    dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))
                    for turns in (rope["beta_fast"], rope["beta_slow"])
                )
                low, high = max(math.floor(low), 0), min(math.ceil(high), dim - 1)
                ramp = min(max((pair - low) / max(high - low, 0.001), 0), 1)
                frequency = frequency * (1 - ramp) + frequency / rope["factor"] * ramp
            frequencies.append(frequency)
        angles = positions[:, None] * torch.tensor(frequencies, dtype=torch.float64)
        return torch.ones_like(angles), angles

    def markov_bias(self, token_id: int) -> Tensor:
        first, second = (self.tensors[f"markov_head.markov_w{n}.weight"] for n in (1, 2))
        return second @ first[token_id]

    def confidence(self, hidden: Tensor, token_id: int) -> Tensor:
        features = hidden
        if self.config["confidence_head_with_markov"]:
            features = torch.cat([hidden, self.tensors["markov_head.markov_w1.weight"][token_id]])
        weight = self.tensors["confidence_head.proj.weight"][0]
        return torch.sigmoid(weight @ features + self.tensors["confidence_head.proj.bias"][0])
