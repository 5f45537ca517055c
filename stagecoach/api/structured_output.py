"""What an answer must obey: `response_format`, and vLLM's `structured_outputs`.

Owns the form of both fields and what they are to the engine. Knows no grammar: whether one can
be compiled is found out by those who compile it.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from stagecoach.errors import RequestError
from stagecoach.request import StructuredOutputsParams

_FORM = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, frozen=True)


class JsonSchemaFormat(BaseModel):
    """A schema and its name, as OpenAI has them."""

    model_config = _FORM

    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    schema_: Annotated[
        dict[str, Any] | None,
        Field(alias="schema", description="A JSON Schema; absent: any JSON object."),
    ] = None
    strict: Annotated[bool | None, Field(description="No effect: it is always obeyed.")] = None


class ResponseFormat(BaseModel):
    """The form of the answer; a structural tag has its parts beside the type."""

    model_config = _FORM

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None

    @property
    def for_prompt(self) -> dict[str, Any]:
        """What a chat format tells the model of it."""
        if self.type in ("text", "structural_tag"):
            return {"type": "text"}
        if self.json_schema is None or self.json_schema.schema_ is None:
            return {"type": "json_object"}
        return {"type": self.type, "json_schema": {"schema": self.json_schema.schema_}}

    def params(self) -> StructuredOutputsParams | None:
        """What the engine is to hold the answer to, or None.

        Raises:
            RequestError: the schema is missing.
        """
        if self.type == "text":
            return None
        if self.type == "json_object":
            return StructuredOutputsParams(json_object=True)
        if self.type == "structural_tag":
            return StructuredOutputsParams(structural_tag=self.model_dump(exclude_none=True))
        if self.json_schema is None:
            raise RequestError("response_format.json_schema", "field required")
        if self.json_schema.schema_ is None:
            return StructuredOutputsParams(json_object=True)
        return StructuredOutputsParams(json=self.json_schema.schema_)


class StructuredOutputs(BaseModel):
    """What the text must obey, as vLLM has it: one of these."""

    model_config = _FORM

    json_: Annotated[
        dict[str, Any] | str | None, Field(alias="json", description="A JSON Schema.")
    ] = None
    json_object: Annotated[bool | None, Field(description="true: any JSON object.")] = None
    regex: Annotated[str | None, Field(description="It matches all of the text.")] = None
    choice: Annotated[list[str] | None, Field(description="The text is one of them.")] = None
    grammar: Annotated[str | None, Field(description="In Lark, as llguidance reads it.")] = None
    structural_tag: Annotated[
        dict[str, Any] | str | None, Field(description="As in `response_format`.")
    ] = None

    def params(self) -> StructuredOutputsParams:
        """
        Raises:
            RequestError: not one of them, or one that nobody knows.
        """
        for name, value in (self.model_extra or {}).items():
            if value not in (None, False):
                raise RequestError(f"structured_outputs.{name[:40]}", "not implemented")
        params = StructuredOutputsParams(
            json=self.json_,
            json_object=self.json_object,
            regex=self.regex,
            choice=None if self.choice is None else tuple(self.choice),
            grammar=self.grammar,
            structural_tag=self.structural_tag,
        )
        params.check()
        return params


def params_of(
    response_format: ResponseFormat | None, structured_outputs: StructuredOutputs | None
) -> StructuredOutputsParams | None:
    """What both fields ask for; None: nothing.

    Raises:
        RequestError: names the field that is wrong, or of which there are two.
    """
    asked = None if response_format is None else response_format.params()
    if structured_outputs is None:
        return asked
    if asked is not None:
        raise RequestError("structured_outputs", "give it or response_format, not both")
    return structured_outputs.params()
