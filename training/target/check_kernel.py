"""Compare the fused KDA kernel with the recurrence written out, on a GPU: outputs and gradients."""

import torch

from training.target.operations import fused_kda, kda_recurrence

LOWER_BOUND = -5.0
TOLERANCE = 2e-2


def main() -> None:
    torch.manual_seed(0)
    shape = (3, 200, 4, 64)
    device = "cuda"
    q, k, v, g, seed_o = (torch.randn(shape, device=device) for _ in range(5))
    beta = torch.randn(shape[:3], device=device)
    A_log = torch.rand(4, device=device)
    dt_bias = torch.randn(256, device=device) - 3
    results = []
    for kernel, dtype in ((kda_recurrence, torch.float32), (fused_kda(), torch.bfloat16)):
        inputs = [x.to(torch.bfloat16).to(dtype).requires_grad_() for x in (q, k, v, g, beta)]
        parameters = [x.clone().requires_grad_() for x in (A_log, dt_bias)]
        o = kernel(*inputs, A_log=parameters[0], dt_bias=parameters[1], lower_bound=LOWER_BOUND)
        (o.float() * seed_o).sum().backward()
        results.append([o.detach(), *(x.grad for x in (*inputs, *parameters))])
    names = ("o", "dq", "dk", "dv", "dg", "dbeta", "dA_log", "ddt_bias")
    is_close = True
    for name, expected, got in zip(names, *results, strict=True):
        error = float((got.float() - expected).norm() / expected.norm())
        is_close &= error < TOLERANCE
        print(f"{name}: relative error {error:.1e}")
    if not is_close:
        raise SystemExit("the fused kernel and the recurrence differ")


if __name__ == "__main__":
    main()
