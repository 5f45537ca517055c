"""Who may be served at all, and who may start now, as tables."""

import pytest

from stagecoach.errors import RequestError
from stagecoach.schedule.admission import (
    check_checkpoint_position,
    check_fits_pool,
    check_min_tokens,
    longest_computed,
    may_start,
    pages_to_start,
    resolve_max_tokens,
)


@pytest.mark.parametrize(
    ("max_tokens", "num_prompt_tokens", "max_model_len", "resolved"),
    [(16, 10, 100, 16), (None, 10, 100, 90), (95, 10, 100, 90), (1, 99, 100, 1), (5, 99, 100, 1)],
)
def test_max_tokens_is_capped_by_the_models_length(
    max_tokens: int | None, num_prompt_tokens: int, max_model_len: int, resolved: int
) -> None:
    assert resolve_max_tokens(max_tokens, num_prompt_tokens, max_model_len) == resolved


def test_a_least_output_beyond_the_models_length_is_refused() -> None:
    check_min_tokens(min_tokens=10, max_tokens=10)
    with pytest.raises(RequestError, match=r"min_tokens: 11 outputs .* leaves room for 10") as e:
        check_min_tokens(min_tokens=11, max_tokens=10)
    assert e.value.field == "min_tokens"


def test_the_last_output_is_never_forwarded() -> None:
    assert longest_computed(10, 1) == 10
    assert longest_computed(10, 5) == 14


@pytest.mark.parametrize(("num_prompt_tokens", "max_tokens"), [(12, 1), (10, 3), (1, 12)])
def test_a_request_that_fills_the_pool_fits(num_prompt_tokens: int, max_tokens: int) -> None:
    check_fits_pool(
        num_prompt_tokens=num_prompt_tokens, max_tokens=max_tokens, block_size=4, num_pages=3
    )


def test_a_prompt_beyond_the_pool_is_refused_with_the_numbers() -> None:
    with pytest.raises(RequestError, match=r"prompt: has 13 tokens; all 3 pages .* hold 12") as e:
        check_fits_pool(num_prompt_tokens=13, max_tokens=1, block_size=4, num_pages=3)
    assert e.value.field == "prompt"


def test_outputs_beyond_the_pool_are_refused_with_what_would_fit() -> None:
    with pytest.raises(RequestError, match=r"max_tokens: 4 outputs .* leaves room for 3") as e:
        check_fits_pool(num_prompt_tokens=10, max_tokens=4, block_size=4, num_pages=3)
    assert e.value.field == "max_tokens"


@pytest.mark.parametrize(
    ("num_tokens", "num_prompt_tokens", "max_tokens", "pages"),
    [
        (8, 8, 1, 2),  # one output: nothing is forwarded after the prompt
        (8, 8, 2, 3),  # the first decode step opens a page
        (7, 7, 9, 2),
        (11, 8, 4, 3),  # resumes with three outputs
        (11, 8, 9, 3),
        (12, 8, 9, 4),
    ],
)
def test_an_admission_promises_the_committed_tokens_and_one_decode_step(
    num_tokens: int, num_prompt_tokens: int, max_tokens: int, pages: int
) -> None:
    assert (
        pages_to_start(
            num_tokens=num_tokens,
            num_prompt_tokens=num_prompt_tokens,
            max_tokens=max_tokens,
            block_size=4,
        )
        == pages
    )


@pytest.mark.parametrize(
    ("has_slot", "num_free_pages", "num_needed_pages", "allowed"),
    [(True, 6, 6, True), (True, 5, 6, False), (False, 6, 6, False), (True, 0, 0, True)],
)
def test_may_start(
    num_free_pages: int, num_needed_pages: int, *, has_slot: bool, allowed: bool
) -> None:
    answer = may_start(
        has_slot=has_slot, num_free_pages=num_free_pages, num_needed_pages=num_needed_pages
    )
    assert answer is allowed


@pytest.mark.parametrize("position", [None, 0, 1, 5])
def test_a_checkpoint_position_within_the_prompt_is_taken(position: int | None) -> None:
    check_checkpoint_position(position, 5)


@pytest.mark.parametrize("position", [-1, 6])
def test_a_checkpoint_position_elsewhere_is_refused(position: int) -> None:
    with pytest.raises(RequestError, match=f"the prompt's 5 tokens, not {position}") as error:
        check_checkpoint_position(position, 5)
    assert error.value.field == "checkpoint_position"
