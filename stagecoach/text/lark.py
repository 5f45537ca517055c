"""Pieces of a Lark grammar, in llguidance's form: how it says what a text must be.

Owns how texts, JSON schemas and special tokens are written in a grammar. `output_grammar` and
`answer_grammar` put pieces together, `grammar/` compiles the whole. Knows no chat format.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import llguidance

# Where JSON may have blanks, it has one space, or a line break and its indentation, once: enough
# for all that writes JSON, and no model can go on with blanks for ever.
JSON_OPTIONS = {"whitespace_pattern": r" |\n {0,32}"}

# Any token that gives the bytes that must come is allowed, not only the one that the tokenizer
# would choose: what is allowed then depends on bytes alone, and no mask calls the tokenizer.
OPTIONS = '%llguidance {"no_forcing": true}'

ANY_TEXT = "/(?s:.*)/"

# The longest grammar takes a few seconds to compile.
MAX_GRAMMAR_CHARS = 300_000


def whole_grammar(piece: str, rules: Iterable[str] = ()) -> str:
    """The grammar of a text that is `piece`, which may name `rules`."""
    return "\n".join((f"start: {piece}", *rules, OPTIONS))


def quoted(text: str) -> str:
    """The piece that is `text`."""
    return json.dumps(text, ensure_ascii=False)


def special_token(token_id: int) -> str:
    """The piece that is one special token."""
    return f"<[{token_id}]>"


def json_piece(schema: Mapping[str, Any], *, is_lenient: bool = False) -> str:
    """The piece that is JSON of `schema`.

    A keyword that no grammar can obey is an error when it is compiled; it is left out if
    `is_lenient`.
    """
    options = {**JSON_OPTIONS, "lenient": is_lenient}
    text = json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)
    return f"%json {text}"


def regex_piece(regex: str, *, is_ascii: bool = False) -> str:
    """The piece that `regex`, of Rust's `regex`, matches as a whole.

    With `is_ascii`, digits and word characters are ASCII's, as in JSON Schema.
    """
    return f"/{llguidance.regex_to_lark(regex, 'dw' if is_ascii else '')}/"


def optional(piece: str) -> str:
    """The piece, or nothing."""
    return f"({piece})?"


def any_of(pieces: Iterable[str]) -> str:
    """One of the pieces."""
    return f"({' | '.join(pieces)})"


def choice_piece(texts: Iterable[str]) -> str:
    """The piece that is one of `texts`."""
    # One terminal: the lexer tells them apart, however many there are.
    return nested_grammar("start: CHOICE\nCHOICE: " + " | ".join(map(quoted, texts)))


def nested_grammar(text: str) -> str:
    """The piece that a grammar of its own accepts."""
    return f"%lark {{\n{text}\n}}"
