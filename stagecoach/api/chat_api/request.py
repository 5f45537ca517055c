"""Bodies with a conversation in them: messages, tools, and how they are to be answered.

Names are OpenAI's. What a conversation is written as is the chat format's business.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from stagecoach.api.protocol import REFUSED_IN_BOTH, Body, Refused, SamplingBody
from stagecoach.errors import RequestError
from stagecoach.request import SamplingParams


class ContentPart(BaseModel):
    """A piece of a message's content; only those of type text are implemented."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    type: str
    text: str | None = None


class CalledFunction(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    name: str
    arguments: Annotated[str | dict[str, Any] | None, Field(description="JSON.")] = None


class CallOfTool(BaseModel):
    """A call in an earlier answer of the assistant."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class ChatMessage(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[CallOfTool] | None = None
    tool_call_id: Annotated[
        str | None, Field(description="Of a tool's result: the call it answers.")
    ] = None
    reasoning_content: str | None = None
    reasoning: Annotated[str | None, Field(description="The same by another name.")] = None


class ToolFunction(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, Field(description="A JSON Schema.")] = None
    strict: Annotated[
        bool | None, Field(description="true: arguments obey the schema, also when none must come.")
    ] = None


class Tool(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    type: Literal["function"]
    function: ToolFunction


class ChosenFunction(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    name: str


class NamedToolChoice(BaseModel):
    """The one function that must be called."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    type: Literal["function"]
    function: ChosenFunction


Messages = Annotated[list[ChatMessage], Field(min_length=1, description="The conversation.")]
Tools = Annotated[list[Tool], Field(description="Functions that the model may call.")]


class ChatTemplateBody(Body):
    """What a conversation is rendered from."""

    messages: Messages
    tools: Tools | None = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None,
        Field(description="Options of the model's chat format, as `thinking`: false."),
    ] = None


class ChatCompletionRequest(SamplingBody, ChatTemplateBody):
    """The body of /v1/chat/completions."""

    refused = REFUSED_IN_BOTH | {
        "functions": Refused(([],), "is now tools"),
        "function_call": Refused(("none",), "is now tool_choice"),
        "modalities": Refused((["text"],)),
        "audio": Refused(),
        "prediction": Refused(),
        "web_search_options": Refused(),
        "chat_template": Refused(),
        "documents": Refused(([],)),
        "add_generation_prompt": Refused((True,)),
        "continue_final_message": Refused((False,)),
        "echo": Refused((False,)),
    }

    max_completion_tokens: Annotated[
        int | None, Field(description="Most tokens, reasoning included; default: what fits.")
    ] = None
    max_tokens: Annotated[
        int | None, Field(description="The older name of max_completion_tokens.")
    ] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[
        int | None, Field(description="That many alternatives a token; needs logprobs.")
    ] = None
    tool_choice: Annotated[
        Literal["auto", "none", "required"] | NamedToolChoice | None,
        Field(description="Whether tools may or must be called, or the one that must be."),
    ] = None
    parallel_tool_calls: Annotated[
        bool | None, Field(description="false: the answer ends before a second call.")
    ] = None
    reasoning_effort: Annotated[
        str | None, Field(description="How much to think, as the model's chat format has it.")
    ] = None

    @property
    def must_call(self) -> bool:
        """Whether the answer is a call of a tool, or several."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedToolChoice)

    def check(self) -> None:
        super().check()
        names = {tool.function.name for tool in self.tools or ()}
        if self.must_call and not names:
            raise RequestError("tool_choice", "there are no tools that could be called")
        choice = self.tool_choice
        if isinstance(choice, NamedToolChoice) and choice.function.name not in names:
            raise RequestError(
                "tool_choice", f"there is no tool of the name {choice.function.name[:100]!r}"
            )

    def written_fields(self) -> dict[str, str]:
        # The client wrote no prompt: it is made of the messages.
        names = {"prompt": "messages", "logprobs": "top_logprobs"}
        names["structured_outputs"] = self._constrained_by
        if self.structured_outputs is not None:
            names["response_format"] = "structured_outputs"
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        return names

    @property
    def _constrained_by(self) -> str:
        """The field for whose sake there is a grammar."""
        if self.structured_outputs is not None:
            return "structured_outputs"
        if self.response_format is not None and self.response_format.type != "text":
            return "response_format"
        return "tool_choice" if self.must_call else "tools"

    def params(self) -> SamplingParams:
        """Without a grammar, which is of the prompt's making, too.

        Raises:
            RequestError: a field that is not implemented, or two that contradict each other.
        """
        max_tokens = self.max_completion_tokens
        if max_tokens is None:
            max_tokens = self.max_tokens
        elif self.max_tokens not in (None, max_tokens):
            raise RequestError("max_tokens", "differs from max_completion_tokens")
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs", "only with logprobs true")
        return self.sampling_params(
            max_tokens=max_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            prompt_logprobs=self.prompt_logprobs,
        )
