"""What all request bodies share: how they are read, and the fields of sampling.

Names are OpenAI's, and vLLM's where OpenAI has none. A field that is null counts as absent. A
field that is not here is accepted and has no effect; the log names it once.
"""

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, NamedTuple, Self

from msgspec import UNSET, UnsetType
from pydantic import BaseModel, ConfigDict, Field

from stagecoach.api.answers import Usage
from stagecoach.api.structured_output import (
    ResponseFormat,
    StructuredOutputs,
    params_of,
)
from stagecoach.errors import RequestError
from stagecoach.observe.log import get_logger
from stagecoach.request import SamplingParams, StructuredOutputsParams

_log = get_logger(__name__)

TokenIds = Annotated[list[int], Field(description="Token ids.")]

# Names of unknown fields that the log has told; clients could send ever new ones.
_MAX_TOLD = 1000
_told: set[str] = set()


class Refused(NamedTuple):
    """A field with a meaning that cannot be honoured; null and these values are harmless."""

    harmless: tuple[Any, ...] = ()
    reason: str = "not implemented"


class Body(BaseModel):
    """Base of all request bodies: JSON types are taken as they are, none is converted."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, frozen=True)

    # Known to OpenAI or vLLM, but not implemented.
    refused: ClassVar[dict[str, Refused]] = {}

    model: Annotated[str | None, Field(description="One of /v1/models; absent: the first.")] = None

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """From JSON text.

        Raises:
            pydantic.ValidationError: no JSON, or a field of the wrong type.
            RequestError: a field that is known and not implemented.
        """
        request = cls.model_validate_json(body)
        for name, (harmless, reason) in cls.refused.items():
            value = getattr(request, name, None)
            if value is not None and value not in harmless:
                raise RequestError(name, reason)
        request.check()
        unknown = request.model_extra or {}
        for name in unknown.keys() - cls.refused.keys() - _told:
            if len(_told) < _MAX_TOLD:
                _told.add(name)
                _log.warning("the request field %.80r is unknown and has no effect", name)
        return request

    def check(self) -> None:
        """Refuse fields that contradict each other.

        Raises:
            RequestError: names one of them.
        """


class StreamOptions(BaseModel):
    """What else a stream carries."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    include_usage: Annotated[
        bool, Field(description="One more event before the end, with the usage and no choice.")
    ] = False
    continuous_usage_stats: Annotated[
        bool, Field(description="The usage so far in every event; needs include_usage.")
    ] = False


class SamplingBody(Body):
    """The fields that /v1/chat/completions and /v1/completions share."""

    n: Annotated[int | None, Field(description="Completions of each prompt; default 1.")] = None
    temperature: Annotated[
        float | None, Field(description="Randomness; 0 takes the likeliest token. Default 1.")
    ] = None
    top_p: Annotated[
        float | None, Field(description="Choose among the likeliest tokens with this mass.")
    ] = None
    top_k: Annotated[
        int | None, Field(description="Choose among that many tokens; 0 or -1: all.")
    ] = None
    min_p: Annotated[
        float | None, Field(description="Drop tokens below this share of the likeliest.")
    ] = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[
        dict[str, float] | None, Field(description="Added to logits, by token id.")
    ] = None
    seed: Annotated[
        int | None, Field(description="Same seed, same tokens; completion i has seed + i.")
    ] = None
    min_tokens: Annotated[
        int | None, Field(description="Tokens before anything but the length ends it.")
    ] = None
    stop: Annotated[str | list[str] | None, Field(description="Texts that end it.")] = None
    stop_token_ids: Annotated[TokenIds | None, Field(description="Tokens that end it.")] = None
    ignore_eos: Annotated[bool | None, Field(description="Go on after an end token.")] = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Annotated[
        int | None, Field(description="That many alternatives for each token of the prompt.")
    ] = None
    skip_reading_prefix_cache: bool | None = None
    stream: Annotated[bool | None, Field(description="Send events as tokens come.")] = None
    stream_options: StreamOptions | None = None
    response_format: Annotated[
        ResponseFormat | None, Field(description="What the answer must obey.")
    ] = None
    structured_outputs: Annotated[
        StructuredOutputs | None, Field(description="The same, as vLLM has it.")
    ] = None
    cache_salt: Annotated[
        str | None, Field(description="Only requests with the same salt share cached prefixes.")
    ] = None
    return_token_ids: Annotated[
        bool | None, Field(description="Each choice has the ids of its tokens.")
    ] = None
    user: Annotated[str | None, Field(description="Has no effect.")] = None

    def check(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options", "only with stream true")
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs", "not in a stream")

    def content_params(self) -> StructuredOutputsParams | None:
        """What the text of the answer must obey.

        Raises:
            RequestError: names the field that is wrong.
        """
        return params_of(self.response_format, self.structured_outputs)

    def as_written(self, error: RequestError) -> RequestError:
        """The same about the field that the client wrote, where the engine's has another name."""
        return error.about(self.written_fields().get(error.field, error.field))

    def written_fields(self) -> dict[str, str]:
        """Fields of the engine that come from a field of another name."""
        return {}

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def running_usage(self, usage: Callable[[], Usage]) -> Usage | UnsetType | None:
        """What an event with a choice in it says of the usage."""
        if not self.includes_usage:
            return UNSET
        assert self.stream_options is not None, "includes_usage"
        return usage() if self.stream_options.continuous_usage_stats else None

    def sampling_params(
        self, *, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None
    ) -> SamplingParams:
        """Of the engine; what is absent has its default there.

        Raises:
            RequestError: no token id in logit_bias.
        """
        given = {
            name: value for name in _PLAIN_FIELDS if (value := getattr(self, name)) is not None
        }
        return SamplingParams(
            **given,
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            logit_bias=_by_token_id(self.logit_bias or {}),
            stop=self.stop if isinstance(self.stop, str) else tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
        )


# Fields that mean to the engine what they mean here.
_PLAIN_FIELDS = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "min_tokens",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "skip_reading_prefix_cache",
)

REFUSED_IN_BOTH = {
    "structural_tag": Refused(reason="is now structured_outputs.structural_tag"),
    "guided_json": Refused(reason="is now structured_outputs.json"),
    "guided_regex": Refused(reason="is now structured_outputs.regex"),
    "guided_choice": Refused(reason="is now structured_outputs.choice"),
    "guided_grammar": Refused(reason="is now structured_outputs.grammar"),
    "use_beam_search": Refused((False,)),
    "prompt_embeds": Refused(),
    "kv_transfer_params": Refused(),
    "truncate_prompt_tokens": Refused(),
}


def _by_token_id(bias: dict[str, float]) -> dict[int, float]:
    by_token_id = {}
    for text, value in bias.items():
        if not (text.isascii() and text.isdecimal() and len(text) < 10):
            raise RequestError("logit_bias", f"{text[:40]!r} is no token id")
        by_token_id[int(text)] = value
    return by_token_id
