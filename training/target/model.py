"""The demo target for training: Kimi-K3's text model over whole right-padded rows.

Parameters carry the checkpoint's names, except that the experts of a layer are stacked.
"""

import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.target.operations import KdaKernel, kda_chunked, linear, pieces


class Geometry(NamedTuple):
    """How a batch is laid out."""

    num_rows: int
    row_length: int
    position_N: Tensor  # place of each token in its row


class Norm(nn.Module):
    """Holds the weight of a norm."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


class Convolution(nn.Module):
    """Holds the weight of a short convolution."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width).uniform_(-0.5, 0.5))


def projection(in_size: int, out_size: int, gain: float = 0.6) -> nn.Linear:
    """A linear map without bias."""
    module = nn.Linear(in_size, out_size, bias=False)
    nn.init.normal_(module.weight, std=gain * in_size**-0.5)
    return module


class Kda(nn.Module):
    """A KDA layer."""

    def __init__(self, config: dict[str, Any], ops: SimpleNamespace, kernel: KdaKernel) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        kda = config["linear_attn_config"]
        self.num_heads, self.head_dim = kda["num_heads"], kda["head_dim"]
        self.lower_bound = kda["gate_lower_bound"]
        self.eps = config["rms_norm_eps"]
        self.ops, self.kernel = ops, kernel
        width = self.num_heads * self.head_dim
        self.q_proj, self.k_proj, self.v_proj = (projection(hidden, width) for _ in range(3))
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (
            Convolution(width, kda["short_conv_kernel_size"]) for _ in range(3)
        )
        self.f_a_proj = projection(hidden, self.head_dim)
        self.f_b_proj = projection(self.head_dim, width)
        self.b_proj = projection(hidden, self.num_heads)
        self.g_proj = projection(hidden, width)
        self.o_norm = Norm(self.head_dim)
        self.o_proj = projection(width, hidden)
        self.A_log = nn.Parameter(torch.empty(self.num_heads).uniform_(0.0, math.log(2.0)))
        # Decays from exp(-0.5) to exp(-0.0005) a token, evenly on a log scale.
        decay = torch.exp(torch.empty(width).uniform_(math.log(5e-4), math.log(0.5)))
        share = decay / -self.lower_bound
        rate = torch.exp(self.A_log.detach()).repeat_interleave(self.head_dim)
        self.dt_bias = nn.Parameter(torch.log(share / (1 - share)) / rate)

    def forward(self, x_NH: Tensor, geometry: Geometry) -> Tensor:
        q, k, v, f, b, g = self.ops.kda_project(
            x_NH,
            geometry.position_N,
            (self.q_proj.weight, self.k_proj.weight, self.v_proj.weight),
            (self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight),
            (self.f_a_proj.weight, self.f_b_proj.weight, self.b_proj.weight, self.g_proj.weight),
        )
        rows = (geometry.num_rows, geometry.row_length, self.num_heads)
        q, k, v, f = (x.view(*rows, self.head_dim) for x in (q, k, v, f))
        o = self.kernel(
            q, k, v, f, b.view(rows),
            A_log=self.A_log, dt_bias=self.dt_bias, lower_bound=self.lower_bound,
        )  # fmt: skip
        return self.ops.kda_output(
            o.flatten(0, 1), g, self.o_norm.weight, self.o_proj.weight, self.eps
        )


class Mla(nn.Module):
    """An MLA layer without positional encoding."""

    def __init__(self, config: dict[str, Any], ops: SimpleNamespace) -> None:
        super().__init__()
        hidden, self.num_heads = config["hidden_size"], config["num_attention_heads"]
        self.nope, self.rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
        self.value = config["v_head_dim"]
        q_rank, kv_rank = config["q_lora_rank"], config["kv_lora_rank"]
        self.ops = ops
        self.q_a_proj = projection(hidden, q_rank)
        self.q_a_layernorm = Norm(q_rank)
        self.q_b_proj = projection(q_rank, self.num_heads * (self.nope + self.rope))
        self.kv_a_proj_with_mqa = projection(hidden, kv_rank + self.rope)
        self.kv_a_layernorm = Norm(kv_rank)
        self.kv_b_proj = projection(kv_rank, self.num_heads * (self.nope + self.value))
        self.g_proj = projection(hidden, self.num_heads * self.value)
        self.o_proj = projection(self.num_heads * self.value, hidden)

    def forward(self, x_NH: Tensor, geometry: Geometry) -> Tensor:
        weights = {
            "q_a": self.q_a_proj.weight,
            "q_a_norm": self.q_a_layernorm.weight,
            "q_b": self.q_b_proj.weight,
            "kv_a": self.kv_a_proj_with_mqa.weight,
            "kv_a_norm": self.kv_a_layernorm.weight,
            "kv_b": self.kv_b_proj.weight,
            "g": self.g_proj.weight,
        }
        q, k, v, gate = self.ops.mla_project(
            x_NH, weights, self.num_heads, self.nope, self.rope, self.value
        )
        q, k, v = (
            x.view(geometry.num_rows, geometry.row_length, self.num_heads, -1).transpose(1, 2)
            for x in (q, k, v)
        )
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        o_NHV = o.transpose(1, 2).flatten(0, 1)
        return self.ops.mla_output(o_NHV, gate, self.o_proj.weight, self.value)


