"""Norms, the mixture of attention residuals and gated activations on a GPU: right, and how fast.

python -m bench.kernels.elementwise check | time
"""

import sys
from collections.abc import Callable
from functools import partial
from itertools import product

import torch
from torch import Tensor

from bench.kernels.timing import (
    Report,
    graph_time_us,
    limit_us,
    num_rotations,
    relative_error,
    run_command,
)
from stagecoach.kernels.activation import Activation
from stagecoach.kernels.activation import reference as activation_reference
from stagecoach.kernels.attn_res import cluster_cuda, mix, mix_rms_norm
from stagecoach.kernels.attn_res import cuda as mixture_cuda
from stagecoach.kernels.attn_res import reference as mixture_reference
from stagecoach.kernels.norm import add_rms_norm, gated_rms_norm, grouped_rms_norm, rms_norm
from stagecoach.kernels.norm import cuda as norm_cuda
from stagecoach.kernels.norm import reference as norm_reference

EPS = 1e-5
DEVICE = "cuda"
TOLERANCES = {torch.bfloat16: 6e-3, torch.float32: 2e-6}

K3_HIDDEN, LINEAR_HIDDEN = 7168, 2304
NUM_TOKENS = (1, 8, 64, 256, 2048)


def drawn(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Random values as a view of a wider tensor that holds NaN beside them."""
    wide = torch.full((*shape[:-1], shape[-1] + 16), float("nan"), dtype=dtype, device=DEVICE)
    wide[..., : shape[-1]] = scale * torch.randn(shape, device=DEVICE)
    return wide[..., : shape[-1]]


def wide(*tensors: Tensor) -> list[Tensor]:
    return [tensor.double() for tensor in tensors]


def check(report: Report) -> None:
    """Every door against its reference in float64."""
    for dtype, tolerance in TOLERANCES.items():
        kind = str(dtype).removeprefix("torch.")
        for num_tokens, width in ((1, 2304), (65, 7168), (300, 128)):
            x, weight = drawn(num_tokens, width, dtype=dtype), drawn(width, dtype=dtype)
            expected = norm_reference.rms_norm(*wide(x, weight), EPS)
            error = relative_error(rms_norm(x, weight, EPS), expected)
            report.check(f"rms_norm {kind} {num_tokens} x {width}", error, tolerance)
        _check_heads(report, dtype, kind, tolerance)
        for num_tokens, width in ((1, 2304), (67, 2304), (4, 36)):
            addends = [drawn(num_tokens, width, dtype=dtype) for _ in range(2)]
            weight = torch.randn(width, device=DEVICE).to(dtype)
            sum_TH, normed_TH = add_rms_norm(*addends, weight, EPS)
            name = f"add_rms_norm {kind} {num_tokens} x {width}"
            report.check(f"{name} sum", float((sum_TH != addends[0] + addends[1]).sum()), 0)
            expected = norm_reference.rms_norm(*wide(sum_TH, weight), EPS)
            report.check(name, relative_error(normed_TH, expected), tolerance)
        for num_tokens, num_blocks, width in (
            *((1, 8, 7168), (1500, 8, 7168), (7, 1, 7168), (33, 5, 96), (3, 0, 7168)),
        ):
            _check_mixture(report, (num_tokens, num_blocks, width), dtype, tolerance)
        for activation in (Activation("silu"), Activation("situ", 4.0, 25.0), Activation("situ")):
            gate, up = (drawn(37, 1030, dtype=dtype, scale=4.0) for _ in range(2))
            if activation.kind == "silu":
                expected = activation_reference.silu_and_mul(*wide(gate, up))
            else:
                expected = activation_reference.situ_and_mul(
                    *wide(gate, up), activation.beta, activation.linear_beta
                )
            error = relative_error(activation(gate, up), expected)
            report.check(f"{activation.kind} {activation.linear_beta} {kind}", error, tolerance)


def _check_heads(report: Report, dtype: torch.dtype, kind: str, tolerance: float) -> None:
    for num_tokens, num_heads in ((1, 96), (37, 32), (513, 3)):
        x_THV, gate_THV = (drawn(num_tokens, num_heads, 128, dtype=dtype) for _ in range(2))
        weight_V = torch.randn(128, device=DEVICE).to(dtype)
        expected = norm_reference.gated_rms_norm(*wide(x_THV, gate_THV, weight_V), EPS)
        error = relative_error(gated_rms_norm(x_THV, gate_THV, weight_V, EPS), expected)
        report.check(f"gated_rms_norm {kind} {num_tokens} x {num_heads} x 128", error, tolerance)
        weight_HV = torch.randn(num_heads, 128, device=DEVICE).to(dtype)
        expected = norm_reference.grouped_rms_norm(*wide(x_THV, weight_HV), EPS)
        error = relative_error(grouped_rms_norm(x_THV, weight_HV, EPS), expected)
        report.check(f"grouped_rms_norm {kind} {num_tokens} x {num_heads} x 128", error, tolerance)


def _check_mixture(
    report: Report, shape: tuple[int, int, int], dtype: torch.dtype, tolerance: float
) -> None:
    num_tokens, num_blocks, width = shape
    bank_TBH = drawn(num_tokens, num_blocks + 2, width, dtype=dtype)[:, :num_blocks]
    partial_TH, addend_TH = (drawn(num_tokens, width, dtype=dtype) for _ in range(2))
    key_H = 0.05 * torch.randn(width, device=DEVICE)
    norm_H = torch.randn(width, device=DEVICE).to(dtype)
    shape_name = f"{dtype} {num_tokens} x {num_blocks} x {width}".removeprefix("torch.")
    forms = [("", mix_rms_norm)]
    if num_blocks and dtype == torch.bfloat16 and not width % 64:
        forms.append((" in Triton", partial(mixture_cuda.mix_rms_norm, num_warps=8)))
    for (form, call), addend in product(forms, (addend_TH, None)):
        name = shape_name + form
        mixed = call(bank_TBH, partial_TH, addend, key_H, norm_H, EPS, keeps_mixed=True)
        assert mixed.mixed_TH is not None
        with_addend = "" if addend is None else " + addend"
        expected_sum = partial_TH if addend is None else partial_TH + addend
        differing = float((mixed.sum_TH != expected_sum).sum())
        report.check(f"mix {name}{with_addend}, sum", differing, 0)
        inputs = wide(bank_TBH, mixed.sum_TH, key_H)
        expected = mixture_reference.mix(*inputs, EPS)
        error = relative_error(mixed.mixed_TH, expected)
        report.check(f"mix {name}{with_addend}, mixture", error, tolerance)
        expected = norm_reference.rms_norm(*wide(mixed.mixed_TH, norm_H), EPS)
        error = relative_error(mixed.normed_TH, expected)
        report.check(f"mix {name}{with_addend}, norm", error, tolerance)
        if not form:
            only = call(bank_TBH, partial_TH, addend, key_H, norm_H, EPS)
            error = relative_error(only.normed_TH, mixed.normed_TH)
            report.check(f"mix {name}{with_addend}, only the norm", error, 0)
    if num_blocks:
        error = relative_error(mix(bank_TBH, mixed.sum_TH, key_H, EPS), mixed.mixed_TH)
        report.check(f"mix {shape_name} alone", error, tolerance)


def time_rotated(make: Callable[[], list[Tensor]], call: Callable[..., object]) -> float:
    """Microseconds of `call` on inputs that are not in the L2 cache."""
    sets = [make()]
    sets += [make() for _ in range(num_rotations(sum(x.nbytes for x in sets[0])) - 1)]
    calls = [partial(call, *inputs) for inputs in sets]
    return graph_time_us(calls, iterations=max(16, len(sets)))


def dense(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE).bfloat16()


def time_add_rms_norm(report: Report, num_tokens: int, width: int, num_warps: int) -> None:
    weight_H, tile = dense(width), norm_cuda.RowTile(1, 4096, num_warps)
    us = time_rotated(
        lambda: [dense(num_tokens, width), dense(num_tokens, width)],
        lambda x, y: norm_cuda.add_rms_norm(x, y, weight_H, EPS, tile),
    )
    limit = limit_us(4 * num_tokens * width * 2)
    report.time(f"add_rms_norm {num_tokens} x {width}, {num_warps} warps", us, limit)


def time_heads(report: Report, num_tokens: int, num_heads: int) -> None:
    weight_V = dense(128)
    us = time_rotated(
        lambda: [dense(num_tokens, num_heads, 128), dense(num_tokens, num_heads, 128)],
        lambda x, y: gated_rms_norm(x, y, weight_V, EPS),
    )
    limit = limit_us(3 * num_tokens * num_heads * 128 * 2)
    report.time(f"gated_rms_norm {num_tokens} x {num_heads} x 128", us, limit)


def time_latent_norm(report: Report, num_tokens: int) -> None:
    weight_C = dense(512)
    us = time_rotated(
        lambda: [dense(num_tokens, 576)], lambda x: rms_norm(x[:, :512], weight_C, EPS)
    )
    report.time(f"rms_norm {num_tokens} x 512 of 576", us, limit_us(2 * num_tokens * 512 * 2))


def time_situ(report: Report, num_tokens: int, width: int) -> None:
    activation = Activation("situ", 4.0, 25.0)
    us = time_rotated(
        lambda: [dense(num_tokens, 2 * width)], lambda x: activation(*x.chunk(2, dim=1))
    )
    report.time(f"situ {num_tokens} x {width}", us, limit_us(3 * num_tokens * width * 2))


def time_mixture(report: Report, num_tokens: int, num_blocks: int, width: int) -> None:
    """In Triton, and with clusters of several sizes."""
    key_H, norm_H = 0.01 * torch.randn(width, device=DEVICE), dense(width)
    sum_TH, normed_TH = torch.empty(2, num_tokens, width, device=DEVICE).bfloat16().unbind()
    limit = limit_us((num_blocks + 4) * num_tokens * width * 2)

    def in_clusters(cluster: int, bank: Tensor, x: Tensor, y: Tensor) -> None:
        outputs = sum_TH, None, normed_TH
        cluster_cuda.mix(bank, x, y, key_H, norm_H, EPS, *outputs, cluster=cluster)

    def in_triton(bank: Tensor, x: Tensor, y: Tensor) -> None:
        mixture_cuda.mix_rms_norm(bank, x, y, key_H, norm_H, EPS, num_warps=8)

    forms: list[tuple[str, Callable[..., object]]] = [("in Triton", in_triton)]
    forms += [(f"cluster {size}", partial(in_clusters, size)) for size in (2, 4, 8)]
    for form, call in forms:
        us = time_rotated(
            lambda: [
                dense(num_tokens, num_blocks, width),
                dense(num_tokens, width),
                dense(num_tokens, width),
            ],
            call,
        )
        report.time(f"mix_rms_norm {num_tokens} x {num_blocks} x {width}, {form}", us, limit)


def time_all(report: Report) -> None:
    """bfloat16; the limit counts each input and each output once."""
    for num_tokens in NUM_TOKENS:
        time_add_rms_norm(report, num_tokens, LINEAR_HIDDEN, 8)
        time_heads(report, num_tokens, 32)
        time_latent_norm(report, num_tokens)
        time_situ(report, num_tokens, 1024)
    for num_tokens in NUM_TOKENS:
        for num_blocks in (1, 4, 8):
            time_mixture(report, num_tokens, num_blocks, K3_HIDDEN)


if __name__ == "__main__":
    torch.manual_seed(0)
    sys.exit(run_command("elementwise", __doc__, {"check": check, "time": time_all}))
