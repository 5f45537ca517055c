"""The bodies of /v1/messages and of its count of tokens, as Anthropic has them.

Owns which fields there are, and which are refused. The messages among them are `input_blocks`;
what all of it means to a conversation is in `translation`.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from stagecoach.api.error_body import HttpError
from stagecoach.api.error_forms import THREAD_CODE
from stagecoach.api.messages_api.input_blocks import FORM, AnyMessage, Anything, Texts, unknown
from stagecoach.api.protocol import Body, Refused
from stagecoach.errors import RequestError


class CustomTool(BaseModel):
    """A tool that the client runs."""

    model_config = FORM

    type: Literal["custom"] | None = None
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    input_schema: Annotated[dict[str, Any], Field(description="A JSON Schema of an object.")]
    strict: Annotated[bool | None, Field(description="true: inputs obey the schema.")] = None


def _tool_tag(item: Any) -> str:
    is_of_anthropic = isinstance(item, dict) and item.get("type") not in (None, "custom")
    return "Other" if is_of_anthropic else "Custom"


AnyTool = Annotated[
    Annotated[CustomTool, Tag("Custom")]
    | Annotated[Anything, unknown("type", "custom"), Tag("Other")],
    Discriminator(_tool_tag),
]


class ToolChoiceParam(BaseModel):
    """Whether tools may, must or must not be called."""

    model_config = FORM

    type: Literal["auto", "any", "tool", "none"]
    name: Annotated[str | None, Field(description="With type tool: which.")] = None
    disable_parallel_tool_use: Annotated[
        bool | None, Field(description="true: at most one call.")
    ] = None


class ThinkingConfig(BaseModel):
    """Whether the model thinks first; how long is its own matter."""

    model_config = FORM

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: Annotated[int | None, Field(description="No effect.")] = None
    display: Annotated[str | None, Field(description="No effect; thoughts are told.")] = None


class OutputFormat(BaseModel):
    """The form of the text: JSON that obeys a schema."""

    model_config = ConfigDict(**FORM, populate_by_name=True)

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema", description="A JSON Schema.")]


class OutputConfig(BaseModel):
    model_config = FORM

    effort: Annotated[
        Literal["low", "medium", "high", "xhigh", "max"] | None,
        Field(description="How much to think; xhigh is as max."),
    ] = None
    format: OutputFormat | None = None


class Metadata(BaseModel):
    model_config = FORM

    user_id: Annotated[str | None, Field(description="No effect.")] = None


class CountTokensRequest(Body):
    """The body of /v1/messages/count_tokens: all that becomes the prompt."""

    refused: ClassVar = {"container": Refused(), "mcp_servers": Refused(([],))}

    messages: Annotated[
        list[AnyMessage],
        Field(min_length=1, description="The conversation; the user's turn ends it."),
    ]
    system: Annotated[Texts | None, Field(description="What comes before the conversation.")] = None
    tools: Annotated[list[AnyTool] | None, Field(description="What the model may call.")] = None
    tool_choice: ToolChoiceParam | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: Annotated[
        OutputFormat | None, Field(description="The older name of output_config.format.")
    ] = None

    thread: Annotated[Any, Field(description="Refused: no conversation is kept.")] = None

    @property
    def format(self) -> OutputFormat | None:
        """What the text must obey."""
        config = self.output_config
        return self.output_format or (None if config is None else config.format)

    def check(self) -> None:
        if self.thread is not None:
            raise HttpError(
                400,
                "thread: no conversation is kept here; send all of its messages",
                code=THREAD_CODE,
                param="thread",
            )
        if self.messages[-1].role == "assistant":
            raise RequestError(
                "messages", "the last must not be the assistant's: an answer cannot be continued"
            )
        choice = self.tool_choice
        if choice is not None and choice.type == "tool" and not choice.name:
            raise RequestError("tool_choice.name", "field required with type tool")
        config = self.output_config
        if self.output_format is not None and config is not None and config.format is not None:
            raise RequestError("output_format", "give it or output_config.format, not both")


class MessagesRequest(CountTokensRequest):
    """The body of /v1/messages."""

    max_tokens: Annotated[int, Field(description="Most tokens, thoughts included.")]
    stop_sequences: Annotated[list[str] | None, Field(description="Texts that end it.")] = None
    temperature: Annotated[
        float | None, Field(description="Randomness; 0 takes the likeliest token. Default 1.")
    ] = None
    top_p: float | None = None
    top_k: int | None = None
    stream: Annotated[bool | None, Field(description="Send events as tokens come.")] = None
    metadata: Metadata | None = None
    service_tier: Annotated[str | None, Field(description="No effect.")] = None
    speed: Annotated[str | None, Field(description="No effect.")] = None

    def check(self) -> None:
        super().check()
        if self.max_tokens < 1:
            raise RequestError("max_tokens", f"must be at least 1, not {self.max_tokens}")
