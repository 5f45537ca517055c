"""The support table: what runs on which layout, from the table of refused combinations.

Owns the features and layouts that are told apart, and the table as Markdown, which
`stagecoach support` prints. Refuses nothing itself.
"""

from collections.abc import Sequence
from typing import NamedTuple

from stagecoach.compatibility.rules import TABLE


class SupportRow(NamedTuple):
    """One line of the support table; a cell is "yes" or what must hold."""

    feature: str
    cells: tuple[str, ...]  # one a layout


FEATURES = (
    "Kimi-K3",
    "Kimi-Linear",
    "KDA",
    "MLA",
    "MoE",
    "dense MLP",
    "attention residuals",
    "vocabulary split",
    "float32, bfloat16, float64",
    "MXFP4 experts",
    "online fp8",
    "fp8 cache rows",
    "chunked prefill",
    "continuous batching",
    "CUDA graphs on GPUs",
    "preemption",
    "abort",
    "sampling parameters",
    "logprobs, prompt logprobs",
    "speculation, MLA draft",
    "speculation, GQA draft",
    "confidence schedule, watchdog",
    "rejection acceptance",
    "prefix caching, with and without drafts",
    "host tier of the cache",
    "verified prefix hits",
    "recovery of lost workers",
)

LAYOUTS = (
    ("pp 1, tp 1", frozenset[str]()),
    ("pp > 1", frozenset({"pp"})),
    ("tp > 1", frozenset({"tp"})),
    ("pp > 1, tp > 1", frozenset({"pp", "tp"})),
)


def support_table() -> tuple[SupportRow, ...]:
    """Each feature in each layout: "yes", or the conditions of the rules that limit it."""
    return tuple(
        SupportRow(feature, tuple(_cell(feature, above_one) for _, above_one in LAYOUTS))
        for feature in FEATURES
    )


def _cell(feature: str, above_one: frozenset[str]) -> str:
    limits = [
        rule.requires
        for rule in TABLE
        if feature in rule.features and rule.axes and rule.axes <= above_one
    ]
    return "; ".join(limits) or "yes"


def render_markdown() -> str:
    """The support table, then the refused combinations, as two Markdown tables."""
    layouts = [layout for layout, _ in LAYOUTS]
    support = [(row.feature, *_with_notes(row.cells)) for row in support_table()]
    refused = [(f"`{rule.name}`", rule.requires, rule.reason) for rule in TABLE]
    return (
        _markdown(["", *layouts], support)
        + "\nRefused before anything starts:\n\n"
        + _markdown(["rule", "what must hold", "why"], refused)
    )


def _with_notes(cells: tuple[str, ...]) -> tuple[str, ...]:
    return tuple("yes" if cell == "yes" else f"yes, if {cell}" for cell in cells)


def _markdown(head: list[str], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
