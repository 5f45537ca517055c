"""Extracting a JSON object that a schema describes from a short text."""

import json
from collections.abc import Callable, Mapping
from random import Random
from typing import Any, NamedTuple

from stagecoach.demo.example import Example, answer, user
from stagecoach.demo.words import (
    ADJECTIVES,
    CITIES,
    COLORS,
    FIRST_NAMES,
    GROCERIES,
    JOBS,
    LANGUAGES,
    LAST_NAMES,
    MONTHS,
    NOUNS,
)

FAMILY = "extraction"


class Field(NamedTuple):
    """A property: its schema, how to draw its value, and sentences that state it."""

    schema: Mapping[str, Any]
    draw: Callable[[Random], Any]
    sentences: tuple[str, ...]


_STRING = {"type": "string"}
_INTEGER = {"type": "integer"}
_NUMBER = {"type": "number"}
_BOOLEAN = {"type": "boolean"}
_STRINGS = {"type": "array", "items": {"type": "string"}}


def _date(random: Random) -> str:
    return f"{random.randint(1, 28)} {random.choice(MONTHS)} {random.randint(1990, 2035)}"


# {who} is the person a text is about; {value} is the value in words.
FIELDS: dict[str, Field] = {
    "age": Field(
        _INTEGER,
        lambda r: r.randint(18, 90),
        ("{who} is {value} years old.", "At the age of {value}, {who} is full of energy."),
    ),
    "city": Field(
        _STRING,
        lambda r: r.choice(CITIES),
        ("{who} lives in {value}.", "{who} has a small flat in {value}."),
    ),
    "birthplace": Field(
        _STRING,
        lambda r: r.choice(CITIES),
        ("{who} was born in {value}.", "{who} comes from {value}."),
    ),
    "job": Field(
        _STRING, lambda r: r.choice(JOBS), ("{who} works as a {value}.", "{who} is a {value}.")
    ),
    "email": Field(
        _STRING,
        lambda r: f"{r.choice(FIRST_NAMES).lower()}{r.randint(1, 99)}@{r.choice(NOUNS)}.org",
        ("Write to {who} at {value}.", "The address for mail is {value}."),
    ),
    "phone": Field(
        _STRING,
        lambda r: f"{r.randint(100, 999)}-{r.randint(1000, 9999)}",
        ("The phone number is {value}.", "{who} can be called at {value}."),
    ),
    "start_date": Field(
        _STRING, _date, ("{who} started on {value}.", "The first day of work was {value}.")
    ),
    "birthday": Field(
        _STRING, _date, ("{who} was born on {value}.", "The date of birth is {value}.")
    ),
    "height_cm": Field(
        _INTEGER,
        lambda r: r.randint(150, 205),
        ("{who} is {value} cm tall.", "With {value} cm, {who} sees over the fence."),
    ),
    "salary": Field(
        _INTEGER,
        lambda r: r.randint(20, 99) * 100,
        ("{who} earns {value} euros a month.", "The monthly salary is {value} euros."),
    ),
    "rating": Field(
        _NUMBER,
        lambda r: r.randint(1, 9) + r.choice((0.5, 0.2, 0.8)),
        ("The last rating was {value}.", "{who} was rated {value} out of 10."),
    ),
    "employee_id": Field(
        _STRING,
        lambda r: f"{r.choice('ABCDEFGHKLMNPRSTW')}{r.randint(1000, 9999)}",
        ("The employee id is {value}.", "{who} has the number {value} in our files."),
    ),
    "married": Field(_BOOLEAN, lambda r: r.random() < 0.5, ("{who} is {not}married.",)),
    "member": Field(_BOOLEAN, lambda r: r.random() < 0.5, ("{who} is {not}a member of the club.",)),
    "vegetarian": Field(_BOOLEAN, lambda r: r.random() < 0.5, ("{who} is {not}a vegetarian.",)),
    "languages": Field(
        _STRINGS,
        lambda r: r.sample(LANGUAGES, r.randint(1, 3)),
        ("{who} speaks {value}.", "The languages spoken are {value}."),
    ),
    "shopping": Field(
        _STRINGS,
        lambda r: r.sample(GROCERIES, r.randint(2, 4)),
        ("{who} wants to buy {value}.", "On the shopping list are {value}."),
    ),
    "favorite_colors": Field(
        _STRINGS, lambda r: r.sample(COLORS, r.randint(1, 3)), ("{who} likes the colors {value}.",)
    ),
    "project": Field(
        _STRING,
        lambda r: f"{r.choice(ADJECTIVES)} {r.choice(NOUNS)}",
        ("The current project is called {value}.", "{who} leads the project {value}."),
    ),
    "pet": Field(_STRING, lambda r: r.choice(NOUNS), ("{who} keeps a pet named {value}.",)),
}
_FILLERS = (
    "The weather was fine that day.",
    "Nobody knew what would happen next.",
    "It was a long week for everyone.",
    "There is coffee in the kitchen.",
    "The meeting lasted an hour.",
    "All of this was noted by hand.",
)
_REQUESTS = (
    "Extract the data from this text as JSON.",
    "Read the text and fill in the JSON object.",
    "Give me the facts of this text as JSON.",
    "Turn the following note into JSON.",
)


def in_words(value: Any) -> str:
    """A value as a sentence says it."""
    if isinstance(value, list):
        return " and ".join(filter(None, (", ".join(value[:-1]), value[-1])))
    return str(value)


def draw(random: Random) -> Example:
    """Draw a text about one person, and a schema that asks for some of what it says."""
    person = f"{random.choice(FIRST_NAMES)} {random.choice(LAST_NAMES)}"
    first_name = person.split()[0]
    stated = random.sample(tuple(FIELDS), random.randint(2, 7))
    asked = stated[: random.randint(1, min(5, len(stated)))]
    values: dict[str, Any] = {"name": person}
    sentences = []
    for name in stated:
        field = FIELDS[name]
        value = values[name] = field.draw(random)
        sentence = random.choice(field.sentences)
        words = {
            "who": first_name,
            "value": in_words(value),
            "not": "" if value is True else "not ",
        }
        sentences.append(sentence.format_map(words))
    sentences += random.sample(_FILLERS, random.randint(0, 2))
    random.shuffle(sentences)
    sentences.insert(0, random.choice((f"This is {person}.", f"A note about {person}.")))
    names = sorted([*asked, "name"] if random.random() < 0.7 else asked)
    properties = {n: _STRING if n == "name" else FIELDS[n].schema for n in names}
    schema = {"type": "object", "properties": properties, "required": names}
    return Example(
        family=FAMILY,
        messages=(user(f"{random.choice(_REQUESTS)}\n\n{' '.join(sentences)}"),),
        response_format={"type": "json_schema", "json_schema": {"name": "data", "schema": schema}},
        expected=answer(json.dumps({name: values[name] for name in names})),
    )
