"""Structured outputs as a request names them: one Lark grammar of the text.

Owns what each field of StructuredOutputsParams means. Knows no chat format, and compiles
nothing: a schema or a pattern that cannot be obeyed shows when the grammar is compiled.
"""

import json
from collections.abc import Mapping
from typing import Any

from llguidance.gbnf_to_lark import any_to_lark

from stagecoach.errors import RequestError
from stagecoach.request import StructuredOutputsParams
from stagecoach.text import lark
from stagecoach.text.lark_negation import negations_as_texts
from stagecoach.text.structural_tag import SpecialTokens, structural_tag_piece

# Bytes that are no text include the library's marks of special tokens.
_BYTES_OPTION = "allow_invalid_utf8"


def output_grammar(params: StructuredOutputsParams, tokenizer: SpecialTokens) -> str:
    """The grammar of an output that is nothing but what `params` asks for.

    Raises:
        RequestError: field "structured_outputs".
    """
    if params.grammar is not None:
        params.check()
        # At the end, so that the lines that errors name are the caller's.
        return f"{_lark_text(params.grammar)}\n{lark.OPTIONS}"
    return lark.whole_grammar(output_piece(params, tokenizer))


def output_piece(params: StructuredOutputsParams, tokenizer: SpecialTokens) -> str:
    """The piece of a grammar that is what `params` asks for; errors as of `output_grammar`."""
    params.check()
    if params.json is not None:
        return lark.json_piece(_json_object("json", params.json))
    if params.json_object:
        return lark.json_piece({"type": "object"})
    if params.regex is not None:
        return lark.regex_piece(params.regex)
    if params.choice is not None:
        return lark.choice_piece(params.choice)
    if params.grammar is not None:
        return lark.nested_grammar(_lark_text(params.grammar))
    assert params.structural_tag is not None
    return structural_tag_piece(_json_object("structural_tag", params.structural_tag), tokenizer)


def _lark_text(grammar: str) -> str:
    """`grammar` as Lark; GBNF, which llama.cpp and vLLM take, is translated."""
    if len(grammar) > lark.MAX_GRAMMAR_CHARS:
        raise _refused(
            f"the grammar has {len(grammar)} characters; at most {lark.MAX_GRAMMAR_CHARS} are read"
        )
    if _BYTES_OPTION in grammar:
        raise _refused(f"grammar must be of texts: no {_BYTES_OPTION}")
    if "::=" not in grammar:
        return negations_as_texts(grammar)
    try:
        return any_to_lark(grammar)
    except Exception as error:  # noqa: BLE001 - the translator raises whatever it meets
        raise _refused(f"grammar is no GBNF: {error}") from None


def _json_object(name: str, value: Mapping[str, Any] | str) -> Mapping[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise _refused(f"{name} is no JSON: {error}") from None
    if not isinstance(value, Mapping):
        raise _refused(f"{name} must be a JSON object, not {value!r:.60}")
    return value


def _refused(reason: str) -> RequestError:
    return RequestError("structured_outputs", reason)
