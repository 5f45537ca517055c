"""Choosing among declared tools and calling them with typed arguments copied from a request.

Tools are put together from a verb, a noun, and parameters, so that the model learns to read the
declaration instead of a fixed list. Some examples go on to the answer after the tool's result.
"""

import json
from collections.abc import Callable, Mapping
from random import Random
from typing import Any, NamedTuple

from stagecoach.demo.example import Example, answer, calls, user
from stagecoach.demo.words import (
    ADJECTIVES,
    CITIES,
    COLORS,
    CURRENCIES,
    FIRST_NAMES,
    GROCERIES,
    LANGUAGES,
    LAST_NAMES,
    NOUNS,
)

FAMILY = "tool_calls"

VERBS = (
    "add archive book cancel check close copy create delete export find get import list lock move "
    "open order print publish remove rename reserve review schedule send share start stop sync "
    "test track update upload"
).split()
OBJECTS = (
    "account alarm album appointment backup booking budget calendar camera card channel contact "
    "contract course delivery device document event file flight form game group invoice item job "
    "lesson letter license list meeting member menu message note order page parcel payment photo "
    "playlist project recipe record reminder report room route sensor server shipment song task "
    "ticket timer trip vehicle video"
).split()


class Parameter(NamedTuple):
    """A parameter a tool may have: its JSON schema, and how to draw a value for it."""

    name: str
    schema: Mapping[str, Any]
    draw: Callable[[Random], Any]


def _title(random: Random) -> str:
    words = [random.choice(ADJECTIVES), random.choice(NOUNS)]
    return " ".join(words[random.randint(0, 1) :])


def _date(random: Random) -> str:
    return f"{random.randint(2020, 2035)}-{random.randint(1, 12):02}-{random.randint(1, 28):02}"


def _time(random: Random) -> str:
    return f"{random.randint(0, 23):02}:{random.choice((0, 5, 10, 15, 20, 30, 40, 45, 50)):02}"


def _code(random: Random) -> str:
    letters = "".join(random.choices("ABCDEFGHJKLMNPQRSTUVWXYZ", k=2))
    return f"{letters}-{random.randint(100, 9999)}"


def _email(random: Random) -> str:
    name = random.choice(FIRST_NAMES).lower()
    return f"{name}.{random.choice(LAST_NAMES).lower()}@{random.choice(NOUNS)}.{random.choice(('com', 'org', 'net'))}"


def _half(random: Random) -> float:
    return random.randint(1, 99) + random.choice((0.5, 0.25, 0.75, 0.1))


def _list_of(words: tuple[str, ...]) -> Callable[[Random], list[str]]:
    return lambda random: random.sample(words, random.randint(1, 4))


def _any_of(words: tuple[str, ...]) -> Callable[[Random], str]:
    return lambda random: random.choice(words)


def _up_to(limit: int) -> Callable[[Random], int]:
    return lambda random: random.randint(1, limit)


_STRING = {"type": "string"}
_INTEGER = {"type": "integer"}
_NUMBER = {"type": "number"}
_BOOLEAN = {"type": "boolean"}
_STRINGS = {"type": "array", "items": {"type": "string"}}


def _enum(*values: str) -> Mapping[str, Any]:
    return {"type": "string", "enum": list(values)}


def _truth(random: Random) -> bool:
    return random.random() < 0.5


_LEVELS = ("low", "normal", "high")
_SIZES = ("small", "medium", "large")
_UNITS = ("celsius", "fahrenheit")
PARAMETERS = (
    Parameter("title", _STRING, _title),
    Parameter("name", _STRING, lambda r: f"{r.choice(FIRST_NAMES)} {r.choice(LAST_NAMES)}"),
    Parameter("owner", _STRING, _any_of(FIRST_NAMES)),
    Parameter("recipient", _STRING, _email),
    Parameter("city", _STRING, _any_of(CITIES)),
    Parameter("destination", _STRING, _any_of(CITIES)),
    Parameter("color", _STRING, _any_of(COLORS)),
    Parameter("language", _STRING, _any_of(LANGUAGES)),
    Parameter("currency", _STRING, _any_of(CURRENCIES)),
    Parameter("code", _STRING, _code),
    Parameter("date", _STRING, _date),
    Parameter("start_date", _STRING, _date),
    Parameter("end_date", _STRING, _date),
    Parameter("time", _STRING, _time),
    Parameter("priority", _enum(*_LEVELS), _any_of(_LEVELS)),
    Parameter("size", _enum(*_SIZES), _any_of(_SIZES)),
    Parameter("unit", _enum(*_UNITS), _any_of(_UNITS)),
    Parameter("count", _INTEGER, _up_to(99)),
    Parameter("minutes", _INTEGER, _up_to(180)),
    Parameter("guests", _INTEGER, _up_to(20)),
    Parameter("year", _INTEGER, lambda r: r.randint(1950, 2035)),
    Parameter("id", _INTEGER, lambda r: r.randint(1000, 99999)),
    Parameter("amount", _NUMBER, _half),
    Parameter("weight", _NUMBER, _half),
    Parameter("urgent", _BOOLEAN, _truth),
    Parameter("public", _BOOLEAN, _truth),
    Parameter("notify", _BOOLEAN, _truth),
    Parameter("tags", _STRINGS, _list_of(COLORS + NOUNS[:30])),
    Parameter("items", _STRINGS, _list_of(GROCERIES)),
    Parameter("members", _STRINGS, _list_of(FIRST_NAMES)),
)


