"""The demo target for training: Kimi-K3's text model over whole right-padded rows.

Parameters carry the checkpoint's names, except that the experts of a layer are stacked. Tokens of
all rows are flattened to N = B * T wherever rows do not matter, so that the compiled pieces see
one shape for every length bucket.

Shapes: B rows, T tokens a row, N = B * T, H hidden, K heads times head width of KDA, L latent.
"""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.target.mxfp4 import fake_quantize

LATENT_NORM_EPS = 1e-6
QK_NORM_EPS = 1e-6
CHUNK = 16

KdaKernel = Callable[..., Tensor]


class Geometry(NamedTuple):
    """How a batch is laid out."""

    num_rows: int
    row_length: int
    position_N: Tensor  # place of each token in its row


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x` times the transposed weight in the dtype of `x`."""
    return F.linear(x, weight.to(x.dtype))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm in float32."""
    x32 = x.float()
    normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (normed * weight.to(x.dtype).float()).to(x.dtype)


def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """SiTU in float32."""
    gate32, up32 = gate.float(), up.float()
    activated = beta * torch.tanh(gate32 / beta) * torch.sigmoid(gate32)
    return (activated * linear_beta * torch.tanh(up32 / linear_beta)).to(gate.dtype)


def mix(blocks: list[Tensor], partial: Tensor, norm: Tensor, proj: Tensor, eps: float) -> Tensor:
    """The attention residual: a softmax mixture of finished blocks and the running sum."""
    weight_H = norm.to(partial.dtype).float() * proj.to(partial.dtype).float().squeeze(0)
    candidates = [candidate.float() for candidate in (*blocks, partial)]
    scores = [
        (candidate * weight_H).sum(-1) * torch.rsqrt(candidate.square().mean(-1) + eps)
        for candidate in candidates
    ]
    shares = torch.softmax(torch.stack(scores, dim=-1), dim=-1)
    mixed = sum(shares[:, i, None] * candidate for i, candidate in enumerate(candidates))
    return mixed.to(partial.dtype)


def mix_and_norm(
    blocks: list[Tensor],
    partial: Tensor,
    norm: Tensor,
    proj: Tensor,
    layer_norm: Tensor,
    eps: float,
) -> Tensor:
    """What a sublayer reads."""
    mixed = mix(blocks, partial, norm, proj, eps) if blocks else partial
    return rms_norm(mixed, layer_norm, eps)


def short_convolution(x_NK: Tensor, weight_K14: Tensor, position_N: Tensor) -> Tensor:
    """Causal depthwise convolution of width 4 within each row, then SiLU."""
    weight_K4 = weight_K14.squeeze(1)
    total = x_NK.float() * weight_K4[:, 3]
    for back in (1, 2, 3):
        shifted = torch.roll(x_NK, back, dims=0).float()
        is_inside = (position_N >= back)[:, None]
        total = total + torch.where(is_inside, shifted, 0.0) * weight_K4[:, 3 - back]
    return F.silu(total).to(x_NK.dtype)


def kda_project(
    x: Tensor,
    position_N: Tensor,
    qkv: tuple[Tensor, Tensor, Tensor],
    convolutions: tuple[Tensor, Tensor, Tensor],
    gates: tuple[Tensor, Tensor, Tensor, Tensor],
) -> tuple[Tensor, ...]:
    """Everything before the recurrence: q, k, v, decay logits, beta logits, output gate."""
    q, k, v = (
        short_convolution(linear(x, weight), convolution, position_N)
        for weight, convolution in zip(qkv, convolutions, strict=True)
    )
    f_a, f_b, b, g = gates
    return q, k, v, linear(linear(x, f_a), f_b), linear(x, b), linear(x, g)


def kda_output(o_NHV: Tensor, gate: Tensor, o_norm: Tensor, o_proj: Tensor, eps: float) -> Tensor:
    """Norm of each head, output gate, output projection."""
    o32 = o_NHV.float()
    normed = o32 * torch.rsqrt(o32.square().mean(-1, keepdim=True) + eps) * o_norm
    gated = normed.flatten(1) * torch.sigmoid(gate.float())
    return linear(gated.to(gate.dtype), o_proj)


def mla_project(
    x: Tensor, weights: dict[str, Tensor], num_heads: int, nope: int, rope: int, value: int
) -> tuple[Tensor, ...]:
    """q, k, v of width nope + rope (v is padded with zeros), and the output gate."""
    num_tokens = x.shape[0]
    q_latent = rms_norm(linear(x, weights["q_a"]), weights["q_a_norm"], LATENT_NORM_EPS)
    q = linear(q_latent, weights["q_b"]).view(num_tokens, num_heads, nope + rope)
    latent, shared_key = linear(x, weights["kv_a"]).split((weights["kv_b"].shape[1], rope), dim=-1)
    latent = rms_norm(latent, weights["kv_a_norm"], LATENT_NORM_EPS)
    keys_values = linear(latent, weights["kv_b"]).view(num_tokens, num_heads, nope + value)
    k_nope, v = keys_values.split((nope, value), dim=-1)
    k = torch.cat((k_nope, shared_key[:, None].expand(-1, num_heads, -1)), dim=-1)
    return q, k, F.pad(v, (0, nope + rope - value)), linear(x, weights["g"])


def mla_output(o_NHV: Tensor, gate: Tensor, o_proj: Tensor, value: int) -> Tensor:
    """Output gate and output projection."""
    o = o_NHV[..., :value].flatten(1).float() * torch.sigmoid(gate.float())
    return linear(o.to(gate.dtype), o_proj)


def mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, betas: tuple[float, float]) -> Tensor:
    """The dense MLP."""
    return linear(situ(linear(x, gate), linear(x, up), *betas), down)


def route(
    x: Tensor, gate: Tensor, correction_bias: Tensor, top_k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Experts of each token, their weights, and how many tokens each expert got."""
    logits = F.linear(x.float(), gate.to(x.dtype).float())
    scores_NE = torch.sigmoid(logits)
    chosen_NA = torch.topk(scores_NE + correction_bias, top_k, dim=-1).indices
    chosen_scores = scores_NE.gather(1, chosen_NA)
    weights_NA = chosen_scores / (chosen_scores.sum(-1, keepdim=True) + 1e-20)
    load_E = F.one_hot(chosen_NA, gate.shape[0]).sum((0, 1))
    return chosen_NA, weights_NA, load_E


def moe_before(
    x: Tensor, gate: Tensor, correction_bias: Tensor, down: Tensor, top_k: int
) -> tuple[Tensor, ...]:
    """Routing, and the sorted copies of latent tokens that the experts read."""
    chosen_NA, weights_NA, load_E = route(x, gate, correction_bias, top_k)
    order = torch.argsort(chosen_NA.flatten(), stable=True)
    latent = linear(x, down)[order // top_k]
    return latent, weights_NA.flatten()[order], order, load_E.cumsum(0).to(torch.int32), load_E


def quantized_experts(w1: Tensor, w2: Tensor, w3: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The experts' weights as the checkpoint will hold them, transposed for `x @ w`."""
    return tuple(fake_quantize(w).to(dtype).transpose(1, 2) for w in (w1, w2, w3))


def moe_after(
    y: Tensor,
    weights: Tensor,
    order: Tensor,
    x: Tensor,
    top_k: int,
    norm: Tensor,
    up: Tensor,
    shared: tuple[Tensor, Tensor, Tensor],
    betas: tuple[float, float],
    eps: float,
) -> Tensor:
    """Weighted sum of the experts' outputs, its norm, the way back up, and the shared expert."""
    back = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=x.device))
    summed = (y.float() * weights[:, None])[back].view(x.shape[0], top_k, -1).sum(1)
    return linear(rms_norm(summed.to(x.dtype), norm, eps), up) + mlp(x, *shared, betas)


def moe_dense(
    x: Tensor,
    gate: Tensor,
    correction_bias: Tensor,
    down: Tensor,
    experts: tuple[Tensor, Tensor, Tensor],
    top_k: int,
    norm: Tensor,
    up: Tensor,
    shared: tuple[Tensor, Tensor, Tensor],
    betas: tuple[float, float],
    eps: float,
) -> tuple[Tensor, Tensor]:
    """The latent MoE by computing every expert for every token; unchosen ones weigh nothing."""
    chosen_NA, weights_NA, load_E = route(x, gate, correction_bias, top_k)
    weights_NE = torch.zeros(
        x.shape[0], gate.shape[0], device=x.device, dtype=torch.float32
    ).scatter(1, chosen_NA, weights_NA)
    latent = linear(x, down)
    w1, w2, w3 = (fake_quantize(weight).to(x.dtype) for weight in experts)
    width = w1.shape[1]
    hidden = situ(F.linear(latent, w1.flatten(0, 1)), F.linear(latent, w3.flatten(0, 1)), *betas)
    weighted = hidden.view(x.shape[0], -1, width) * weights_NE[:, :, None].to(x.dtype)
    y = F.linear(weighted.flatten(1), w2.permute(1, 0, 2).flatten(1))
    return linear(rms_norm(y, norm, eps), up) + mlp(x, *shared, betas), load_E


def head_loss(hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of the tokens' losses."""
    logits = linear(hidden, head).float()
    losses = F.cross_entropy(logits, targets, reduction="none")
    return (losses * weights).sum()


def kda_recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, A_log: Tensor, dt_bias: Tensor,
    lower_bound: float,
) -> Tensor:  # fmt: skip
    """The gated delta rule, token by token, in float32: what the fused kernel computes."""
    q, k, v, g, beta = (x.float() for x in (q, k, v, g, beta))
    num_heads, width = q.shape[2:]
    q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + QK_NORM_EPS) * width**-0.5
    k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + QK_NORM_EPS)
    rate = torch.exp(A_log)[:, None]
    decay = torch.exp(lower_bound * torch.sigmoid(rate * (g + dt_bias.view(num_heads, width))))
    beta = torch.sigmoid(beta)
    state = q.new_zeros(q.shape[0], num_heads, width, v.shape[-1])
    outputs = []
    for t in range(q.shape[1]):
        state = state * decay[:, t, :, :, None]
        read = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        update = beta[:, t, :, None] * (v[:, t] - read)
        state = state + k[:, t, :, :, None] * update[:, :, None]
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(outputs, dim=1)


def kda_chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, A_log: Tensor, dt_bias: Tensor,
    lower_bound: float,
) -> Tensor:  # fmt: skip
    """`kda_recurrence` in chunks of 16 tokens, over which exp(-G) still fits float32."""
    q, k, v, g, beta = (x.float().transpose(1, 2) for x in (q, k, v, g, beta.unsqueeze(-1)))
    num_heads, length, width = q.shape[1:]
    q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + QK_NORM_EPS) * width**-0.5
    k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + QK_NORM_EPS)
    rate = torch.exp(A_log)[:, None, None]
    g = lower_bound * torch.sigmoid(rate * (g + dt_bias.view(num_heads, 1, width)))
    beta = torch.sigmoid(beta)
    state = q.new_zeros(q.shape[0], num_heads, width, v.shape[-1])
    outputs = []
    for start in range(0, length, CHUNK):
        q_c, k_c, v_c, g_c, beta_c = (x[:, :, start : start + CHUNK] for x in (q, k, v, g, beta))
        total = g_c.cumsum(2)
        decayed_q, decayed_k = q_c * torch.exp(total), k_c * torch.exp(total)
        raised_k = k_c * torch.exp(-total)
        mixing = torch.tril(beta_c * (decayed_k @ raised_k.mT), -1)
        identity = torch.eye(mixing.shape[-1], device=q.device)
        update = torch.linalg.solve_triangular(
            identity + mixing, beta_c * (v_c - decayed_k @ state), upper=False
        )
        outputs.append(decayed_q @ state + torch.tril(decayed_q @ raised_k.mT) @ update)
        last = total[:, :, -1:]
        state = torch.exp(last).mT * state + (k_c * torch.exp(last - total)).mT @ update
    return torch.cat(outputs, dim=2).transpose(1, 2)


def fused_kda() -> KdaKernel:
    """flash-linear-attention's chunk kernel under the same call as `kda_recurrence`."""
    from fla.ops.kda import chunk_kda

    def kernel(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, A_log: Tensor,
        dt_bias: Tensor, lower_bound: float,
    ) -> Tensor:  # fmt: skip
        o, _ = chunk_kda(
            q, k, v, g, beta,
            A_log=A_log,
            dt_bias=dt_bias,
            lower_bound=lower_bound,
            safe_gate=True,
            use_gate_in_kernel=True,
            use_qk_l2norm_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            disable_recompute=True,
        )  # fmt: skip
        return o

    return kernel


_PIECES = (
    mix_and_norm,
    rms_norm,
    kda_project,
    kda_output,
    mla_project,
    mla_output,
    mlp,
    situ,
    moe_before,
    moe_after,
    moe_dense,
    quantized_experts,
    head_loss,
)


def pieces(*, is_compiled: bool) -> SimpleNamespace:
    """The functions above, compiled for fixed shapes or as they are."""
    if not is_compiled:
        return SimpleNamespace(**{piece.__name__: piece for piece in _PIECES})
    torch._dynamo.config.recompile_limit = 64
    return SimpleNamespace(
        **{piece.__name__: torch.compile(piece, dynamic=False) for piece in _PIECES}
    )


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
