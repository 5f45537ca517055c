"""The sampling table: what a row holds, and that a new tenant inherits nothing."""

import math
from typing import Any

import pytest
import torch

from stagecoach.request import SamplingParams
from stagecoach.runner.sampling_table import Parameter, SamplingTable
from stagecoach.schedule.step_plan import SamplingEntry
from tests.cpu.runner.sampling import sample

torch.set_num_threads(1)

VOCAB_SIZE = 8


def entry(
    row: int,
    *,
    prompt: tuple[int, ...] = (1, 2),
    output: tuple[int, ...] = (),
    stop_token_ids: tuple[int, ...] = (),
    seed: int = 0,
    **params: Any,
) -> SamplingEntry:
    return SamplingEntry(
        row=row,
        request_id=row,
        params=SamplingParams(**params),
        seed=seed,
        stop_token_ids=stop_token_ids,
        num_prompt_tokens=len(prompt),
        token_ids=(*prompt, *output),
    )


def test_parameters_land_in_their_columns() -> None:
    table = SamplingTable(4, VOCAB_SIZE, "cpu")
    table.admit(
        [
            entry(2, temperature=0.5, top_p=0.25, min_p=0.125, seed=2**63 - 1),
            entry(0, presence_penalty=1.0, frequency_penalty=-1.0, repetition_penalty=1.5, seed=9),
        ]
    )
    row = table.parameters_NP[2]
    assert row[Parameter.TEMPERATURE] == 0.5 and row[Parameter.TOP_P] == 0.25
    assert row[Parameter.LOG_MIN_P].item() == math.log(0.125)
    assert table.parameters_NP[0, Parameter.LOG_MIN_P] == -math.inf
    assert table.parameters_NP[0, Parameter.PRESENCE_PENALTY] == 1.0
    assert table.parameters_NP[0, Parameter.FREQUENCY_PENALTY] == -1.0
    assert table.parameters_NP[0, Parameter.REPETITION_PENALTY] == 1.5
    assert table.seeds_N.tolist() == [9, 0, 2**63 - 1, 0]


@pytest.mark.parametrize("top_k", [0, -1, VOCAB_SIZE, VOCAB_SIZE + 5])
def test_a_top_k_that_cuts_nothing_costs_nothing(top_k: int) -> None:
    table = SamplingTable(1, VOCAB_SIZE, "cpu")
    table.admit([entry(0, top_k=top_k)])
    assert table.traits(0).top_k is None


def test_counts_come_from_the_entry_and_then_from_append() -> None:
    table = SamplingTable(3, VOCAB_SIZE, "cpu")
    table.admit(
        [
            entry(1, prompt=(3, 3, 4), output=(5, 5, 0), presence_penalty=1.0),
            entry(2),
        ]
    )
    table.append([2, 1, 1, 1], torch.tensor([7, 5, 6, 6]))
    assert table.output_counts(torch.tensor([1])).tolist() == [[1, 0, 0, 0, 0, 3, 2, 0]]
    assert table.is_in_prompt(torch.tensor([1])).nonzero()[:, 1].tolist() == [3, 4]


def test_memory_for_counts_waits_for_the_first_penalty() -> None:
    table = SamplingTable(3, VOCAB_SIZE, "cpu")
    table.admit([entry(0, logit_bias={1: 2.0}, min_tokens=2, stop_token_ids=(3,))])
    table.append([0], torch.tensor([1]))
    assert table._output_counts_NV is None and table._is_in_prompt_NV is None
    table.admit([entry(1, repetition_penalty=1.1)])
    assert table._output_counts_NV is not None


def test_a_new_tenant_inherits_nothing() -> None:
    everything: dict[str, Any] = {
        "temperature": 0.3,
        "top_p": 0.2,
        "top_k": 2,
        "min_p": 0.9,
        "presence_penalty": 2.0,
        "frequency_penalty": 2.0,
        "repetition_penalty": 3.0,
        "logit_bias": {0: 100.0},
        "min_tokens": 5,
        "logprobs": 3,
    }
    tenants: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"temperature": 0.0, "presence_penalty": 0.5},
        {"temperature": 2.0, "repetition_penalty": 1.5, "logprobs": 1},
    ]
    logits_RV = torch.linspace(-1, 1, VOCAB_SIZE).repeat(1, 1)
    for params in tenants:
        used = SamplingTable(1, VOCAB_SIZE, "cpu")
        used.admit([entry(0, prompt=(1, 7), output=(6, 6), stop_token_ids=(2,), **everything)])
        used.append([0, 0], torch.tensor([5, 5]))
        used.admit([entry(0, prompt=(4,), output=(3,), seed=5, **params)])
        fresh = SamplingTable(1, VOCAB_SIZE, "cpu")
        fresh.admit([entry(0, prompt=(4,), output=(3,), seed=5, **params)])
        assert torch.equal(used.parameters_NP, fresh.parameters_NP)
        assert torch.equal(used.seeds_N, fresh.seeds_N)
        assert used.traits(0) == fresh.traits(0)
        if "presence_penalty" in params or "repetition_penalty" in params:
            row = torch.tensor([0])
            assert torch.equal(used.output_counts(row), fresh.output_counts(row))
            assert torch.equal(used.is_in_prompt(row), fresh.is_in_prompt(row))
        for position in range(2, 40):
            ours = sample(logits_RV, [0], [position], used)
            assert ours == sample(logits_RV, [0], [position], fresh)


def test_admission_leaves_other_rows_alone() -> None:
    table = SamplingTable(2, VOCAB_SIZE, "cpu")
    table.admit([entry(0, output=(3,), presence_penalty=1.0, seed=4)])
    before = (table.parameters_NP[0].clone(), table.output_counts(torch.tensor([0])))
    table.admit([entry(1, output=(5,), presence_penalty=0.5, seed=6)])
    table.append([1], torch.tensor([3]))
    assert torch.equal(table.parameters_NP[0], before[0])
    assert torch.equal(table.output_counts(torch.tensor([0])), before[1])


def test_end_tokens_beyond_the_vocabulary_need_no_mask() -> None:
    table = SamplingTable(1, VOCAB_SIZE, "cpu")
    table.admit([entry(0, min_tokens=1, stop_token_ids=(VOCAB_SIZE, 3))])
    assert table.traits(0).blocked_ids == (3,)


def test_our_own_mistakes_are_caught() -> None:
    table = SamplingTable(2, VOCAB_SIZE, "cpu")
    with pytest.raises(AssertionError, match="never admitted"):
        table.append([1], torch.tensor([0]))
    with pytest.raises(AssertionError, match="admitted twice"):
        table.admit([entry(1), entry(1)])
    with pytest.raises(AssertionError, match="rows"):
        table.admit([entry(2)])
