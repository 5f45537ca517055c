"""Grammars that requests of a schedule may obey, and whether their answers do.

Owns a few small ones, for which Python alone can tell whether a whole text is right, so that no
fault of the compiled grammar hides behind itself.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from stagecoach.config.engine import ResolvedConfig
from stagecoach.engine.compiling import Compiler, load_compiler
from stagecoach.errors import RequestError
from stagecoach.fuzz.check import Finding
from stagecoach.fuzz.oracle import Answer, Expected
from stagecoach.request import FinishReason, StructuredOutputsParams
from stagecoach.text.tokenizer import Tokenizer, load_tokenizer

_DIGITS = r"[1-9][0-9]{0,2}(,[1-9][0-9]{0,2}){0,3}"
_WORD = r"[a-c]{2,5}!|[x-z]+"
_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"enum": [1, 22, None]}},
    "required": ["a"],
    "additionalProperties": False,
}


class _Grammar(NamedTuple):
    wanted: StructuredOutputsParams
    is_right: Callable[[str], object]  # of a whole text


def _obeys_schema(text: str) -> bool:
    value = json.loads(text)
    return list(value) == ["a"] and value["a"] in (1, 22, None)


_GRAMMARS = (
    _Grammar(StructuredOutputsParams(regex=_DIGITS), re.compile(_DIGITS).fullmatch),
    _Grammar(StructuredOutputsParams(regex=_WORD), re.compile(_WORD).fullmatch),
    _Grammar(
        StructuredOutputsParams(choice=("yes", "no", "perhaps")),
        {"yes", "no", "perhaps"}.__contains__,
    ),
    _Grammar(StructuredOutputsParams(json=_SCHEMA), _obeys_schema),
    _Grammar(
        StructuredOutputsParams(grammar='start: "(" (start | "1")* ")"'),
        lambda text: text.count("(") == text.count(")") > 0,
    ),
)
WANTED = tuple(grammar.wanted for grammar in _GRAMMARS)


class Obedience:
    """Whether answers obey; vocabularies stay from one script to the next."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Tokenizer, Compiler]] = {}

    def check(
        self, config: ResolvedConfig, expected: Sequence[Expected], answers: Sequence[Answer]
    ) -> Finding | None:
        """The first answer that does not obey, or None.

        Args:
            answers: what each request returned, the whole of it or as much as there is.
        """
        for index, (item, answer) in enumerate(zip(expected, answers, strict=True)):
            if item.params.structured_outputs is None:
                continue
            fault = self._fault(config, item.params.structured_outputs, answer)
            if fault is not None:
                return Finding("grammar", f"request {index}: {fault}: {list(answer.token_ids)}")
        return None

    def _fault(
        self, config: ResolvedConfig, wanted: StructuredOutputsParams, answer: Answer
    ) -> str | None:
        tokenizer, compiler = self._load(config)
        try:
            constraint = compiler.compile(wanted)
            constraint.advance(answer.token_ids)
        except AssertionError as error:
            return str(error)
        except RequestError as error:
            return f"cannot be compiled: {error}"
        if constraint.error is not None:
            return f"does not obey: {constraint.error}"
        ends = config.model.eos_token_ids
        if answer.finish_reason is not FinishReason.STOP or answer.token_ids[-1] not in ends:
            return None
        text = tokenizer.decode_bytes(answer.token_ids[:-1]).decode()
        for grammar in _GRAMMARS:
            if grammar.wanted == wanted and not grammar.is_right(text):
                return f"ends as {text!r}"
        return None

    def _load(self, config: ResolvedConfig) -> tuple[Tokenizer, Compiler]:
        key = str(config.checkpoint)
        if key not in self._known:
            self._known[key] = (load_tokenizer(config.checkpoint), load_compiler(config))
        return self._known[key]


def has_vocabulary(config: ResolvedConfig) -> bool:
    """Whether the checkpoint holds what it takes to write a grammar."""
    try:
        load_compiler(config)
    except RequestError:
        return False
    return True
