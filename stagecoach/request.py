"""What a caller asks for, and the one mutable record of a request in flight.

Owns the sampling parameters, their checks, and the request's progress as numbers.
Only `schedule/` writes a Request. Knows no tensor and no text.

    token index   0 ........ num_computed ........ num_tokens-1
                  |computed  | not yet forwarded | <- newest token: the anchor once the
                                                      prompt is done; drafts may follow it
"""

import math
from array import array
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import msgspec

from stagecoach.errors import PromptTooLongError, RequestError

MAX_LOGPROBS = 20
MAX_SEED = 2**63 - 1
# What looks for them is built before the first token, beside everything that streams.
MAX_STOP_LENGTH = 4096


class FinishReason(Enum):
    """Why a request ended, as OpenAI spells it where it has a word."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"  # what it computed is not finite


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True):
    """What the text must obey, from its first token to its end; names as in vLLM, one of them.

    A grammar speaks of the whole output, special tokens included, so that nobody keeps a state
    of where in the answer it begins to count.
    """

    json: dict[str, Any] | str | None = None  # a JSON Schema, or its text
    json_object: bool | None = None  # any JSON object
    regex: str | None = None  # of Rust's `regex`, matching all of the text
    choice: tuple[str, ...] | None = None  # one of these texts
    grammar: str | None = None  # in llguidance's form of Lark
    structural_tag: dict[str, Any] | str | None = None  # as OpenAI's response_format has it

    def check(self) -> None:
        """Refuse what names no grammar or several, or a field of another type.

        Raises:
            RequestError: field "structured_outputs".
        """
        given = [name for name in _GRAMMAR_TYPES if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise RequestError(
                "structured_outputs",
                f"must have exactly one of {', '.join(_GRAMMAR_TYPES)}, not "
                f"{' and '.join(given) or 'none'}",
            )
        [name] = given
        value = getattr(self, name)
        if not isinstance(value, _GRAMMAR_TYPES[name]):
            raise RequestError("structured_outputs", f"{name}: not of its type: {value!r:.80}")
        if self.choice is not None and not (
            self.choice and all(isinstance(text, str) and text for text in self.choice)
        ):
            raise RequestError(
                "structured_outputs",
                f"choice: needs texts that are not empty, not {self.choice!r:.80}",
            )


_GRAMMAR_TYPES: dict[str, tuple[type, ...]] = {
    "json": (dict, str),
    "json_object": (bool,),
    "regex": (str,),
    "choice": (tuple, list),
    "grammar": (str,),
    "structural_tag": (dict, str),
}


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose tokens and when to stop; names and defaults as in vLLM.

    `seed` None draws one from the engine's seed and the order of arrival. With n > 1,
    completion i samples with seed + i.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: all tokens
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    max_tokens: int | None = 16  # None: up to the model's length
    min_tokens: int = 0
    stop: tuple[str, ...] | str | None = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None  # that many alternatives beside the sampled token
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputsParams | None = None
    skip_reading_prefix_cache: bool = False  # compute the whole prompt; it is cached as ever

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop`, which may be one string, as several."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def has_penalties(self) -> bool:
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )

    def check(self, *, vocab_size: int, max_model_len: int) -> None:
        """Refuse what cannot be served.

        Raises:
            RequestError: names the first field that is wrong and its bounds.
        """
        for name, low, high in (
            ("temperature", 0.0, 100.0),
            ("min_p", 0.0, 1.0),
            ("presence_penalty", -2.0, 2.0),
            ("frequency_penalty", -2.0, 2.0),
        ):
            _check_range(name, getattr(self, name), low, high)
        _check_range("top_p", self.top_p, 0.0, 1.0, low_is_open=True)
        _check_range("repetition_penalty", self.repetition_penalty, 0.0, 100.0, low_is_open=True)
        _check_count("n", self.n, 1, 128)
        _check_count("top_k", self.top_k, -1, None)
        if self.max_tokens is not None:
            _check_count("max_tokens", self.max_tokens, 1, max_model_len)
        _check_count("min_tokens", self.min_tokens, 0, self.max_tokens or max_model_len)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name), 0, MAX_LOGPROBS)
        if self.seed is not None:
            _check_count("seed", self.seed, 0, MAX_SEED)
        for token_id in self.stop_token_ids:
            _check_token_id("stop_token_ids", token_id, vocab_size)
        for token_id, bias in self.logit_bias.items():
            _check_token_id("logit_bias", token_id, vocab_size)
            _check_range("logit_bias", bias, -100.0, 100.0)
        self._check_stop()
        if self.structured_outputs is not None:
            self._check_structured_outputs(self.structured_outputs)

    def _check_stop(self) -> None:
        if any(not text for text in self.stop_strings):
            raise RequestError("stop", "a stop string must not be empty")
        length = sum(map(len, self.stop_strings))
        if length > MAX_STOP_LENGTH:
            raise RequestError(
                "stop",
                f"stop strings of {length} characters; all together at most {MAX_STOP_LENGTH}",
            )

    def _check_structured_outputs(self, wanted: StructuredOutputsParams) -> None:
        wanted.check()
        # When the grammar's text is complete, nothing but an end may follow.
        if self.ignore_eos:
            raise RequestError("structured_outputs", "cannot be obeyed with ignore_eos=true")
        if self.min_tokens:
            raise RequestError(
                "structured_outputs", f"cannot be obeyed with min_tokens={self.min_tokens}"
            )


def check_prompt(token_ids: list[int] | tuple[int, ...], *, vocab_size: int, limit: int) -> None:
    """Refuse a prompt that is empty, too long or holds an unknown id.

    Args:
        limit: the most prompt tokens that leave room for one output token.

    Raises:
        RequestError: field "prompt".
    """
    if not token_ids:
        raise RequestError("prompt", "must hold at least one token")
    if len(token_ids) > limit:
        # Agents know these words of OpenAI's and Anthropic's servers, and shorten the prompt.
        raise PromptTooLongError(
            "prompt",
            f"prompt is too long: {len(token_ids)} tokens > {limit} maximum; this model's maximum "
            f"context length is {limit + 1} tokens, and one is for the answer",
        )
    low, high = min(token_ids), max(token_ids)
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise RequestError("prompt", f"token id {bad} is not in 0..{vocab_size - 1}")


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position, from the unprocessed logits."""

    token_id: int
    logprob: float
    rank: int  # 1 is the most likely token
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class Constraint(Protocol):
    """What a grammar allows behind the tokens of one request that are committed.

    Nothing is kept of tokens that are not: what was asked of drafts leaves no trace.
    """

    def num_useful_drafts(self, draft_token_ids: tuple[int, ...]) -> int:
        """How many drafts a window needs: up to and with the first that is not allowed.

        The first one that is not stays: where drafts are judged by probabilities, taking it away
        would change what the token in its place is drawn from. None at all, whatever they are,
        where a grammar cannot follow drafts.
        """

    def fill_masks(self, draft_token_ids: tuple[int, ...], masks: memoryview) -> None:
        """Which tokens may stand in each row of a window: bit t of a row is token t.

        Args:
            masks: int32 [1 + drafts, ceil(V / 32)], little-endian, contiguous. Rows behind a
                draft that is not allowed, or that ends the text, get all tokens: what they
                sample never counts.
        """

    def advance(self, token_ids: tuple[int, ...]) -> None:
        """Commit tokens."""

    @property
    def is_finished(self) -> bool:
        """The text is complete and no token may follow it: not an end token either."""

    @property
    def error(self) -> str | None:
        """Why it cannot go on: a limit of its size, or a token that does not obey.

        No method raises for that. The request ends with it, without the row that is committed,
        and nothing that was asked since then counts.
        """