class Mlp(nn.Module):
    """The dense MLP of layer 0, and the shared expert."""

    def __init__(self, hidden: int, width: int, config: dict[str, Any], ops: SimpleNamespace):
        super().__init__()
        self.gate_proj = projection(hidden, width)
        self.up_proj = projection(hidden, width)
        self.down_proj = projection(width, hidden)
        self.betas = (config["activation_situ_beta"], config["activation_situ_linear_beta"])
        self.ops = ops

    def weights(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight

    def forward(self, x_NH: Tensor) -> Tensor:
        return self.ops.mlp(x_NH, *self.weights(), self.betas)


class Gate(nn.Module):
    """The router."""

    def __init__(self, hidden: int, num_experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_experts, hidden) * hidden**-0.5)
        self.register_buffer("e_score_correction_bias", torch.zeros(num_experts))


class Experts(nn.Module):
    """The routed experts of a layer, stacked."""

    def __init__(self, num_experts: int, latent: int, width: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(num_experts, width, latent) * 0.6 * latent**-0.5)
        self.w2 = nn.Parameter(torch.randn(num_experts, latent, width) * 0.6 * width**-0.5)
        self.w3 = nn.Parameter(torch.randn(num_experts, width, latent) * 0.6 * latent**-0.5)


class LatentMoe(nn.Module):
    """A latent mixture of experts with a shared expert."""

    def __init__(self, config: dict[str, Any], ops: SimpleNamespace, *, is_grouped: bool) -> None:
        super().__init__()
        hidden, latent = config["hidden_size"], config["routed_expert_hidden_size"]
        width = config["moe_intermediate_size"]
        self.top_k = config["num_experts_per_token"]
        self.eps = config["rms_norm_eps"]
        self.ops, self.is_grouped = ops, is_grouped
        self.gate = Gate(hidden, config["num_experts"])
        self.routed_expert_down_proj = projection(hidden, latent)
        self.routed_expert_up_proj = projection(latent, hidden)
        self.routed_expert_norm = Norm(latent)
        self.experts = Experts(config["num_experts"], latent, width)
        self.shared_experts = Mlp(hidden, width * config["num_shared_experts"], config, ops)
        self.register_buffer("load_E", torch.zeros(config["num_experts"]), persistent=False)

    def forward(self, x_NH: Tensor) -> Tensor:
        experts = (self.experts.w1, self.experts.w2, self.experts.w3)
        betas = self.shared_experts.betas
        after = (
            self.top_k,
            self.routed_expert_norm.weight,
            self.routed_expert_up_proj.weight,
            self.shared_experts.weights(),
            betas,
            self.eps,
        )
        router = (self.gate.weight, self.gate.e_score_correction_bias)
        down = self.routed_expert_down_proj.weight
        if not self.is_grouped:
            out, load_E = self.ops.moe_dense(x_NH, *router, down, experts, *after)
        else:
            latent, weights, order, ends_E, load_E = self.ops.moe_before(
                x_NH, *router, down, self.top_k
            )
            w1, w2, w3 = self.ops.quantized_experts(*experts, x_NH.dtype)
            gate = F.grouped_mm(latent, w1, offs=ends_E)
            up = F.grouped_mm(latent, w3, offs=ends_E)
            y = F.grouped_mm(self.ops.situ(gate, up, *betas), w2, offs=ends_E)
            out = self.ops.moe_after(y, weights, order, x_NH, *after)
        if self.training:
            self.load_E += load_E
        return out

    @torch.no_grad()
    def balance(self, rate: float) -> None:
        """Move the correction biases towards an even load, by the load since the last call."""
        error = self.load_E.mean() - self.load_E
        self.gate.e_score_correction_bias += rate * torch.sign(error)
        self.load_E.zero_()


