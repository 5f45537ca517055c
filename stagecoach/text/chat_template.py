"""Chat templates in Jinja, as checkpoint folders carry them: messages to prompt tokens.

A template writes special tokens and the users' words into one text. So that the words never
become tokens, a mark is put into each special token's name that occurs in them, before the
template runs; of what it wrote, the names without a mark are special tokens, and the marks go.
"""

import datetime
import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from stagecoach.errors import RequestError
from stagecoach.json_file import read_json_object

# Characters that Unicode keeps free for such use: no text holds all of them.
_MARKS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))

_NOTHING = r"(?!)"  # a pattern that fits nowhere

_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class TemplateTokenizer(Protocol):
    """What is needed of a tokenizer."""

    @property
    def special_names(self) -> Sequence[str]: ...

    def special_id(self, name: str) -> int: ...

    def encode(self, text: str) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A template, and the names of special tokens that it may ask for, as `bos_token`.

    Raises:
        ValueError: it is no template.
    """

    source: str
    token_names: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            _compiled(self.source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"chat template, line {error.lineno}: {error.message}") from None

    @property
    def variables(self) -> frozenset[str]:
        """Names that it reads of what `render` is given."""
        return _variables(self.source)

    def render(
        self, tokenizer: TemplateTokenizer, messages: Sequence[Mapping[str, Any]], **variables: Any
    ) -> list[int]:
        """Prompt token ids.

        Args:
            tokenizer: of the same checkpoint.
            messages: plain JSON values; their contents are text.
            variables: whatever else the template reads, as `tools` and `add_generation_prompt`.

        Raises:
            RequestError: the template refuses the messages, or cannot be run.
        """
        words = {"tools": None, "documents": None} | variables
        words["messages"] = [_as_templates_expect(item) for item in messages]
        mark = _free_mark(json.dumps(words, ensure_ascii=False, default=str))
        # A name of one character has no inside to put a mark into; templates use none.
        names = [name for name in tokenizer.special_names if len(name) > 1]
        text = self._write(_marked(words, _openings(names), mark))
        token_ids: list[int] = []
        for number, piece in enumerate(_any_of(names).split(text)):
            if number % 2:
                token_ids.append(tokenizer.special_id(piece))
            else:
                token_ids += tokenizer.encode(_without_marks(piece, mark))
        return token_ids

    def _write(self, variables: Mapping[str, Any]) -> str:
        try:
            return _compiled(self.source).render({**self.token_names, **variables})
        except jinja2.TemplateError as error:
            raise RequestError("messages", f"the model's chat template refuses: {error}") from None
        except (TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise RequestError(
                "messages", f"the model's chat template cannot write them: {error}"
            ) from None


def read_chat_template(folder: Path) -> ChatTemplate | None:
    """The chat template of a checkpoint folder, or None: `chat_template.jinja` or, in
    `tokenizer_config.json`, `chat_template`, which may be a list of named ones.

    Raises:
        CheckpointError, ValueError: a file cannot be read, or holds no template.
    """
    config_path = folder / "tokenizer_config.json"
    config = read_json_object(config_path) if config_path.is_file() else {}
    path = folder / "chat_template.jinja"
    source = path.read_text(encoding="utf-8") if path.is_file() else config.get("chat_template")
    if isinstance(source, list):
        named = {
            item.get("name"): item.get("template") for item in source if isinstance(item, dict)
        }
        source = named.get("default")
    if source is None:
        return None
    if not isinstance(source, str):
        raise ValueError(f"{config_path}: chat_template must be text, not {source!r:.40}")
    return ChatTemplate(source, dict(_token_names(config)))


def _token_names(config: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    for key, value in config.items():
        name = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(name, str):
            yield key, name


def _as_templates_expect(message: Mapping[str, Any]) -> dict[str, Any]:
    """No fields that are None, reasoning under the usual name, arguments as objects."""
    written = {key: value for key, value in message.items() if value is not None}
    reasoning = next((written[key] for key in _REASONING_FIELDS if key in written), None)
    if reasoning is not None:
        written = {"thinking": reasoning, **written, "reasoning_content": reasoning}
    if written.get("tool_calls"):
        written["tool_calls"] = [_with_parsed_arguments(call) for call in written["tool_calls"]]
    return written


def _with_parsed_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return dict(call)
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        return dict(call)
    return {**call, "function": {**function, "arguments": arguments}}


def _free_mark(text: str) -> str:
    for mark in _MARKS:
        if mark not in text and _escape_of(mark) not in text:
            return mark
    raise RequestError("messages", "they hold every noncharacter of Unicode")


def _escape_of(mark: str) -> str:
    r"""As `tojson` may write it: \ufdd0."""
    return f"\\u{ord(mark):04x}"


def _openings(names: Sequence[str]) -> re.Pattern[str]:
    """Where a text opens like one of `names`, or may: with its first character at the end, where
    the next text may bring the rest. Templates strip blanks, so these may follow it.
    """
    patterns = [
        rf"{re.escape(first)}(?={seconds}|\s*\Z)" for first, seconds in _first_two(names).items()
    ]
    return re.compile("|".join(patterns) or _NOTHING)


def _any_of(names: Sequence[str]) -> re.Pattern[str]:
    """One of `names`, the longest that fits, as a group."""
    # Looking at two characters first saves trying every name at every place.
    opening = "|".join(re.escape(first) + rest for first, rest in _first_two(names).items())
    whole = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    return re.compile(f"((?={opening})(?:{whole}))" if names else f"({_NOTHING})")


def _first_two(names: Sequence[str]) -> dict[str, str]:
    """The first characters of `names`, each with a pattern of those that follow it."""
    seconds: dict[str, set[str]] = {}
    for name in names:
        seconds.setdefault(name[0], set()).add(re.escape(name[1]))
    return {first: f"[{''.join(sorted(chars))}]" for first, chars in seconds.items()}


def _marked(value: Any, openings: re.Pattern[str], mark: str) -> Any:
    """`value` with marks in all its texts, keys too."""
    if isinstance(value, str):
        return openings.sub(lambda match: match.group() + mark, value)
    if isinstance(value, Mapping):
        return {
            _marked(key, openings, mark): _marked(item, openings, mark)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_marked(item, openings, mark) for item in value]
    return value


def _without_marks(text: str, mark: str) -> str:
    return text.replace(mark, "").replace(_escape_of(mark), "")


class _GenerationBlock(Extension):
    """`{% generation %}`, which marks what training learns; here it is what is in it."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.lru_cache(maxsize=8)
def _compiled(source: str) -> jinja2.Template:
    return _environment().from_string(source)


@functools.lru_cache(maxsize=8)
def _variables(source: str) -> frozenset[str]:
    return frozenset(meta.find_undeclared_variables(_environment().parse(source)))


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001 - templates pass it as they like
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format_: str) -> str:
    return datetime.datetime.now().strftime(format_)