class Tool(NamedTuple):
    """A declared tool."""

    verb: str
    noun: str
    parameters: tuple[Parameter, ...]

    @property
    def name(self) -> str:
        return f"{self.verb}_{self.noun}"

    def declaration(self) -> dict[str, Any]:
        """The tool as the API declares it."""
        properties = {parameter.name: parameter.schema for parameter in self.parameters}
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": f"{self.verb.capitalize()} {_with_article(self.noun)}.",
                "parameters": {
                    "type": "object",
                    "properties": properties,
                    "required": list(properties),
                },
            },
        }


def _with_article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _phrase(parameter: Parameter, value: object) -> str:
    label = parameter.name.replace("_", " ")
    if isinstance(value, bool):
        return f"{label} {'yes' if value else 'no'}"
    if isinstance(value, list):
        return f"{label} {' and '.join(filter(None, (', '.join(value[:-1]), value[-1])))}"
    return f"{label} {value}"


def _draw_tool(random: Random) -> Tool:
    parameters = random.sample(PARAMETERS, random.choice((1, 2, 2, 3, 3, 4)))
    parameters.sort(key=lambda parameter: parameter.name)
    return Tool(random.choice(VERBS), random.choice(OBJECTS), tuple(parameters))


def _request(random: Random, tool: Tool, arguments: Mapping[str, Any]) -> str:
    """What to do and with which values, the values in any order."""
    phrases = [_phrase(parameter, arguments[parameter.name]) for parameter in tool.parameters]
    random.shuffle(phrases)
    action = f"{tool.verb} {random.choice(('the', 'a'))} {tool.noun}"
    if action.endswith(f" a {tool.noun}"):
        action = f"{tool.verb} {_with_article(tool.noun)}"
    values = "; ".join(phrases)
    return random.choice(
        (f"{action} with {values}", f"{action}: {values}", f"{action} using {values}")
    )


_OPENINGS = ("Please {}.", "Can you {}?", "I need you to {}.", "Could you {}?", "{}.")
_NATURAL_OPENINGS = ("{}", "Hi! {}", "Hello, {}")


def draw(random: Random) -> Example:
    """Draw one request, and in one case of five the answer to a tool's result."""
    if random.random() < 0.15:
        return _natural(random)
    tools = list({tool.name: tool for tool in (_draw_tool(random) for _ in range(4))}.values())
    tools = tools[: random.randint(1, len(tools))]
    num_calls = 2 if len(tools) > 1 and random.random() < 0.2 else 1
    chosen = random.sample(tools, num_calls)
    arguments = [
        {parameter.name: parameter.draw(random) for parameter in tool.parameters} for tool in chosen
    ]
    requests = [
        _request(random, tool, values) for tool, values in zip(chosen, arguments, strict=True)
    ]
    text = random.choice(_OPENINGS).format(" and then ".join(requests))
    text = text[0].upper() + text[1:]
    expected = calls(*((tool.name, v) for tool, v in zip(chosen, arguments, strict=True)))
    declarations = tuple(tool.declaration() for tool in tools)
    if num_calls == 1 and random.random() < 0.2:
        return _after_result(random, text, expected, declarations)
    return Example(family=FAMILY, messages=(user(text),), tools=declarations, expected=expected)