@dataclass(slots=True, eq=False)
class Request:
    """One completion in the engine. Written by `schedule/` only."""

    request_id: int
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    max_tokens: int  # resolved: never beyond the model's length
    cache_salt: str | None = None
    # Prompt tokens after which a checkpoint is worth most; None: all but the last.
    checkpoint_position: int | None = None
    constraint: Constraint | None = None  # a grammar that its output obeys
    is_shadow: bool = False  # the engine's own, to verify a prefix hit; reads and leaves nothing
    is_filed: bool = True  # what it computes may be kept for requests to come
    arrival_index: int = 0  # its place in the order of arrival; set when it is queued

    epoch: int = 0  # grows at each preemption; results of an older one are dropped
    num_computed: int = 0  # tokens forwarded, counting plans in flight
    num_replay: int = 0  # the last of them, whose state is only in the slot's record
    # What the drafter proposes to follow the newest token. Goes with the admission: a preempted
    # request is sampled anew from its prompt and gets new ones.
    draft_token_ids: tuple[int, ...] = ()
    confidences: tuple[float, ...] = ()  # one a draft, or none at all
    output_token_ids: list[int] = field(default_factory=list)
    output_logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    # int32, so that a decode step's page table is one copy of its bytes.
    page_ids: "array[int]" = field(default_factory=lambda: array("i"))
    slot: int | None = None
    read_slot: int = 0  # of the state after num_computed tokens: its own, a checkpoint, or zeros
    sampling_row: int | None = None
    num_plans_in_flight: int = 0
    num_samples_in_flight: int = 0  # two where the newest window is chained to the other
    num_preemptions: int = 0
    num_steps: int = 0
    num_windows: int = 0  # rows of windows that verified at least one draft
    num_draft_tokens: int = 0  # drafts that they verified
    num_accepted_tokens: int = 0  # of them, before a row was cut at a stop
    num_cached_tokens: int = 0  # prompt tokens that its first admission found computed
    first_planned: float | None = None  # when that was, in the clock of who plans
    finish_reason: FinishReason | None = None
    error: str | None = None  # why the finish reason is ERROR; opens with a name of errors.py

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Committed tokens: the prompt and the accepted output (N of the design)."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def is_sample_in_flight(self) -> bool:
        return self.num_samples_in_flight > 0

    @property
    def num_left(self) -> int:
        """Output tokens that it may still get."""
        return self.max_tokens - len(self.output_token_ids)

    def token_ids(self, start: int, end: int) -> tuple[int, ...]:
        """Committed tokens [start, end)."""
        num_prompt = len(self.prompt_token_ids)
        if end <= num_prompt:
            return self.prompt_token_ids[start:end]
        outputs = self.output_token_ids[max(0, start - num_prompt) : end - num_prompt]
        return (*self.prompt_token_ids[start:], *outputs)


def _check_range(
    name: str, value: float, low: float, high: float, *, low_is_open: bool = False
) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_inside = is_number and math.isfinite(value) and low <= value <= high
    if not is_inside or (low_is_open and value == low):
        bracket = "(" if low_is_open else "["
        raise RequestError(name, f"must be a number in {bracket}{low:g}, {high:g}], not {value!r}")


def _check_count(name: str, value: int, low: int, high: int | None) -> None:
    is_count = isinstance(value, int) and not isinstance(value, bool)
    if not is_count or value < low or (high is not None and value > high):
        upper = "" if high is None else f" and at most {high}"
        raise RequestError(name, f"must be an integer of at least {low}{upper}, not {value!r}")


def _check_token_id(name: str, token_id: int, vocab_size: int) -> None:
    if not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
        raise RequestError(name, f"token id {token_id!r} is not in 0..{vocab_size - 1}")
