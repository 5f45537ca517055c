"""The messages of a request: turns, and the blocks that they are made of.

Owns their form, and how one that is not implemented is refused by its type and place. What is
unknown inside of a block is ignored, as `cache_control`: prefixes are cached without being asked.
"""

from typing import Annotated, Any, Literal, NoReturn

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import PydanticCustomError

FORM = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)


def _value(field: str, item: Any) -> Any:
    return item.get(field) if isinstance(item, dict) else getattr(item, field, None)


# Pydantic puts the tag of the chosen branch among the fields; a capital keeps it out of messages.
def _by(field: str, *values: str) -> Discriminator:
    """Chooses the branch with the tag of the field's value, or that with the tag Other."""

    def tag(item: Any) -> str | None:
        value = _value(field, item)
        if not isinstance(value, str):
            return None
        return value.title() if value in values else "Other"

    return Discriminator(
        tag,
        custom_error_type="no_kind",
        custom_error_message=f"must be an object with a {field}",
    )


def unknown(field: str, *values: str) -> AfterValidator:
    """Refuses an item, naming what it is and what there is."""

    def refuse(item: Any) -> NoReturn:
        raise PydanticCustomError(
            "unknown_kind",
            "{field} {value} is not implemented here; there is {values}",
            {
                "field": field,
                "value": f"{_value(field, item)!r:.60}",
                "values": ", ".join(values),
            },
        )

    return AfterValidator(refuse)


def _form_tag(content: Any) -> str | None:
    if isinstance(content, str):
        return "One"
    return "Many" if isinstance(content, list) else None


_ByForm = Discriminator(
    _form_tag,
    custom_error_type="no_form",
    custom_error_message="must be a text or a list of blocks",
)
_Text = Annotated[str, Tag("One")]
Anything = SkipJsonSchema[Any]


class TextParam(BaseModel):
    model_config = FORM

    type: Literal["text"]
    text: str


class ThinkingParam(BaseModel):
    """What the model thought in an earlier answer."""

    model_config = FORM

    type: Literal["thinking"]
    thinking: str
    signature: Annotated[str | None, Field(description="No effect.")] = None


class RedactedThinkingParam(BaseModel):
    """Thoughts that only their author can read; the prompt goes without them."""

    model_config = FORM

    type: Literal["redacted_thinking"]
    data: str


class ToolUseParam(BaseModel):
    """A call of a tool in an earlier answer."""

    model_config = FORM

    type: Literal["tool_use"]
    id: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(min_length=1)]
    input: dict[str, Any]


TextBlock = Annotated[
    Annotated[TextParam, Tag("Text")] | Annotated[Anything, unknown("type", "text"), Tag("Other")],
    _by("type", "text"),
]
Texts = Annotated[_Text | Annotated[list[TextBlock], Tag("Many")], _ByForm]


class ToolResultParam(BaseModel):
    """What a tool answered."""

    model_config = FORM

    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts | None = None
    is_error: Annotated[
        bool | None, Field(description="true: the model is told so in front of the content.")
    ] = None


_USER_BLOCKS = ("text", "tool_result")
UserBlock = Annotated[
    Annotated[TextParam, Tag("Text")]
    | Annotated[ToolResultParam, Tag("Tool_Result")]
    | Annotated[Anything, unknown("type", *_USER_BLOCKS), Tag("Other")],
    _by("type", *_USER_BLOCKS),
]

_ASSISTANT_BLOCKS = ("text", "thinking", "redacted_thinking", "tool_use")
AssistantBlock = Annotated[
    Annotated[TextParam, Tag("Text")]
    | Annotated[ThinkingParam, Tag("Thinking")]
    | Annotated[RedactedThinkingParam, Tag("Redacted_Thinking")]
    | Annotated[ToolUseParam, Tag("Tool_Use")]
    | Annotated[Anything, unknown("type", *_ASSISTANT_BLOCKS), Tag("Other")],
    _by("type", *_ASSISTANT_BLOCKS),
]


class UserMessage(BaseModel):
    model_config = FORM

    role: Literal["user"]
    content: Annotated[_Text | Annotated[list[UserBlock], Tag("Many")], _ByForm]


class AssistantTurn(BaseModel):
    """An earlier answer."""

    model_config = FORM

    role: Literal["assistant"]
    content: Annotated[_Text | Annotated[list[AssistantBlock], Tag("Many")], _ByForm]


class SystemMessage(BaseModel):
    """Instructions in the middle of a conversation."""

    model_config = FORM

    role: Literal["system"]
    content: Texts


_ROLES = ("user", "assistant", "system")
AnyMessage = Annotated[
    Annotated[UserMessage, Tag("User")]
    | Annotated[AssistantTurn, Tag("Assistant")]
    | Annotated[SystemMessage, Tag("System")]
    | Annotated[Anything, unknown("role", *_ROLES), Tag("Other")],
    _by("role", *_ROLES),
]