class Layer(nn.Module):
    """A decoder layer: two sublayers that read mixtures and write to the running sum."""

    def __init__(
        self, index: int, config: dict[str, Any], ops: SimpleNamespace, kernel: KdaKernel,
        *, is_grouped: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        hidden = config["hidden_size"]
        is_kda = index + 1 in config["linear_attn_config"]["kda_layers"]
        self.self_attn = Kda(config, ops, kernel) if is_kda else Mla(config, ops)
        self.is_dense = index < config["first_k_dense_replace"]
        if self.is_dense:
            self.mlp = Mlp(hidden, config["intermediate_size"], config, ops)
        else:
            self.block_sparse_moe = LatentMoe(config, ops, is_grouped=is_grouped)
        self.opens_block = index % config["attn_res_block_size"] == 0
        self.ops, self.eps = ops, config["rms_norm_eps"]
        self.input_layernorm = Norm(hidden)
        self.post_attention_layernorm = Norm(hidden)
        self.self_attention_res_norm = Norm(hidden)
        self.mlp_res_norm = Norm(hidden)
        self.self_attention_res_proj = projection(hidden, 1, gain=0.0)
        self.mlp_res_proj = projection(hidden, 1, gain=0.0)

    def forward(
        self, partial: Tensor, blocks: list[Tensor], geometry: Geometry
    ) -> tuple[Tensor, list[Tensor]]:
        x = self.ops.mix_and_norm(
            blocks, partial,
            self.self_attention_res_norm.weight, self.self_attention_res_proj.weight,
            self.input_layernorm.weight, self.eps,
        )  # fmt: skip
        attended = self.self_attn(x, geometry)
        if self.opens_block:
            blocks = [*blocks, partial]
            partial = attended
        else:
            partial = partial + attended
        x = self.ops.mix_and_norm(
            blocks, partial, self.mlp_res_norm.weight, self.mlp_res_proj.weight,
            self.post_attention_layernorm.weight, self.eps,
        )  # fmt: skip
        return partial + (self.mlp(x) if self.is_dense else self.block_sparse_moe(x)), blocks


class Backbone(nn.Module):
    """Everything but the head."""

    def __init__(
        self, config: dict[str, Any], ops: SimpleNamespace, kernel: KdaKernel, *, is_grouped: bool
    ) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        self.embed_tokens = nn.Embedding(config["vocab_size"], hidden)
        nn.init.normal_(self.embed_tokens.weight, std=0.3)
        self.layers = nn.ModuleList(
            Layer(index, config, ops, kernel, is_grouped=is_grouped)
            for index in range(config["num_hidden_layers"])
        )
        self.norm = Norm(hidden)
        self.output_attn_res_norm = Norm(hidden)
        self.output_attn_res_proj = projection(hidden, 1, gain=0.0)
        self.ops, self.eps = ops, config["rms_norm_eps"]

    def forward(self, ids_BT: Tensor, dtype: torch.dtype) -> Tensor:
        num_rows, row_length = ids_BT.shape
        position_N = torch.arange(row_length, device=ids_BT.device).repeat(num_rows)
        geometry = Geometry(num_rows, row_length, position_N)
        partial = F.embedding(ids_BT.flatten(), self.embed_tokens.weight.to(dtype))
        blocks: list[Tensor] = []
        for layer in self.layers:
            partial, blocks = layer(partial, blocks, geometry)
        return self.ops.mix_and_norm(
            blocks, partial, self.output_attn_res_norm.weight, self.output_attn_res_proj.weight,
            self.norm.weight, self.eps,
        )  # fmt: skip


class Target(nn.Module):
    """The demo target."""

    def __init__(
        self,
        config: dict[str, Any],
        *,
        is_compiled: bool = False,
        is_grouped: bool = False,
        kernel: KdaKernel = kda_chunked,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.ops = pieces(is_compiled=is_compiled)
        self.dtype = dtype
        self.model = Backbone(config, self.ops, kernel, is_grouped=is_grouped)
        self.lm_head = projection(config["hidden_size"], config["vocab_size"], gain=0.3)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Logits `[B, T, vocabulary]`."""
        hidden = self.model(ids_BT, self.dtype)
        return linear(hidden, self.lm_head.weight).view(*ids_BT.shape, -1)

    def loss(self, ids_BT: Tensor, weights_BT: Tensor) -> Tensor:
        """The weighted sum of losses; a token's weight counts for predicting that token."""
        targets = torch.roll(ids_BT, -1, dims=1)
        weights = torch.roll(weights_BT, -1, dims=1).clone()
        weights[:, -1] = 0.0
        hidden = self.model(ids_BT, self.dtype)
        return self.ops.head_loss(
            hidden, self.lm_head.weight, targets.flatten(), weights.flatten().float()
        )

    def moe_layers(self) -> list[LatentMoe]:
        """The layers with experts."""
        return [layer.block_sparse_moe for layer in self.model.layers if not layer.is_dense]
