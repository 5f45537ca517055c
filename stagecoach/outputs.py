"""What a request returns, and how an engine's progress becomes it.

Owns the shape of results (names as in vLLM) and the assembly of one request: its n
completions, their text, and the cut at a stop string. Knows the engine only as `Progress`.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from stagecoach.request import FinishReason, SamplingParams, TokenLogprobs
from stagecoach.schedule.commit import Progress
from stagecoach.schedule.speculation_stats import tokens_per_round
from stagecoach.text.detokenizer import IncrementalDetokenizer, StopMatch
from stagecoach.text.tokenizer import Tokenizer


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One of the n completions of a request, complete up to now."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None  # one a token, where asked for
    # "stop", "length", "abort" or "error"; None while it runs.
    finish_reason: str | None = None
    stop_reason: int | str | None = None  # stop token id or stop string that ended it
    error: str | None = None  # why it ended with "error": the class in errors.py and its text


@dataclass(slots=True, kw_only=True)
class RequestTimings:
    """Seconds since the request was submitted, and counts of its work."""

    first_token_seconds: float | None = None
    total_seconds: float = 0.0
    num_steps: int = 0  # step plans that computed tokens of it
    num_preemptions: int = 0
    num_windows: int = 0  # verify rounds, each with at least one draft
    num_draft_tokens: int = 0  # drafts that they verified
    num_accepted_tokens: int = 0

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens of a verify round on average, from 1 to k + 1; None without any round."""
        return tokens_per_round(self.num_windows, self.num_accepted_tokens)


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """A request, complete up to now."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs | None] | None  # None for the first token
    num_cached_tokens: int  # of the prompt, not computed for the first completion: a prefix hit
    timings: RequestTimings

    @property
    def is_finished(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs)


class Detokenizer(Protocol):
    """Reads the tokens of one completion, and says what text of it is certain."""

    @property
    def stop_match(self) -> StopMatch | None: ...

    def push(self, token_ids: Iterable[int]) -> str: ...

    def finish(self) -> str: ...


class RequestAssembler:
    """Builds a RequestOutput from the progress of the request's completions."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: str | None,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        make_detokenizer: Callable[[], Detokenizer] | None = None,
    ) -> None:
        """Without `make_detokenizer` the text is that of all tokens, up to a stop string."""
        self._submitted = time.perf_counter()

        def plain() -> Detokenizer:
            return IncrementalDetokenizer(
                tokenizer,
                stop=params.stop_strings,
                include_stop_str_in_output=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
                min_tokens=params.min_tokens,
            )

        self._detokenizers = [(make_detokenizer or plain)() for _ in range(params.n)]
        self._latest: dict[int, Progress] = {}
        self.output = RequestOutput(
            prompt=prompt,
            prompt_token_ids=list(prompt_token_ids),
            outputs=[
                CompletionOutput(index=index, logprobs=None if params.logprobs is None else [])
                for index in range(params.n)
            ],
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
            num_cached_tokens=0,
            timings=RequestTimings(),
        )

    def start_clock(self) -> None:
        """The request is submitted now: times count from here."""
        self._submitted = time.perf_counter()

    def absorb(self, index: int, progress: Progress) -> str:
        """Apply the progress of completion `index`; returns the text that became certain.

        When a stop string ended the completion while the engine has not, `finish_reason` is
        set here and the caller aborts the engine's request.
        """
        output = self.output.outputs[index]
        if output.finish_reason is not None:
            return ""
        detokenizer = self._detokenizers[index]
        delta = detokenizer.push(progress.token_ids)
        if progress.finish_reason is not None:
            delta += detokenizer.finish()
        output.text += delta
        self._note_tokens(output, progress, detokenizer)
        self._note_counts(index, progress)
        return delta

    def _note_tokens(
        self, output: CompletionOutput, progress: Progress, detokenizer: Detokenizer
    ) -> None:
        output.token_ids.extend(progress.token_ids)
        if output.logprobs is not None:
            output.logprobs.extend(progress.logprobs)
        if progress.finish_reason is not None:
            output.finish_reason = progress.finish_reason.value
            output.stop_reason = progress.stop_reason
            output.error = progress.error
        match = detokenizer.stop_match
        if match is not None:
            del output.token_ids[match.num_tokens :]
            if output.logprobs is not None:
                del output.logprobs[match.num_tokens :]
            output.finish_reason = FinishReason.STOP.value
            output.stop_reason = match.stop
            output.error = None
        # The n completions share the prompt; the first says what became of it.
        prompt_logprobs = self.output.prompt_logprobs
        if prompt_logprobs is not None and output.index == 0:
            prompt_logprobs.extend(progress.prompt_logprobs)

    def _note_counts(self, index: int, progress: Progress) -> None:
        timings = self.output.timings
        elapsed = time.perf_counter() - self._submitted
        if progress.token_ids and timings.first_token_seconds is None:
            timings.first_token_seconds = elapsed
        timings.total_seconds = elapsed
        self._latest[index] = progress
        latest = self._latest.values()
        timings.num_steps = sum(item.steps for item in latest)
        timings.num_preemptions = sum(item.preemptions for item in latest)
        timings.num_windows = sum(item.num_windows for item in latest)
        timings.num_draft_tokens = sum(item.num_draft_tokens for item in latest)
        timings.num_accepted_tokens = sum(item.num_accepted_tokens for item in latest)
        if index == 0:
            self.output.num_cached_tokens = progress.num_cached_tokens
