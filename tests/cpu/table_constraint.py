"""A constraint that a person can check: an automaton over token ids, state by state.

It stands where a compiled grammar stands, and forgives nothing: a token that is not allowed, or
one behind the end, fails the test that committed it.
"""

from random import Random
from typing import Any, NamedTuple

import pytest

from stagecoach.engine import compiling
from stagecoach.errors import RequestError
from stagecoach.request import StructuredOutputsParams

# The state behind an end token.
ENDED = -1

Table = dict[int, dict[int, int]]  # state -> token -> next state


class TableConstraint:
    """Follows a table from state 0."""

    def __init__(self, table: Table, vocab_size: int) -> None:
        self._table = table
        self._vocab_size = vocab_size
        self.state = 0
        self.committed: list[int] = []
        self.error: str | None = None

    def num_useful_drafts(self, draft_token_ids: tuple[int, ...]) -> int:
        state = self.state
        for count, token_id in enumerate(draft_token_ids, start=1):
            if token_id not in self._table.get(state, {}):
                return count
            state = self._table[state][token_id]
        return len(draft_token_ids)

    def fill_masks(self, draft_token_ids: tuple[int, ...], masks: memoryview) -> None:
        num_words = -(-self._vocab_size // 32)
        assert (masks.format, masks.itemsize, masks.shape) == (
            "i",
            4,
            (1 + len(draft_token_ids), num_words),
        )
        everything = bytes([255]) * (4 * num_words)
        state: int | None = self.state
        rows = bytearray()
        for token_id in (*draft_token_ids, None):
            allowed = {} if state is None else self._table.get(state, {})
            bits = sum(1 << allowed_id for allowed_id in allowed)
            rows += bits.to_bytes(4 * num_words, "little") if allowed else everything
            state = None if token_id is None else allowed.get(token_id)
        masks.cast("B")[:] = rows

    def advance(self, token_ids: tuple[int, ...]) -> None:
        for token_id in token_ids:
            allowed = self._table.get(self.state, {})
            assert token_id in allowed, f"{token_id} behind {self.committed}: {sorted(allowed)}"
            self.state = allowed[token_id]
            self.committed.append(token_id)

    @property
    def is_finished(self) -> bool:
        return not self._table.get(self.state)


class Automaton(NamedTuple):
    """What a random table is drawn from."""

    seed: int
    vocab_size: int
    end_token_id: int
    num_states: int = 6
    num_tokens: int = 9  # allowed in each state
    end_share: float = 0.3  # of the states that an end token may follow

    def table(self) -> Table:
        random = Random(self.seed)
        tokens = [token for token in range(self.vocab_size) if token != self.end_token_id]
        table: Table = {ENDED: {}}
        for state in range(self.num_states):
            chosen = random.sample(tokens, self.num_tokens)
            table[state] = {token: random.randrange(self.num_states) for token in chosen}
            if state and random.random() < self.end_share:
                table[state][self.end_token_id] = ENDED
        return table


def line(*token_ids: int) -> Table:
    """The table that allows these tokens, in this order, and nothing else."""
    return {state: {token_id: state + 1} for state, token_id in enumerate(token_ids)}


def obeys(table: Table, token_ids: tuple[int, ...]) -> bool:
    state = 0
    for token_id in token_ids:
        if token_id not in table.get(state, {}):
            return False
        state = table[state][token_id]
    return True


class TableCompiler:
    """Compiles `regex` "table N" into table N of those it was given."""

    def __init__(self, tables: list[Table], vocab_size: int) -> None:
        self._tables = tables
        self._vocab_size = vocab_size

    def compile(self, params: StructuredOutputsParams) -> TableConstraint:
        assert params.regex is not None
        word, number = params.regex.split()
        if word != "table":
            raise RequestError("structured_outputs", f"regex: no table is called {params.regex!r}")
        return TableConstraint(self._tables[int(number)], self._vocab_size)


def table(number: int) -> StructuredOutputsParams:
    """What a TableCompiler compiles into its table of this number."""
    return StructuredOutputsParams(regex=f"table {number}")


def use_tables(monkeypatch: pytest.MonkeyPatch, tables: list[Table]) -> None:
    """Engines of threads that start from here on compile these."""

    def load_compiler(config: Any) -> TableCompiler:
        return TableCompiler(tables, config.model.vocab_size)

    monkeypatch.setattr(compiling, "load_compiler", load_compiler)
