"""What /v1/completions answers with, whole and streamed.

Names are OpenAI's. UNSET fields are left out, None is null. Knows nothing of how they are filled.
"""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from stagecoach.api.answers import FinishReason, Usage
from stagecoach.api.logprobs import CompletionLogprobs, PromptLogprobs


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """In a stream, `text` and `logprobs` are what is new and `finish_reason` may be null."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of /v1/completions, and one event of it when streamed."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
