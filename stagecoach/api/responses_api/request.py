"""The body of /v1/responses, and the chat request that it is.

Owns which of OpenAI's fields mean what, and which are refused because nothing is kept here from
one request to the next. Knows no prompt and no engine.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from stagecoach.api.chat_api.request import ChatCompletionRequest
from stagecoach.api.protocol import Refused, SamplingBody
from stagecoach.api.responses_api.input_items import InputItem, messages_of
from stagecoach.errors import RequestError

_FORM = ConfigDict(strict=True, extra="allow", frozen=True)

LOGPROBS = "message.output_text.logprobs"
# The others speak of tools that nobody has here, or of reasoning, which is told openly.
_INCLUDES = (
    LOGPROBS,
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
_NOT_KEPT = "no response is kept here: send the whole conversation as input, with store false"

_REFUSED = {
    "previous_response_id": Refused(reason=_NOT_KEPT),
    "conversation": Refused(reason=_NOT_KEPT),
    "background": Refused((False,), _NOT_KEPT),
    "prompt": Refused(reason="no prompt templates are kept here: send instructions and input"),
    "truncation": Refused(("disabled",), "not implemented: input that is too long is refused"),
    "context_management": Refused(([],)),
    "moderation": Refused(),
    "n": Refused((1,), "a response has one answer"),
    "prompt_logprobs": Refused(reason="a response has no place for them"),
    "return_token_ids": Refused((False,), "a response has no place for them"),
    "logprobs": Refused((False,), f'ask for them with "include": ["{LOGPROBS}"]'),
    "response_format": Refused(reason="is text.format here"),
    "reasoning_effort": Refused(reason="is reasoning.effort here"),
    "max_tokens": Refused(reason="is max_output_tokens here"),
    "max_completion_tokens": Refused(reason="is max_output_tokens here"),
}

# What fields of a chat request were called here.
_NAMES = {
    "messages": "input",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
}


class ResponseTool(BaseModel):
    """A function that the model may call; no other type of tool is implemented."""

    model_config = _FORM

    type: str
    name: Annotated[str | None, Field(min_length=1)] = None
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, Field(description="A JSON Schema.")] = None
    strict: bool | None = None

    def chat_tool(self, place: str) -> dict[str, Any]:
        """The same as /v1/chat/completions has it, without fields that are null.

        Raises:
            RequestError: it is no function, or has no name.
        """
        if self.type != "function":
            raise RequestError(
                "tools", f"{place}: a tool of type {self.type[:60]!r} is not implemented"
            )
        if self.name is None:
            raise RequestError("tools", f"{place} has no name")
        fields = {"name", "description", "parameters", "strict"}
        return {"type": "function", "function": self.model_dump(include=fields, exclude_none=True)}


class TextFormat(BaseModel):
    """The form of the answer; a schema has its fields beside the type."""

    model_config = _FORM

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str | None, Field(min_length=1)] = None
    description: str | None = None
    schema_: Annotated[
        dict[str, Any] | None, Field(alias="schema", description="A JSON Schema.")
    ] = None
    strict: bool | None = None


class ResponseText(BaseModel):
    """How the text of the answer is to be."""

    model_config = _FORM

    format: TextFormat | None = None
    verbosity: str | None = None


class ResponseReasoning(BaseModel):
    """How much to think."""

    model_config = _FORM

    effort: Annotated[
        str | None, Field(description="As the model's chat format has it; none: not at all.")
    ] = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesRequest(SamplingBody):
    """The body of /v1/responses; sampling fields beyond OpenAI's are those of chats."""

    refused = _REFUSED

    input: Annotated[
        str | list[InputItem],
        Field(description="What the user says, or the items of a conversation."),
    ]
    instructions: Annotated[str | None, Field(description="What the system says first.")] = None
    tools: list[ResponseTool] | None = None
    tool_choice: Annotated[
        Literal["auto", "none", "required"] | dict[str, Any] | None,
        Field(description="Whether tools may or must be called, or the one that must be."),
    ] = None
    parallel_tool_calls: Annotated[
        bool | None, Field(description="false: the answer ends before a second call.")
    ] = None
    text: ResponseText | None = None
    reasoning: ResponseReasoning | None = None
    max_output_tokens: Annotated[
        int | None, Field(description="Most tokens, reasoning included; default: what fits.")
    ] = None
    top_logprobs: Annotated[
        int | None, Field(description=f"That many alternatives a token; include {LOGPROBS}.")
    ] = None
    include: list[str] | None = None
    metadata: Annotated[dict[str, str] | None, Field(description="Comes back.")] = None
    store: Annotated[bool | None, Field(description="Nothing is stored.")] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Field(description="Options of the model's chat format.")
    ] = None
    # They come back, and have no effect.
    max_tool_calls: int | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    @property
    def text_format(self) -> dict[str, Any]:
        """`text.format` as it was asked for, or its default."""
        form = None if self.text is None else self.text.format
        if form is None:
            return {"type": "text"}
        return form.model_dump(by_alias=True, exclude_none=True)

    def check(self) -> None:
        super().check()
        for name in self.include or ():
            if name not in _INCLUDES:
                raise RequestError("include", f"{name[:100]!r} is not implemented")
        if self.top_logprobs and not self.wants_logprobs:
            raise RequestError("top_logprobs", f'only with "include": ["{LOGPROBS}"]')
        if self.text is not None and self.text.verbosity not in (None, "medium"):
            raise RequestError("text.verbosity", "not implemented")
        if self.reasoning is not None:
            for name in ("summary", "generate_summary"):
                if getattr(self.reasoning, name) not in (None, "auto"):
                    raise RequestError(
                        f"reasoning.{name}", "not implemented: reasoning is told as it is"
                    )

    def as_written(self, error: RequestError) -> RequestError:
        """`error` speaks of a field of the chat request."""
        field, dot, rest = error.field.partition(".")
        return error.about(_NAMES.get(field, field) + dot + rest)

    def chat_request(self) -> ChatCompletionRequest:
        """The same asked of /v1/chat/completions.

        Raises:
            RequestError: something that cannot be asked there.
        """
        fields = {name: getattr(self, name) for name in SamplingBody.model_fields}
        fields |= {
            # Matters of this protocol, or told in its own way.
            "stream": None,
            "stream_options": None,
            "messages": messages_of(self.input, self.instructions),
            "tools": [
                tool.chat_tool(f"tool {number}") for number, tool in enumerate(self.tools or ())
            ],
            "tool_choice": self._chat_tool_choice(),
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": self._response_format(),
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            "max_completion_tokens": self.max_output_tokens,
            "logprobs": self.wants_logprobs or None,
            "top_logprobs": (self.top_logprobs or 0) if self.wants_logprobs else None,
            "chat_template_kwargs": self.chat_template_kwargs,
        }
        request = ChatCompletionRequest.model_validate(
            {name: value for name, value in fields.items() if value is not None}
        )
        request.check()
        return request

    def _chat_tool_choice(self) -> str | dict[str, Any] | None:
        choice = self.tool_choice
        if choice is None or isinstance(choice, str):
            return choice
        kind, name = choice.get("type"), choice.get("name")
        if kind != "function":
            raise RequestError("tool_choice", f"type {str(kind)[:60]!r} is not implemented")
        if not isinstance(name, str):
            raise RequestError("tool_choice", "a function needs its name")
        return {"type": "function", "function": {"name": name}}

    def _response_format(self) -> dict[str, Any] | None:
        form = None if self.text is None else self.text.format
        if form is None or form.type != "json_schema":
            return None if form is None else {"type": form.type}
        for name, value in (("name", form.name), ("schema", form.schema_)):
            if value is None:
                raise RequestError(f"text.format.{name}", "field required")
        schema = {"name": form.name, "schema": form.schema_, "strict": form.strict}
        if form.description is not None:
            schema["description"] = form.description
        return {"type": "json_schema", "json_schema": schema}
