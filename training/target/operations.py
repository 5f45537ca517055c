"""The arithmetic of the demo target, as functions that can be compiled for fixed shapes.

Tokens of all rows are flattened to N = B * T wherever rows do not matter, so that the compiled
pieces see one shape for every length bucket. The KDA recurrence is here in two plain forms and in
flash-linear-attention's.

Shapes: B rows, T tokens a row, N = B * T, H hidden, K heads times head width of KDA, E experts,
A experts chosen for a token.
"""

from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from training.target.mxfp4 import fake_quantize

LATENT_NORM_EPS = 1e-6
QK_NORM_EPS = 1e-6
CHUNK = 16

KdaKernel = Callable[..., Tensor]


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
