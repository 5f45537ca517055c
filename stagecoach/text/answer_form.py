"""What is asked of a chat answer: the form of its content, and which functions it may call.

Owns what `tools`, `tool_choice` and `parallel_tool_calls` mean, in the form of OpenAI's API.
Knows no chat format.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stagecoach.errors import RequestError

_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class CallableFunction:
    """A function that an answer may call."""

    name: str
    # JSON Schema of an object that the arguments obey; None: any object.
    parameters: Mapping[str, Any] | None
    is_lenient: bool  # what a grammar cannot say of the parameters is left out


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerForm:
    """What is asked of an answer."""

    content: str | None  # the piece of a grammar that it must be; None: any text
    functions: tuple[CallableFunction, ...] = ()
    must_call: bool = False  # one of them at least
    is_one_call: bool = False  # at most


def answer_form(
    *,
    content: str | None,
    tools: Sequence[Mapping[str, Any]],
    tool_choice: str | Mapping[str, Any],
    parallel_tool_calls: bool,
) -> AnswerForm | None:
    """What is asked; None: nothing.

    Arguments obey a function's parameters where it is strict or a call is forced; where the
    model is free to call and no function is strict, its calls are its own affair. One call at
    most is then nothing to ask either: whoever reads the answer ends it before a second.

    Raises:
        RequestError: field "tools" or "tool_choice".
    """
    choice = _named_function(tool_choice)
    is_forced = choice is not None or tool_choice == "required"
    if is_forced and not tools:
        raise RequestError("tool_choice", "a call is required, but there are no tools")
    if choice is None and tool_choice not in ("auto", "none", "required"):
        raise RequestError("tool_choice", f"{tool_choice!r:.60} is none of auto, none, required")
    functions = (
        [] if tool_choice == "none" else [_function(tool, is_forced=is_forced) for tool in tools]
    )
    if choice is not None:
        functions = [function for function in functions if function.name == choice]
        if not functions:
            raise RequestError("tool_choice", f"no tool is a function named {choice!r:.60}")
    has_demand = (
        content is not None
        or is_forced
        or (tool_choice == "none" and bool(tools))
        or any(function.parameters is not None for function in functions)
    )
    if not has_demand:
        return None
    return AnswerForm(
        content=content,
        functions=tuple(functions),
        must_call=is_forced,
        is_one_call=choice is not None or not parallel_tool_calls,
    )


def _named_function(tool_choice: str | Mapping[str, Any]) -> str | None:
    if isinstance(tool_choice, str):
        return None
    function = tool_choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if tool_choice.get("type") != "function" or not isinstance(name, str):
        raise RequestError("tool_choice", "an object must name a function")
    return name


def _function(tool: Mapping[str, Any], *, is_forced: bool) -> CallableFunction:
    function = tool.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if tool.get("type") != "function" or not isinstance(name, str) or not name:
        raise RequestError("tools", f"a tool must be a function with a name, not {tool!r:.60}")
    assert isinstance(function, Mapping)
    is_strict = function.get("strict") is True
    parameters = function.get("parameters")
    if parameters is None:
        parameters = _NO_PARAMETERS
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise RequestError("tools", f"the parameters of {name!r:.60} must be an object's schema")
    return CallableFunction(
        name=name,
        parameters={"type": "object", **parameters} if is_strict or is_forced else None,
        is_lenient=not is_strict,
    )
