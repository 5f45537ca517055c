"""What a rule of the table of refused combinations is, and what it judges.

The rules are in `compatibility/rules.py` and `compatibility/quantization_rules.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from stagecoach.config.draft import DraftConfig
from stagecoach.config.engine import EngineConfig
from stagecoach.config.model import ModelConfig

# Name and value of everything that a rule joins, as the caller spells it.
Parts = tuple[tuple[str, object], ...]


class Combination(NamedTuple):
    """What a rule judges: the options, and the facts of the checkpoints that they name."""

    engine: EngineConfig
    model: ModelConfig
    draft: DraftConfig | None  # None: no speculation


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One refused combination."""

    name: str
    features: tuple[str, ...] = ()  # of support_table.FEATURES, limited by this rule
    # Of "pp" and "tp": it can hit only when all of them are above 1.
    axes: frozenset[str] = frozenset()
    requires: str  # what must hold, as words that follow "if" or "unless"
    reason: str
    parts: Callable[[Combination], Parts]
    is_refused: Callable[[Combination], bool]

    def message(self, asked: Combination) -> str:
        joined = " and ".join(f"{name}={value}" for name, value in self.parts(asked))
        return f"{joined}: refused unless {self.requires} ({self.reason})"
