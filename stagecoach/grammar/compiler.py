"""Compiles what a request's output must obey, and keeps what was compiled.

Owns the limits of a grammar and the cache of compiled ones. Compiling may take long, so it runs
in a thread; any number of threads may compile at once. Knows no queue and no process.
"""

import re
import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass

import llguidance

from stagecoach.errors import RequestError
from stagecoach.grammar.constraint import GrammarConstraint, told_error
from stagecoach.grammar.mask_filter import MaskFilter
from stagecoach.grammar.vocabulary import make_vocabulary
from stagecoach.request import StructuredOutputsParams
from stagecoach.text.lark import MAX_GRAMMAR_CHARS
from stagecoach.text.output_grammar import output_grammar
from stagecoach.text.tokenizer import Tokenizer

# All that are kept take some 300 MB at worst.
_MAX_KEPT = 64
_MAX_KEPT_CHARS = 1_000_000
_MAX_COPIES = 64
# What counts or cuts the tokens of a rule, of which the library takes none back.
_ONE_WAY = re.compile(r"\[[^\[\]]*\b(?:max_tokens|stop)\b")


@dataclass(slots=True)
class _Compiled:
    """A matcher before its first token, or why there is none.

    Copies share what is found out about the grammar while they go on, and its limits: so each is
    copied so many times only, and not again once a copy reached a limit.
    """

    matcher: llguidance.LLMatcher
    error: str
    num_copies_left: int

    def spend(self) -> None:
        """Copy it no more."""
        self.num_copies_left = 0


class GrammarCompiler:
    """Makes the constraints of one model. Thread safe."""

    def __init__(
        self, tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: Iterable[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(sorted(set(eos_token_ids)))
        self._mask_filter = MaskFilter(
            num_tokens=tokenizer.vocab_size,
            vocab_size=vocab_size,
            eos_token_ids=self._eos_token_ids,
        )
        self._lock = threading.Lock()
        self._vocabulary: llguidance.LLTokenizer | None = None
        # By their text, the one that was asked for last at the end.
        self._compiled: OrderedDict[str, Future[_Compiled]] = OrderedDict()
        self._num_kept_chars = 0

    def compile(self, params: StructuredOutputsParams) -> GrammarConstraint:
        """A constraint before its first token.

        Raises:
            RequestError: field "structured_outputs": it is malformed, cannot be obeyed, or is
                beyond the limits.
        """
        grammar = output_grammar(params, self._tokenizer)
        if len(grammar) > MAX_GRAMMAR_CHARS:
            raise RequestError(
                "structured_outputs",
                f"the grammar has {len(grammar)} characters; at most {MAX_GRAMMAR_CHARS} are read",
            )
        compiled = self._find(grammar)
        if compiled.error:
            raise RequestError("structured_outputs", compiled.error)
        return GrammarConstraint(
            compiled.matcher.deep_copy(),
            eos_token_ids=frozenset(self._eos_token_ids),
            mask_filter=self._mask_filter if self._mask_filter.is_needed(grammar) else None,
            follows_drafts=not _ONE_WAY.search(grammar),
            on_limit=compiled.spend,
        )

    def _find(self, grammar: str) -> _Compiled:
        with self._lock:
            future = self._compiled.get(grammar)
            is_new = future is None or _is_spent(future)
            if future is None:
                self._num_kept_chars += len(grammar)
            if future is None or is_new:
                future = self._compiled[grammar] = Future()
            self._compiled.move_to_end(grammar)
            while len(self._compiled) > _MAX_KEPT or self._num_kept_chars > _MAX_KEPT_CHARS:
                oldest, _ = self._compiled.popitem(last=False)
                self._num_kept_chars -= len(oldest)
        if is_new:
            try:
                future.set_result(self._compile(grammar))
            except BaseException as error:
                future.set_exception(error)
                raise
        compiled = future.result()
        compiled.num_copies_left -= 1
        return compiled

    def _compile(self, grammar: str) -> _Compiled:
        matcher = llguidance.LLMatcher(
            self._make_vocabulary(), grammar, log_level=0, limits=_limits()
        )
        if not matcher.is_error():
            # The states that the first mask needs are made once, and copied.
            matcher.compute_bitmask()
        return _Compiled(matcher, told_error(matcher), _MAX_COPIES)

    def _make_vocabulary(self) -> llguidance.LLTokenizer:
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = make_vocabulary(
                    self._tokenizer,
                    vocab_size=self._vocab_size,
                    eos_token_ids=self._eos_token_ids,
                )
            return self._vocabulary


def _is_spent(future: Future[_Compiled]) -> bool:
    # One that failed may succeed the next time; one that is being made is waited for.
    if not future.done():
        return False
    return future.exception() is not None or future.result().num_copies_left <= 0


def _limits() -> llguidance.LLParserLimits:
    """What a hostile grammar cannot exceed, per grammar: the library's, but for memory."""
    return llguidance.LLParserLimits(
        max_lexer_states=50_000,  # of 1 to 2 kB
        verbose_errors=False,
    )