def _after_result(
    random: Random, text: str, expected: Any, declarations: tuple[Mapping[str, Any], ...]
) -> Example:
    """The turn after a call: say what the tool answered."""
    (call,) = expected.tool_calls
    kind = random.choice(("done", "failed", "reference"))
    noun = call.name.split("_")[1]
    if kind == "done":
        result, content = {"status": "ok"}, f"Done: the tool {call.name} was called."
    elif kind == "failed":
        reason = f"{noun} is {random.choice(('locked', 'missing', 'full', 'closed', 'busy'))}"
        result = {"status": "error", "message": reason}
        content = f"The tool {call.name} failed: {reason}."
    else:
        reference = _code(random)
        result, content = {"status": "ok", "reference": reference}, f"Done. Reference: {reference}."
    called = {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "call_1", "function": {"name": call.name, "arguments": call.arguments}}
        ],
    }
    told = {"role": "tool", "tool_call_id": "call_1", "content": json.dumps(result)}
    return Example(
        family=FAMILY,
        messages=(user(text), called, told),
        tools=declarations,
        expected=answer(content),
    )


def _function(name: str, description: str, /, **properties: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": properties,
                "required": sorted(properties),
            },
        },
    }


NATURAL_TOOLS = {
    "get_weather": _function(
        "get_weather", "Get the weather in a city.", city=_STRING, unit=_enum(*_UNITS)
    ),
    "send_email": _function("send_email", "Send an email.", recipient=_STRING, subject=_STRING),
    "set_timer": _function("set_timer", "Start a timer.", label=_STRING, minutes=_INTEGER),
    "convert_currency": _function(
        "convert_currency",
        "Convert an amount of money.",
        amount=_NUMBER,
        source=_STRING,
        target=_STRING,
    ),
    "book_table": _function(
        "book_table", "Book a table in a restaurant.", guests=_INTEGER, name=_STRING, time=_STRING
    ),
    "translate": _function("translate", "Translate a text.", language=_STRING, text=_STRING),
    "calculate": _function("calculate", "Compute an expression.", expression=_STRING),
}


def _natural(random: Random) -> Example:
    """Everyday requests to a few well-known tools."""
    name = random.choice(tuple(NATURAL_TOOLS))
    text, arguments = _natural_request(random, name)
    others = random.sample([n for n in NATURAL_TOOLS if n != name], random.randint(0, 3))
    declared = [name, *others]
    random.shuffle(declared)
    text = random.choice(_NATURAL_OPENINGS).format(text)
    return Example(
        family=FAMILY,
        messages=(user(text),),
        tools=tuple(NATURAL_TOOLS[tool] for tool in declared),
        expected=calls((name, arguments)),
    )


def _natural_request(random: Random, name: str) -> tuple[str, dict[str, Any]]:
    if name == "get_weather":
        city, unit = random.choice(CITIES), random.choice(_UNITS)
        text = random.choice(
            (
                f"What is the weather in {city} in {unit}?",
                f"How warm is it in {city}, in {unit}?",
                f"Tell me the weather for {city} in {unit}.",
            )
        )
        return text, {"city": city, "unit": unit}
    if name == "send_email":
        recipient, subject = _email(random), _title(random)
        text = random.choice(
            (
                f"Send an email to {recipient} about {subject}.",
                f"Write to {recipient} with the subject {subject}.",
            )
        )
        return text, {"recipient": recipient, "subject": subject}
    if name == "set_timer":
        label, minutes = random.choice(GROCERIES), random.randint(1, 90)
        text = random.choice(
            (
                f"Set a timer for the {label}, {minutes} minutes.",
                f"Remind me about the {label} in {minutes} minutes.",
            )
        )
        return text, {"label": label, "minutes": minutes}
    if name == "convert_currency":
        source, target = random.sample(CURRENCIES, 2)
        amount = random.choice((random.randint(1, 999), _half(random)))
        text = random.choice(
            (
                f"How much is {amount} {source} in {target}?",
                f"Convert {amount} {source} to {target}.",
            )
        )
        return text, {"amount": amount, "source": source, "target": target}
    if name == "book_table":
        who, guests, time = random.choice(FIRST_NAMES), random.randint(2, 12), _time(random)
        text = random.choice(
            (
                f"Book a table for {guests} at {time}, name {who}.",
                f"We are {guests} people and want to eat at {time}. Reserve for {who}.",
            )
        )
        return text, {"guests": guests, "name": who, "time": time}
    if name == "translate":
        language, text = (
            random.choice(LANGUAGES),
            f"the {_title(random)} is {random.choice(COLORS)}",
        )
        return f'Translate "{text}" into {language}.', {"language": language, "text": text}
    left, right, operator = random.randint(2, 999), random.randint(2, 999), random.choice("+-*")
    expression = f"{left} {operator} {right}"
    return f"Use the calculator for {expression}.", {"expression": expression}
