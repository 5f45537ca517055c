"""A request's completions: which are submitted when, with which seeds, and what an abort ends."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from stagecoach.engine.client import EngineClient, Sink
from stagecoach.errors import EngineDeadError, RequestError
from stagecoach.live_request import Event, LiveRequest
from stagecoach.model.tiny import write_byte_tokenizer
from stagecoach.outputs import RequestAssembler
from stagecoach.request import FinishReason, SamplingParams
from stagecoach.schedule.commit import Progress
from stagecoach.text.tokenizer import Tokenizer, load_tokenizer

PROMPT = [1, 2, 3]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder)
    return load_tokenizer(folder)


class FakeClient:
    """Keeps what it is asked for.

    Attributes:
        submitted: parameters and sink, by id, in the order in which they came.
        aborted: ids.
    """

    def __init__(self) -> None:
        self.submitted: dict[int, tuple[SamplingParams, Sink]] = {}
        self.aborted: list[int] = []
        self._num_ids = 0

    def new_request_id(self) -> int:
        self._num_ids += 1
        return self._num_ids

    def submit(self, params: SamplingParams, sink: Sink, *, request_id: int) -> int:
        self.submitted[request_id] = (params, sink)
        return request_id

    def abort(self, request_ids: Sequence[int]) -> None:
        self.aborted.extend(request_ids)


class LiveRun:
    """A request over a fake client, whose events are absorbed when they come."""

    def __init__(self, tokenizer: Tokenizer, *, has_leader: bool, **fields: Any) -> None:
        params = SamplingParams(**fields)
        self.client = FakeClient()
        self.events: list[Event] = []
        assembler = RequestAssembler(tokenizer, None, PROMPT, params)
        client = cast(EngineClient, self.client)
        self.request = LiveRequest(
            client, assembler, params, self.client.submit, has_leader=has_leader
        )
        self.request.start(self.events.append)

    @property
    def submitted_ids(self) -> list[int]:
        return list(self.client.submitted)

    def params(self, request_id: int) -> SamplingParams:
        return self.client.submitted[request_id][0]

    def news(self, request_id: int, **fields: Any) -> None:
        """Progress of a completion arrives and is absorbed."""
        self.client.submitted[request_id][1](Progress(request_id=request_id, **fields))
        self.request.absorb(self.events.pop())


def test_without_a_leader_all_are_submitted_at_once(tokenizer: Tokenizer) -> None:
    run = LiveRun(tokenizer, has_leader=False, n=3)
    assert run.submitted_ids == [1, 2, 3]


def test_followers_wait_for_the_leader_s_first_token(tokenizer: Tokenizer) -> None:
    run = LiveRun(tokenizer, has_leader=True, n=3, prompt_logprobs=0)
    assert run.submitted_ids == [1]
    run.news(1)
    assert run.submitted_ids == [1], "logprobs of a prompt come before it is computed"
    run.news(1, token_ids=(65,))
    assert run.submitted_ids == [1, 2, 3]
    run.news(1, token_ids=(66,))
    assert run.submitted_ids == [1, 2, 3]


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.LENGTH])
def test_followers_start_when_the_leader_ends_whatever_its_end(
    tokenizer: Tokenizer, reason: FinishReason
) -> None:
    run = LiveRun(tokenizer, has_leader=True, n=2)
    run.news(1, finish_reason=reason)
    assert run.submitted_ids == [1, 2]
    run.news(2, token_ids=(65,), finish_reason=FinishReason.LENGTH)
    assert run.request.output.is_finished


def test_a_stop_string_of_the_leader_starts_the_followers(tokenizer: Tokenizer) -> None:
    run = LiveRun(tokenizer, has_leader=True, n=2, stop=("A",))
    run.news(1, token_ids=(65,))
    assert run.client.aborted == [1] and run.submitted_ids == [1, 2]


def test_a_request_that_reads_no_cache_has_no_leader(tokenizer: Tokenizer) -> None:
    run = LiveRun(tokenizer, has_leader=True, n=3, skip_reading_prefix_cache=True)
    assert run.submitted_ids == [1, 2, 3]


def test_each_completion_has_a_seed_of_its_own_and_only_the_first_tells_of_the_prompt(
    tokenizer: Tokenizer,
) -> None:
    run = LiveRun(tokenizer, has_leader=True, n=3, seed=7, prompt_logprobs=2, logprobs=1)
    run.news(1, token_ids=(65,))
    assert [run.params(number).seed for number in (1, 2, 3)] == [7, 8, 9]
    assert [run.params(number).prompt_logprobs for number in (1, 2, 3)] == [2, None, None]
    assert {run.params(number).logprobs for number in (1, 2, 3)} == {1}
    assert {run.params(number).n for number in (1, 2, 3)} == {1}


def test_ids_are_taken_at_the_start_so_that_seeds_do_not_depend_on_time(
    tokenizer: Tokenizer,
) -> None:
    run = LiveRun(tokenizer, has_leader=True, n=2)
    assert run.client.new_request_id() == 3, "two were taken, one of them for later"
    run.news(1, token_ids=(65,))
    assert run.submitted_ids == [1, 2]


def test_an_abort_before_the_first_token_submits_nobody_later(tokenizer: Tokenizer) -> None:
    run = LiveRun(tokenizer, has_leader=True, n=3)
    sink = run.client.submitted[1][1]
    run.request.abort()
    sink(Progress(request_id=1, token_ids=(65,)))
    run.request.absorb(run.events.pop())
    assert run.submitted_ids == [1]


def test_an_abort_spares_what_has_ended(tokenizer: Tokenizer) -> None:
    run = LiveRun(tokenizer, has_leader=False, n=3)
    run.news(2, token_ids=(65,), finish_reason=FinishReason.LENGTH)
    run.request.abort()
    run.request.abort()
    assert run.client.aborted == [1, 3]


@pytest.mark.parametrize("error", [EngineDeadError("gone"), RequestError("prompt", "too long")])
def test_an_error_is_raised_where_its_event_is_absorbed(
    tokenizer: Tokenizer, error: Exception
) -> None:
    run = LiveRun(tokenizer, has_leader=True, n=2)
    run.client.submitted[1][1](cast(Any, error))
    with pytest.raises(type(error)) as caught:
        run.request.absorb(run.events.pop())
    assert caught.value is error
    run.request.abort()
    assert run.submitted_ids == [1], "followers of a refused leader are not tried"
