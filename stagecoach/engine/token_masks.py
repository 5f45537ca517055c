"""The masks of a plan's constrained rows, made while its forward pass runs.

Reads constraints and advances none: what was committed when the plan was made still is all there
is, since no result is applied in between. Knows no logits.
"""

from array import array
from typing import NamedTuple

from stagecoach.engine.messages import TokenMasks
from stagecoach.request import Constraint
from stagecoach.schedule.plan_draft import PlanInFlight
from stagecoach.schedule.verify_window import VerifyWindow

_WORD_BITS = 32


class _Window(NamedTuple):
    """The rows of one segment among those of all."""

    constraint: Constraint
    draft_token_ids: tuple[int, ...]
    first_row: int


def token_masks(in_flight: PlanInFlight, vocab_size: int) -> TokenMasks | None:
    """What the sampling worker waits for behind this plan; None if it does not.

    Args:
        vocab_size: width of the logits.
    """
    plan = in_flight.plan
    windows: list[_Window] = []
    num_rows = 0
    for request, segment in zip(in_flight.requests, plan.segments, strict=True):
        if segment.is_constrained:
            assert request.constraint is not None, f"no grammar: {request}"
            drafts = VerifyWindow.of(segment).draft_token_ids
            windows.append(_Window(request.constraint, drafts, num_rows))
            num_rows += 1 + len(drafts)
    if not windows:
        return None
    num_words = -(-vocab_size // _WORD_BITS)
    words = array("i", bytes(4 * num_rows * num_words))
    _fill(windows, memoryview(words).cast("B").cast("i", (num_rows, num_words)))
    return TokenMasks(step=plan.step, masks=words.tobytes())


def _fill(windows: list[_Window], masks: memoryview) -> None:
    """Grammars together, without the interpreter; constraints of another make one by one."""
    # Loaded by now, if there is any; an engine without grammars spares itself the library.
    from stagecoach.grammar.constraint import GrammarConstraint, MaskRows, fill_all

    compiled = [
        MaskRows(constraint, drafts, first_row)
        for constraint, drafts, first_row in windows
        if isinstance(constraint, GrammarConstraint)
    ]
    if len(compiled) == len(windows):
        fill_all(compiled, masks)
        return
    num_words = masks.nbytes // len(masks) // masks.itemsize
    view = masks.cast("B")
    for constraint, drafts, first_row in windows:
        first, end = (4 * num_words * row for row in (first_row, first_row + 1 + len(drafts)))
        constraint.fill_masks(drafts, view[first:end].cast("i", (1 + len(drafts), num_words)))
