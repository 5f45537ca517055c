"""Which parameters can be told argument by argument, and under which types."""

from typing import Any

import pytest

from stagecoach.text.argument_schema import argument_forms


def object_of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)[:1]}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, ["string"]),
        ({"type": "string", "description": "a city", "default": "x"}, ["string"]),
        ({"type": "string", "minLength": 1, "maxLength": 9}, ["string"]),
        ({"type": "string", "pattern": "^[a-z]+$"}, ["string"]),
        ({"enum": ["a", "b"]}, ["string"]),
        ({"const": "a", "type": "string"}, ["string"]),
        ({"type": "integer", "minimum": 3}, ["number"]),
        ({"type": ["string", "null"]}, ["string", "null"]),
        ({"anyOf": [{"type": "array", "items": {}}, {"type": "null"}]}, ["array", "null"]),
        ({"$ref": "#/$defs/place"}, ["object"]),
        ({"type": "array", "items": {"$ref": "#/$defs/place"}}, ["array"]),
    ],
)
def test_types_of_an_argument(schema: dict[str, Any], types: list[str]) -> None:
    parameters = object_of(x=schema, y={"type": "boolean"})
    parameters["$defs"] = {"place": {"type": "object"}}
    forms = argument_forms(parameters, is_lenient=False)
    assert forms is not None and list(forms) == ["x", "y"]
    assert [type_name for type_name, _ in forms["x"].values] == types
    assert forms["x"].is_required and not forms["y"].is_required


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object"},
        {"type": "object", "anyOf": [{"required": ["a"]}], "properties": {"a": {}}},
        {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["b"]},
        {"type": "object", "properties": {"a": {"type": "string"}}, "required": [{}]},
        object_of(x={}),
        object_of(x=True),
        object_of(x={"type": "string", "pattern": "a"}),
        object_of(x={"type": "string", "pattern": "^a\\$"}),
        object_of(x={"type": "string", "pattern": "^(?!a)b$"}),
        object_of(x={"type": "string", "format": "date"}),
        object_of(x={"type": "string", "minLength": -1}),
        object_of(x={"enum": ["a", 1]}),
        object_of(x={"type": ["string", "null"], "enum": ["a", None]}),
        object_of(x={"allOf": [{"type": "string"}]}),
        object_of(x={"$ref": "#/properties/y"}, y={"type": "string"}),
        object_of(x={"type": "array", "items": {"$ref": "#"}}),
        {**object_of(x={"$ref": "#/$defs/a"}), "$defs": {"a": {"$ref": "#/$defs/a"}}},
    ],
)
def test_what_needs_one_object(parameters: dict[str, Any]) -> None:
    assert argument_forms(parameters, is_lenient=False) is None


def test_no_parameters_are_no_arguments() -> None:
    closed = {"type": "object", "properties": {}, "additionalProperties": False}
    assert argument_forms(closed, is_lenient=False) == {}


def test_alternatives_do_not_multiply_for_ever() -> None:
    references = [
        {f"a{level}": {"anyOf": [{"$ref": f"#/$defs/a{level + 1}"}] * 200}} for level in range(3)
    ]
    definitions: dict[str, Any] = {"a3": {"type": "integer"}}
    for reference in references:
        definitions |= reference
    parameters = {**object_of(x={"$ref": "#/$defs/a0"}), "$defs": definitions}
    assert argument_forms(parameters, is_lenient=False) is None


def test_definitions_are_not_repeated_for_ever() -> None:
    parameters = object_of(**{f"p{number}": {"type": "integer"} for number in range(3000)})
    parameters["$defs"] = {"long": {"enum": ["x" * 100] * 3000}}
    assert argument_forms(parameters, is_lenient=False) is None
