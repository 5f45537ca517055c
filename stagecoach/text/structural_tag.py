"""Structural tags: texts of a form between given markers, alone or inside free text.

Owns what a structural tag says, in OpenAI's and vLLM's older form (`structures` and `triggers`)
and in the newer one (`format`). A marker that holds the name of a special token means the token.
What no grammar says exactly is refused by name.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from stagecoach.errors import RequestError
from stagecoach.text import lark

_MAX_DEPTH = 32


class SpecialTokens(Protocol):
    """What is needed of a tokenizer."""

    @property
    def special_names(self) -> tuple[str, ...]: ...

    def special_id(self, name: str) -> int: ...


def structural_tag_piece(tag: Mapping[str, Any], tokenizer: SpecialTokens) -> str:
    """The piece of a grammar that is what a structural tag says.

    Raises:
        RequestError: field "structured_outputs": it is malformed, or cannot be said exactly.
    """
    if "format" in tag:
        form = _object(tag["format"], "format")
    else:
        form = {
            "type": "triggered_tags",
            "triggers": _list(tag, "triggers"),
            "tags": [_newer(_object(item, "structures")) for item in _list(tag, "structures")],
        }
    writer = _Writer(tokenizer)
    start = writer.piece(form, is_last=True)
    return lark.nested_grammar("\n".join((f"start: {start}", *writer.rules)))


def _newer(structure: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        "begin": structure.get("begin"),
        "content": {"type": "json_schema", "json_schema": structure.get("schema", True)},
        "end": structure.get("end"),
    }


class _Writer:
    """Writes formats as pieces; what needs a name becomes a rule."""

    def __init__(self, tokenizer: SpecialTokens) -> None:
        self.rules: list[str] = []
        self._tokenizer = tokenizer
        # Longer names first, so that one that another begins with is found.
        names = sorted(tokenizer.special_names, key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(map(re.escape, names))})" if names else "(?!)")
        self._depth = 0
        self._kinds: dict[str, Callable[..., str]] = {
            "const_string": self._const_string,
            "json_schema": self._json_schema,
            "regex": self._regex,
            "any_text": self._any_text,
            "sequence": self._sequence,
            "or": self._or,
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
        }

    def piece(self, form: Mapping[str, Any], *, is_last: bool) -> str:
        """`is_last`: nothing follows it, so that it may be text of any length."""
        kind = form.get("type")
        if not isinstance(kind, str) or kind not in self._kinds:
            raise _refused(f"the format type {kind!r:.60} is not supported")
        if form.get("excludes"):
            raise _refused(f"excludes of {kind} is not supported")
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise _refused(f"formats are nested deeper than {_MAX_DEPTH}")
        piece = self._kinds[kind](form, is_last=is_last)
        self._depth -= 1
        return f"({piece})"

    def _const_string(self, form: Mapping[str, Any], *, is_last: bool) -> str:
        return self._literal(_text(form, "value"))

    def _json_schema(self, form: Mapping[str, Any], *, is_last: bool) -> str:
        schema = form.get("json_schema")
        if form.get("style", "json") != "json":
            raise _refused(f"the style {form['style']!r:.60} of a json_schema is not supported")
        return lark.json_piece({} if schema is True else _object(schema, "json_schema"))

    def _regex(self, form: Mapping[str, Any], *, is_last: bool) -> str:
        return lark.regex_piece(_text(form, "pattern"))

    def _any_text(self, form: Mapping[str, Any], *, is_last: bool) -> str:
        if not is_last:
            raise _refused("any_text must be the content of a tag with an end, or come last")
        return lark.ANY_TEXT

    def _sequence(self, form: Mapping[str, Any], *, is_last: bool) -> str:
        elements = _list(form, "elements")
        pieces = [
            self.piece(_object(item, "elements"), is_last=is_last and number == len(elements))
            for number, item in enumerate(elements, start=1)
        ]
        return " ".join(pieces)

    def _or(self, form: Mapping[str, Any], *, is_last: bool) -> str:
        options = _list(form, "elements")
        return " | ".join(
            self.piece(_object(item, "elements"), is_last=is_last) for item in options
        )

    def _tag(self, form: Mapping[str, Any], *, is_last: bool) -> str:
        return f"{self._literal(_text(form, 'begin'))} {self._inside(form, is_last=is_last)}"

    def _inside(self, tag: Mapping[str, Any], *, is_last: bool) -> str:
        """The content of a tag and its end."""
        content = _object(tag.get("content"), "content")
        end = tag.get("end")
        ends = [end] if isinstance(end, str) else end
        if not isinstance(ends, list) or not all(isinstance(text, str) for text in ends):
            raise _refused("the end of a tag must be a text or a list of texts")
        if content.get("type") == "any_text" and any(ends):
            return self._text_until(ends)
        piece = self.piece(content, is_last=is_last and not any(ends))
        return f"{piece} {lark.any_of(map(self._literal, ends))}" if any(ends) else piece

    def _text_until(self, ends: Sequence[str]) -> str:
        if all(self._special.fullmatch(end) for end in ends):
            return f"{lark.ANY_TEXT} {lark.any_of(map(self._literal, ends))}"
        if not all(ends) or any(self._special.search(end) for end in ends):
            raise _refused("any_text must end in texts, or in single special tokens")
        alternatives = lark.any_of(map(lark.quoted, ends))
        return self._shortest(f"{lark.ANY_TEXT} {alternatives}")

    def _triggered_tags(self, form: Mapping[str, Any], *, is_last: bool) -> str:
        if not is_last:
            raise _refused("triggered_tags must come last: free text has no end")
        triggers = [text for text in _list(form, "triggers") if isinstance(text, str) and text]
        tags = [_object(item, "tags") for item in _list(form, "tags")]
        by_trigger: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        for tag in tags:
            begin = _text(tag, "begin")
            fitting = [trigger for trigger in triggers if begin.startswith(trigger)]
            if len(fitting) != 1:
                raise _refused(f"begin {begin!r:.60} must open with exactly one of the triggers")
            rest = self._literal(begin.removeprefix(fitting[0]))
            by_trigger[fitting[0]].append(f"{rest} {self._inside(tag, is_last=False)}")
        tag_piece = lark.any_of(
            f"{self._text_to(trigger)} {lark.any_of(insides)}"
            for trigger, insides in by_trigger.items()
            if insides
        )
        least = "+" if form.get("at_least_one") else "*"
        if form.get("stop_after_first"):
            return tag_piece if least == "+" else f"{tag_piece} | {lark.ANY_TEXT}"
        return f"{tag_piece}{least} {lark.ANY_TEXT}"

    def _text_to(self, trigger: str) -> str:
        """Free text and the trigger that ends it."""
        if self._special.fullmatch(trigger):
            return f"{lark.ANY_TEXT} {self._literal(trigger)}"
        if self._special.search(trigger):
            raise _refused(f"the trigger {trigger!r:.60} must be text, or one special token")
        return self._shortest(f"{lark.ANY_TEXT} {lark.quoted(trigger)}")

    def _tags_with_separator(self, form: Mapping[str, Any], *, is_last: bool) -> str:
        separator = form.get("separator", "")
        if not isinstance(separator, str):
            raise _refused("separator must be a text")
        tag = lark.any_of(
            self._tag(_object(item, "tags"), is_last=False) for item in _list(form, "tags")
        )
        more = "" if form.get("stop_after_first") else f" ({self._literal(separator)} {tag})*"
        return f"{tag}{more}" if form.get("at_least_one") else lark.optional(f"{tag}{more}")

    def _literal(self, text: str) -> str:
        """`text`, in which the names of special tokens are the tokens."""
        parts = [part for part in self._special.split(text) if part]
        if not parts:
            return '""'
        return " ".join(
            lark.special_token(self._tokenizer.special_id(part))
            if self._special.fullmatch(part)
            else lark.quoted(part)
            for part in parts
        )

    def _shortest(self, piece: str) -> str:
        """The rule that ends where `piece` first can."""
        name = f"text_{len(self.rules)}"
        self.rules.append(f"{name}[lazy]: {piece}")
        return name


def _list(form: Mapping[str, Any], name: str) -> list[Any]:
    value = form.get(name)
    if not isinstance(value, list) or not value:
        raise _refused(f"{name} must be a list that is not empty")
    return value


def _text(form: Mapping[str, Any], name: str) -> str:
    value = form.get(name)
    if not isinstance(value, str) or not value:
        raise _refused(f"{name} must be a text that is not empty")
    return value


def _object(value: object, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _refused(f"{name}: must be an object, not {value!r:.60}")
    return value


def _refused(reason: str) -> RequestError:
    return RequestError("structured_outputs", f"structural_tag: {reason}")
