"""Bodies with a conversation in them: messages, tools, and how they are to be answered.

Names are OpenAI's. What a conversation is written as is the chat format's business.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from stagecoach.api.protocol import REFUSED_IN_BOTH, Body, SamplingBody
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


class Tool(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    type: Literal["function"]
    function: ToolFunction


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

    refused: ClassVar[dict[str, tuple[Any, ...]]] = REFUSED_IN_BOTH | {
        "functions": ([],),
        "function_call": ("none",),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "web_search_options": (),
        "chat_template": (),
        "documents": ([],),
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
        "echo": (False,),
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
        Literal["auto", "none", "required"] | dict[str, Any] | None,
        Field(description="auto or none; required and a named function are not implemented."),
    ] = None
    parallel_tool_calls: Annotated[
        bool | None, Field(description="false: the answer ends before a second call.")
    ] = None
    reasoning_effort: Annotated[
        str | None, Field(description="How much to think, as the model's chat format has it.")
    ] = None

    def written_fields(self) -> dict[str, str]:
        # The client wrote no prompt: it is made of the messages.
        names = {"prompt": "messages", "logprobs": "top_logprobs"}
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        return names

    def params(self) -> SamplingParams:
        """
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


class TokenizeRequest(Body):
    """The body of /tokenize: a prompt, or a conversation to be rendered."""

    refused: ClassVar[dict[str, tuple[Any, ...]]] = {"add_special_tokens": (True, False)}

    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: Annotated[bool | None, Field(description="Also the text of each token.")] = (
        None
    )

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("prompt", "give it or messages, and not both")
