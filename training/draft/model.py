"""The demo draft for training: many blocks of whole rows in one pass.

Parameters carry the checkpoint's names. The arithmetic is that of the published `k3_dspark`
layout: MLA with rotary positions, bidirectional inside a block, context keys made from the
target's taps (lightseekorg/TorchSpec and ROCm/ATOM, their DSpark models).

Shapes: B rows, T tokens a row, C taps times hidden, H hidden, Q block tokens a row (block after
block), S = T + Q keys, N heads, V vocabulary.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.target.model import Norm, projection
from training.target.operations import linear, rms_norm


class Rotation(NamedTuple):
    """Cosines and sines of rotary angles, one for each pair of neighbours."""

    cos: Tensor
    sin: Tensor


def rotation(position: Tensor, width: int, theta: float) -> Rotation:
    """Pair i of `width / 2` turns by position * theta^(-2 i / width)."""
    exponent = torch.arange(0, width, 2, device=position.device).float() / width
    angle = position[..., None].float() * theta**-exponent
    return Rotation(angle.cos(), angle.sin())


def rotate(x: Tensor, turn: Rotation) -> Tensor:
    """Turn pairs of neighbours (2 i, 2 i + 1) of the last axis, in float32."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = (even * turn.cos - odd * turn.sin, even * turn.sin + odd * turn.cos)
    return torch.stack(turned, dim=-1).flatten(-2).to(x.dtype)


class Layout(NamedTuple):
    """Where the blocks of a pass lie, and what they see."""

    context_turn: Rotation  # of positions 0..T-1
    block_turn: Rotation  # of the block tokens' positions
    bias_B1QS: Tensor  # 0 where a block token sees a key, else -inf


