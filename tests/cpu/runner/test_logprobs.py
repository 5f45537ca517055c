"""Logprobs against torch.log_softmax and sorting; ranks and ties by token id."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stagecoach.request import SamplingParams, TokenLogprobs
from stagecoach.runner.logprobs import (
    prompt_logprobs,
    token_logprobs,
    top_tokens,
    top_tokens_by_key,
)
from stagecoach.runner.sampling_table import SamplingTable
from stagecoach.schedule.step_plan import SamplingEntry
from tests.cpu.runner.sampling import sample

torch.set_num_threads(1)


def expected_logprobs(logits: torch.Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    """Slow reference: sort all tokens of one row by (-logprob, id)."""
    values = torch.log_softmax(logits, -1).tolist()
    order = sorted(range(len(values)), key=lambda other: (-values[other], other))
    return TokenLogprobs(
        token_id=token_id,
        logprob=values[token_id],
        rank=order.index(token_id) + 1,
        top_ids=tuple(order[:num_top]),
        top_logprobs=tuple(values[other] for other in order[:num_top]),
    )


def tied_logits(num_rows: int, vocab_size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 8, (num_rows, vocab_size), generator=generator) / 2.0


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=5), st.sampled_from([3, 30, 900]),
       st.sampled_from([torch.float32, torch.float64]), st.integers(0, 99))  # fmt: skip
def test_each_row_gets_what_it_asked_for(
    num_top: list[int], vocab_size: int, dtype: torch.dtype, seed: int
) -> None:
    logits_RV = tied_logits(len(num_top), vocab_size, seed).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    token_ids_R = torch.randint(0, vocab_size, (len(num_top),), generator=generator)
    rows = token_logprobs(logits_RV, token_ids_R, num_top).to_host()
    assert rows == [
        expected_logprobs(logits, token_id, count)
        for logits, token_id, count in zip(logits_RV, token_ids_R.tolist(), num_top, strict=True)
    ]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 60), st.sampled_from([60, 500]), st.integers(0, 99))
def test_top_tokens_is_the_head_of_a_stable_sort(k: int, vocab_size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values_RV = torch.randn(4, vocab_size, generator=generator)
    values_RV[1:3] = tied_logits(2, vocab_size, seed)
    values_RV[2, 40:] = -torch.inf
    k = min(k, 40)
    values, token_ids = values_RV.sort(dim=-1, descending=True, stable=True)
    best = top_tokens(values_RV, k)
    assert torch.equal(best.values_RK, values[:, :k])
    assert torch.equal(best.token_ids_RK, token_ids[:, :k])


def test_keys_order_values_as_a_stable_sort_does() -> None:
    """Ties, both zeros, infinities, the ends of the type; NaN gives ids of the vocabulary."""
    torch.manual_seed(0)
    values_RV = torch.randn(6, 200).round(decimals=1)
    ends = torch.finfo(torch.float32)
    values_RV[0, :5] = torch.tensor([ends.max, ends.min, torch.inf, ends.tiny, -ends.tiny])
    values_RV[1, ::2], values_RV[1, 1::2] = 0.0, -0.0
    values_RV[2, 10:] = -torch.inf
    values_RV[3] = -1.0 - values_RV[3].abs()
    values_RV[4] *= 1e30
    for k in (1, 7, 10):
        best = top_tokens_by_key(values_RV[:5], k)
        values, token_ids = values_RV[:5].sort(dim=-1, descending=True, stable=True)
        assert best.token_ids_RK.tolist() == token_ids[:, :k].tolist()
        assert best.values_RK.tolist() == values[:, :k].tolist()
    values_RV[5] = torch.nan
    assert top_tokens_by_key(values_RV[5:], 3).token_ids_RK.tolist() == [[0, 1, 2]]


def test_prompt_logprobs_in_parts_equal_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    logits_RV = tied_logits(11, 50, 3).to(torch.bfloat16)
    target_ids_R = torch.arange(11) * 4
    whole = prompt_logprobs(logits_RV, target_ids_R, 5)
    monkeypatch.setattr("stagecoach.runner.logprobs._MAX_ELEMENTS", 150)
    assert prompt_logprobs(logits_RV, target_ids_R, 5) == whole
    assert whole == [
        expected_logprobs(logits.float(), token_id, 5)
        for logits, token_id in zip(logits_RV, target_ids_R.tolist(), strict=True)
    ]
    assert prompt_logprobs(logits_RV[:0], target_ids_R[:0], 5) == []


def test_no_alternatives_still_gives_the_token() -> None:
    logits_RV = tied_logits(1, 9, 0)
    (row,) = prompt_logprobs(logits_RV, torch.tensor([4]), 0)
    assert row == expected_logprobs(logits_RV[0], 4, 0)
    assert row.top_ids == () and row.top_logprobs == ()


@pytest.mark.parametrize(
    "values",
    [{"temperature": 0.0}, {"temperature": 0.3, "top_k": 2}, {"logit_bias": {2: 100.0}},
     {"repetition_penalty": 3.0, "temperature": 0.0}],
    ids=str,
)  # fmt: skip
def test_sampled_logprobs_come_from_the_raw_logits(values: dict[str, Any]) -> None:
    table = SamplingTable(2, 40, "cpu")
    table.admit(
        SamplingEntry(
            row=row,
            request_id=row,
            params=SamplingParams(logprobs=logprobs, **values),
            seed=row,
            stop_token_ids=(),
            num_prompt_tokens=2,
            token_ids=(2, 3),
        )
        for row, logprobs in enumerate((3, None))
    )
    logits_RV = tied_logits(3, 40, 1)
    host = sample(logits_RV, [1, 0, 0], [2, 2, 3], table)
    assert host.logprobs == [
        None,
        expected_logprobs(logits_RV[1], host.token_ids[1], 3),
        expected_logprobs(logits_RV[2], host.token_ids[2], 3),
    ]


def test_the_greedy_token_has_rank_one_even_when_tied() -> None:
    logits_RV = torch.zeros(1, 5)
    (row,) = token_logprobs(logits_RV, logits_RV.argmax(-1), [2]).to_host()
    assert row.token_id == 0 and row.rank == 1 and row.top_ids == (0, 1)
