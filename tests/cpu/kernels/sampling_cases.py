"""Rows to choose tokens for, on any device: every temperature, ties, seeds, and nobody's rows."""

import torch
from torch import Tensor

from stagecoach.kernels.sampling import Choices, SamplingRows

TEMPERATURES = (0.0, 1.0, 0.7, 1e-300, 1.3, 0.0, 5.0)


def make_rows(num_rows: int, device: str, *, has_segments: bool) -> SamplingRows:
    """Rows that go through the temperatures; positions beyond 2^32, some rows are nobody's."""
    num_table = len(TEMPERATURES)
    parameters_NP = torch.zeros(num_table, 6, dtype=torch.float64)
    parameters_NP[:, 0] = torch.tensor(TEMPERATURES, dtype=torch.float64)
    num_segments = (num_rows + 1) // 2 if has_segments else num_rows
    sampling_rows_B = torch.arange(num_segments, dtype=torch.int32) % num_table
    sampling_rows_B[5::9] = -1
    segment_T = torch.arange(num_rows, dtype=torch.int32) // 2
    segment_T[4::11] = -1
    positions_T = torch.arange(num_rows) + 100
    positions_T[1::3] += 2**33
    return SamplingRows(
        sampling_rows_B.to(device),
        segment_T.to(device) if has_segments else None,
        positions_T.to(device),
        1,
        parameters_NP.to(device)[:, 0],
        (torch.arange(num_table) * 2**40 - 3).to(device),
    )


def make_logits(num_rows: int, vocab_size: int, dtype: torch.dtype, device: str) -> Tensor:
    """Part of a wider matrix whose rest is NaN; ties at the top of every third row."""
    logits_TV = 3 * torch.randn(num_rows, vocab_size + 5)
    logits_TV[::3] = logits_TV[::3].round()
    logits_TV[:, vocab_size:] = torch.nan
    return logits_TV.to(device, dtype)[:, :vocab_size]


def assert_same(choices: Choices, expected: Choices) -> None:
    assert choices.token_ids_T.tolist() == expected.token_ids_T.tolist()
    assert choices.is_finite_T.tolist() == expected.is_finite_T.tolist()
