"""The body of /v1/completions, and what it means to the engine."""

from typing import Annotated

import msgspec
from pydantic import Field

from stagecoach.api.protocol import REFUSED_IN_BOTH, Refused, SamplingBody, TokenIds
from stagecoach.errors import RequestError
from stagecoach.request import SamplingParams


class CompletionRequest(SamplingBody):
    """The body of /v1/completions."""

    refused = REFUSED_IN_BOTH | {"suffix": Refused(("",))}

    prompt: Annotated[
        str | TokenIds | list[str] | list[TokenIds],
        Field(description="A text, token ids, or a list of either: one choice each, times n."),
    ]
    max_tokens: Annotated[int | None, Field(description="Most tokens; default 16.")] = None
    logprobs: Annotated[
        int | None, Field(description="Log-probabilities, and those of that many alternatives.")
    ] = None
    echo: Annotated[
        bool | None, Field(description="The text begins with the prompt; logprobs too.")
    ] = None
    best_of: Annotated[int | None, Field(description="Only the value of n.")] = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """One entry a prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise RequestError("prompt", "must hold at least one token")
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    @property
    def is_prompt_only(self) -> bool:
        """Nothing follows the prompt: it is shown, and its log-probabilities."""
        return self.max_tokens == 0

    def written_fields(self) -> dict[str, str]:
        names = {} if self.structured_outputs else {"structured_outputs": "response_format"}
        if self.echo and self.prompt_logprobs is None:
            names["prompt_logprobs"] = "logprobs"
        return names

    def params(self) -> SamplingParams:
        """
        Raises:
            RequestError: a field that is not implemented or out of its range.
        """
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise RequestError("best_of", "not implemented beyond the value of n")
        if self.is_prompt_only and not self.echo:
            raise RequestError("max_tokens", "must be at least 1, or 0 with echo")
        prompt_logprobs = self.prompt_logprobs
        if self.echo and self.logprobs is not None:
            prompt_logprobs = max(self.logprobs, prompt_logprobs or 0)
        params = self.sampling_params(
            # The engine computes the prompt by asking for a token behind it.
            max_tokens=16 if self.max_tokens is None else self.max_tokens or 1,
            logprobs=self.logprobs,
            prompt_logprobs=prompt_logprobs,
        )
        return msgspec.structs.replace(params, structured_outputs=self.content_params())