class DraftAttention(nn.Module):
    """MLA of a block over the context before it and itself."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, self.num_heads = config["hidden_size"], config["num_attention_heads"]
        self.nope, self.rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
        self.value, self.kv_rank = config["v_head_dim"], config["kv_lora_rank"]
        self.eps = config["rms_norm_eps"]
        q_rank = config["q_lora_rank"]
        self.q_a_proj = projection(hidden, q_rank)
        self.q_a_layernorm = Norm(q_rank)
        self.q_b_proj = projection(q_rank, self.num_heads * (self.nope + self.rope))
        self.kv_a_proj_with_mqa = projection(hidden, self.kv_rank + self.rope)
        self.kv_a_layernorm = Norm(self.kv_rank)
        self.kv_b_proj = projection(self.kv_rank, self.num_heads * (self.nope + self.value))
        self.o_proj = projection(self.num_heads * self.value, hidden)

    def forward(self, x_BQH: Tensor, context_BTH: Tensor, layout: Layout) -> Tensor:
        q_latent = linear(x_BQH, self.q_a_proj.weight)
        q_latent = rms_norm(q_latent, self.q_a_layernorm.weight, self.eps)
        q = linear(q_latent, self.q_b_proj.weight).unflatten(-1, (self.num_heads, -1))
        q_nope, q_rope = q.split((self.nope, self.rope), dim=-1)
        turn = Rotation(*(part.unsqueeze(2) for part in layout.block_turn))
        q = torch.cat((q_nope, rotate(q_rope, turn)), dim=-1)
        context_k, context_v = self._keys_values(context_BTH, layout.context_turn)
        block_k, block_v = self._keys_values(x_BQH, layout.block_turn)
        o_BNQD = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            torch.cat((context_k, block_k), dim=1).transpose(1, 2),
            torch.cat((context_v, block_v), dim=1).transpose(1, 2),
            attn_mask=layout.bias_B1QS.expand(-1, self.num_heads, -1, -1),
        )
        o_BQNV = o_BNQD.transpose(1, 2)[..., : self.value]
        return linear(o_BQNV.flatten(2), self.o_proj.weight)

    def _keys_values(self, x: Tensor, turn: Rotation) -> tuple[Tensor, Tensor]:
        """Keys, and values padded to the width of keys, `[B, tokens, N, nope + rope]`."""
        latent, k_rope = linear(x, self.kv_a_proj_with_mqa.weight).split(
            (self.kv_rank, self.rope), dim=-1
        )
        latent = rms_norm(latent, self.kv_a_layernorm.weight, self.eps)
        keys_values = linear(latent, self.kv_b_proj.weight).unflatten(-1, (self.num_heads, -1))
        k_nope, v = keys_values.split((self.nope, self.value), dim=-1)
        k_rope = rotate(k_rope, turn).unsqueeze(2).expand(-1, -1, self.num_heads, -1)
        k = torch.cat((k_nope, k_rope), dim=-1)
        return k, F.pad(v, (0, self.nope + self.rope - self.value))


class DraftMlp(nn.Module):
    """A SwiGLU MLP."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = projection(hidden, width)
        self.up_proj = projection(hidden, width)
        self.down_proj = projection(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = linear(x, self.gate_proj.weight), linear(x, self.up_proj.weight)
        return linear(F.silu(gate) * up, self.down_proj.weight)


class DraftLayer(nn.Module):
    """Attention and MLP, each behind a norm. Context keys do not pass that norm."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        self.eps = config["rms_norm_eps"]
        self.input_layernorm = Norm(hidden)
        self.self_attn = DraftAttention(config)
        self.post_attention_layernorm = Norm(hidden)
        self.mlp = DraftMlp(hidden, config["intermediate_size"])

    def forward(self, h_BQH: Tensor, context_BTH: Tensor, layout: Layout) -> Tensor:
        x = rms_norm(h_BQH, self.input_layernorm.weight, self.eps)
        h_BQH = h_BQH + self.self_attn(x, context_BTH, layout)
        x = rms_norm(h_BQH, self.post_attention_layernorm.weight, self.eps)
        return h_BQH + self.mlp(x)


class MarkovHead(nn.Module):
    """The low-rank bias that a token gives to the next one."""

    def __init__(self, vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=0.3)
        nn.init.zeros_(self.markov_w2.weight)


class ConfidenceHead(nn.Module):
    """One logit: whether a drafted token will be accepted if those before it are."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)
        nn.init.zeros_(self.proj.weight)


class Draft(nn.Module):
    """The demo draft. Embedding and head are the target's."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        self.eps = config["rms_norm_eps"]
        self.rope, self.rope_theta = config["qk_rope_head_dim"], config["rope_theta"]
        self.mask_token_id = config["mask_token_id"]
        self.context_proj = projection(hidden * config["num_target_layers"], hidden)
        self.context_norm = Norm(hidden)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config["num_hidden_layers"]))
        self.final_norm = Norm(hidden)
        self.markov_head = MarkovHead(config["vocab_size"], config["markov_rank"])
        self.confidence_head = ConfidenceHead(hidden + config["markov_rank"])

    def forward(
        self, taps_BTC: Tensor, anchor_BW: Tensor, anchor_ids_BW: Tensor, embedding_VH: Tensor,
        block_length: int,
    ) -> Tensor:  # fmt: skip
        """Final hidden states `[B, W, block_length, H]` of W blocks a row.

        Args:
            anchor_BW: positions of the anchors; a block sees the context before its anchor.
            anchor_ids_BW: the tokens there.
        """
        num_rows, num_blocks = anchor_BW.shape
        layout = self._layout(taps_BTC, anchor_BW, block_length)
        ids_BWK = anchor_ids_BW[..., None].repeat(1, 1, block_length)
        ids_BWK[..., 1:] = self.mask_token_id
        h_BQH = F.embedding(ids_BWK.flatten(1), embedding_VH)
        context_BTH = linear(taps_BTC, self.context_proj.weight)
        context_BTH = rms_norm(context_BTH, self.context_norm.weight, self.eps)
        for layer in self.layers:
            h_BQH = layer(h_BQH, context_BTH, layout)
        h_BQH = rms_norm(h_BQH, self.final_norm.weight, self.eps)
        return h_BQH.view(num_rows, num_blocks, block_length, -1)

    def _layout(self, taps_BTC: Tensor, anchor_BW: Tensor, block_length: int) -> Layout:
        position_T = torch.arange(taps_BTC.shape[1], device=taps_BTC.device)
        position_BWK = anchor_BW[..., None] + position_T[:block_length]
        is_context_BWT = position_T < anchor_BW[..., None]
        is_own_WW = torch.eye(anchor_BW.shape[1], dtype=torch.bool, device=taps_BTC.device)
        is_own_WQ = is_own_WW.repeat_interleave(block_length, dim=1)
        is_seen_BWS = torch.cat((is_context_BWT, is_own_WQ.expand(len(taps_BTC), -1, -1)), dim=-1)
        bias_BWS = torch.zeros(is_seen_BWS.shape, dtype=taps_BTC.dtype, device=taps_BTC.device)
        bias_BWS.masked_fill_(~is_seen_BWS, float("-inf"))
        return Layout(
            rotation(position_T, self.rope, self.rope_theta),
            rotation(position_BWK.flatten(1), self.rope, self.rope_theta),
            bias_BWS.repeat_interleave(block_length, dim=1).unsqueeze(1),
        )
