"""A function's parameters as single arguments, each told by its type: what XTML has.

Owns which schemas can be said so exactly: a plain object whose properties are strings that are
free or listed, and JSON of other types. Any other schema is obeyed as one JSON object.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from stagecoach.text import lark

_PLAIN_OBJECT = {
    "type", "properties", "required", "additionalProperties", "title", "description",
    "$defs", "definitions", "$schema", "$comment", "examples", "default",
}  # fmt: skip
_NOTES = {"title", "description", "default", "examples", "$comment", "deprecated", "readOnly"}
_DEFINITIONS = ("$defs", "definitions")
# Of JSON Schema, to the names that the renderer gives to values.
_TYPE_NAMES = {
    "number": "number",
    "integer": "number",
    "boolean": "boolean",
    "null": "null",
    "object": "object",
    "array": "array",
}
_WHOLE_PATTERN = re.compile(r"\^(?!.*\(\?).*(?<!\\)\$")
_MAX_DEPTH = 8  # of references and alternatives


class ArgumentForm(NamedTuple):
    """One argument: its alternatives, each a type's name and the piece of its value."""

    values: tuple[tuple[str, str], ...]
    is_required: bool


class _NotExactError(Exception):
    """The schema cannot be told argument by argument."""


def argument_forms(
    parameters: Mapping[str, Any], *, is_lenient: bool
) -> dict[str, ArgumentForm] | None:
    """The arguments by name, in the order of the schema; None if it needs one JSON object.

    Args:
        parameters: JSON Schema of an object.
        is_lenient: as of `lark.json_piece`.
    """
    properties = parameters.get("properties", {})
    required = parameters.get("required", [])
    is_plain = (
        set(parameters) <= _PLAIN_OBJECT
        and isinstance(properties, Mapping)
        and isinstance(required, list | tuple)
        and all(isinstance(name, str) and name in properties for name in required)
        # An object of any keys has no arguments that could be listed.
        and (properties or parameters.get("additionalProperties") is False)
    )
    if not is_plain:
        return None
    definitions = {name: parameters[name] for name in _DEFINITIONS if name in parameters}
    forms = {}
    num_chars = 0
    required_names = set(required)
    try:
        for name, schema in properties.items():
            values = []
            for value in _values(schema, definitions, is_lenient=is_lenient):
                # Alternatives of alternatives, and definitions in each, may be any number.
                num_chars += sum(map(len, value))
                if num_chars > lark.MAX_GRAMMAR_CHARS:
                    return None
                values.append(value)
            forms[name] = ArgumentForm(tuple(values), is_required=name in required_names)
    except _NotExactError:
        return None
    return forms


def _values(
    schema: object, definitions: Mapping[str, Any], *, is_lenient: bool, depth: int = 0
) -> Iterator[tuple[str, str]]:
    """The alternatives of one argument."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        raise _NotExactError
    schema = {key: value for key, value in schema.items() if key not in _NOTES}
    options = _options(schema, definitions)
    if options is not None:
        for option in options:
            yield from _values(option, definitions, is_lenient=is_lenient, depth=depth + 1)
    elif schema.get("type") == "string" or _is_listed_text(schema):
        yield "string", _string(schema)
    else:
        type_name = schema.get("type")
        if not isinstance(type_name, str) or type_name not in _TYPE_NAMES:
            raise _NotExactError
        if not _has_known_references(schema):
            raise _NotExactError
        piece = lark.json_piece({**schema, **definitions}, is_lenient=is_lenient)
        yield _TYPE_NAMES[type_name], piece


def _options(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> list[object] | None:
    """The schemas that `schema` stands for, if it does for others."""
    if set(schema) == {"$ref"}:
        return [_target(schema["$ref"], definitions)]
    if set(schema) == {"anyOf"} and isinstance(schema["anyOf"], list) and schema["anyOf"]:
        return schema["anyOf"]
    names = schema.get("type")
    if isinstance(names, list) and names and not {"enum", "const"} & set(schema):
        return [{**schema, "type": name} for name in names]
    return None


def _target(reference: object, definitions: Mapping[str, Any]) -> object:
    if isinstance(reference, str) and reference.count("/") == 2:
        _, home, name = reference.split("/")
        if reference.startswith("#/") and isinstance(definitions.get(home), Mapping):
            return definitions[home].get(name)
    raise _NotExactError


def _listed(schema: Mapping[str, Any]) -> object:
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _is_listed_text(schema: Mapping[str, Any]) -> bool:
    listed = _listed(schema)
    return (
        isinstance(listed, list) and bool(listed) and all(isinstance(text, str) for text in listed)
    )


def _string(schema: Mapping[str, Any]) -> str:
    """The piece of a raw string."""
    keys = set(schema) - {"type"}
    if not keys:
        return lark.ANY_TEXT
    if keys <= {"minLength", "maxLength"}:
        low, high = schema.get("minLength", 0), schema.get("maxLength", "")
        if str(low).isdecimal() and (high == "" or str(high).isdecimal()):
            return f"/(?s:.{{{low},{high}}})/"
    if keys == {"pattern"} and _is_whole_pattern(schema["pattern"]):
        return lark.regex_piece(schema["pattern"], is_ascii=True)
    if keys in ({"enum"}, {"const"}) and _is_listed_text(schema):
        listed = _listed(schema)
        assert isinstance(listed, list)
        return lark.choice_piece(listed)
    raise _NotExactError


def _is_whole_pattern(pattern: object) -> bool:
    """Whether it speaks of a whole string, in what all kinds of patterns share."""
    return isinstance(pattern, str) and bool(_WHOLE_PATTERN.fullmatch(pattern))


def _has_known_references(schema: object) -> bool:
    """Whether each reference in `schema` is to a definition, which goes along with it."""
    if isinstance(schema, Mapping):
        reference = schema.get("$ref")
        if isinstance(reference, str) and not reference.startswith(("#/$defs/", "#/definitions/")):
            return False
        return not {"$id", "$anchor", "$dynamicRef"} & set(schema) and all(
            _has_known_references(value) for value in schema.values()
        )
    if isinstance(schema, list):
        return all(_has_known_references(value) for value in schema)
    return True
