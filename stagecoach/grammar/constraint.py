"""One request's place in its grammar: what may come next, behind drafts too.

Owns the matcher and is the only one that moves it. Masks are computed in Rust; many of them in
parallel, without the interpreter's lock. Knows no scheduler and no tensor.
"""

import functools
import itertools
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import llguidance
import numpy as np

from stagecoach.grammar.mask_filter import MaskFilter

# So few are made by the thread that asks, sooner than others wake up where all cores compute.
_FEW_ROWS = 128
_LISTING = re.compile(r"\s*\d+ \| ")
_MAX_ERROR_CHARS = 300
# The place of a schema is known to who wrote it; options of the library are nobody's to give.
_NOISE = re.compile(
    r"^at \d+\(\d+\): (?=failed to compile JSON)| <non-verbose/>$|\. Enable 'coerce_one_of'.*$"
)
_TRANSLATIONS = {"NoExtensionBias": "no text obeys it"}


class GrammarConstraint:
    """A request.Constraint; see there.

    Attributes:
        error: why the grammar could not be followed any further, None as long as it can: its
            limits were reached. What was committed obeys; the request must end here.
    """

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        *,
        eos_token_ids: frozenset[int],
        mask_filter: MaskFilter | None = None,
        follows_drafts: bool = True,
        on_limit: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            mask_filter: for a grammar whose masks let in what is no token.
            follows_drafts: False: nothing is taken back in this grammar, so no draft is tried.
            on_limit: called once a limit of the grammar's is reached.
        """
        self.error: str | None = None
        self._matcher = matcher
        self._mask_filter = mask_filter
        self._follows_drafts = follows_drafts
        self._on_limit = on_limit
        self._eos_token_ids = eos_token_ids
        self._is_ended = False  # an end token was committed

    def num_useful_drafts(self, draft_token_ids: tuple[int, ...]) -> int:
        """See Constraint."""
        if not self._follows_drafts:
            return 0
        text = self._text_of(draft_token_ids)
        num_allowed = self._matcher.validate_tokens(text) if text else 0
        return min(num_allowed + 1, len(draft_token_ids))

    def fill_masks(self, draft_token_ids: tuple[int, ...], masks: memoryview) -> None:
        """See Constraint."""
        fill_all([MaskRows(self, draft_token_ids, first_row=0)], masks)

    def advance(self, token_ids: tuple[int, ...]) -> None:
        """See Constraint. Tokens that the masks did not allow set `error`, as limits do."""
        text = self._text_of(token_ids)
        num_consumed = self._matcher.try_consume_tokens(text) if text else 0
        if num_consumed == len(text) < len(token_ids):
            # An end token may be one of the grammar's own.
            end = token_ids[num_consumed]
            self._is_ended = self._matcher.is_accepting() or self._matcher.consume_token(end)
            num_consumed += self._is_ended
        if self._check() and num_consumed < len(text):
            self.error = (
                f"token {token_ids[num_consumed]} was chosen, which the grammar forbids there"
            )

    @property
    def is_finished(self) -> bool:
        """See Constraint."""
        return self._is_ended

    def _text_of(self, token_ids: tuple[int, ...]) -> list[int]:
        """The tokens before the first that ends the output."""
        for position, token_id in enumerate(token_ids):
            if token_id in self._eos_token_ids:
                return list(token_ids[:position])
        return list(token_ids)

    def _check(self) -> bool:
        """Whether the grammar can still be followed; sets `error` if not."""
        if self.error is None and self._matcher.is_error():
            self.error = told_error(self._matcher)
            self._on_limit()
        return self.error is None


def told_error(matcher: llguidance.LLMatcher) -> str:
    """What is wrong with a grammar, in one line; empty if nothing is.

    The library shows the grammar's lines behind it, which the caller knows.
    """
    lines = itertools.takewhile(_is_no_listing, matcher.get_error().splitlines())
    text = _NOISE.sub("", " ".join(" ".join(lines).split()))
    text = _TRANSLATIONS.get(text, text)
    return text if len(text) <= _MAX_ERROR_CHARS else f"{text[:_MAX_ERROR_CHARS]}…"


class MaskRows(NamedTuple):
    """The window of one request, and the row of the plan's masks where it begins."""

    constraint: GrammarConstraint
    draft_token_ids: tuple[int, ...]
    first_row: int


def fill_all(windows: Sequence[MaskRows], masks: memoryview) -> None:
    """Fill the masks of all windows of a plan.

    A grammar that its limits end sets the `error` of its constraint; its rows then allow the end
    tokens only.

    Args:
        windows: each with its own constraint; they share no row.
        masks: int32 [rows, ceil(V / 32)], contiguous, as of Constraint.fill_masks. All of it is
            written: a row that no window has allows every token.
    """
    masks_RW = np.asarray(masks)
    assert masks_RW.dtype == np.int32 and masks_RW.flags.c_contiguous, "masks must be int32 [R, W]"
    num_rows, num_words = masks_RW.shape
    masks_RW.fill(-1)
    jobs: list[_Job] = []
    for constraint, draft_token_ids, first_row in windows:
        assert first_row + len(draft_token_ids) < num_rows, "a window must fit into the masks"
        jobs.append((constraint._matcher, first_row, constraint._text_of(draft_token_ids)))
    if num_rows <= _FEW_ROWS:
        _fill_here(jobs, masks_RW.ctypes.data, 4 * num_words)
    else:
        _fill_in_threads(jobs, masks_RW.ctypes.data, 4 * num_words, num_rows)
    for constraint, draft_token_ids, first_row in windows:
        if constraint._check() and constraint._mask_filter is not None:
            end_row = first_row + 1 + len(draft_token_ids)
            constraint._mask_filter.apply(masks_RW[first_row:end_row])


# A matcher, the first of its rows, and the drafts behind it.
_Job = tuple[llguidance.LLMatcher, int, list[int]]


def _fill_here(jobs: list[_Job], pointer: int, row_bytes: int) -> None:
    for matcher, first_row, text in jobs:
        row_pointer = pointer + first_row * row_bytes
        matcher.unsafe_compute_mask_ptr(row_pointer, row_bytes)
        num_consumed = 0
        for token_id in text:
            if not matcher.try_consume_tokens([token_id]):
                break
            num_consumed += 1
            row_pointer += row_bytes
            matcher.unsafe_compute_mask_ptr(row_pointer, row_bytes)
        if num_consumed:
            matcher.rollback(num_consumed)


def _fill_in_threads(jobs: list[_Job], pointer: int, row_bytes: int, num_rows: int) -> None:
    bare = [(matcher, first_row) for matcher, first_row, text in jobs if not text]
    drafted = [job for job in jobs if job[2]]
    if bare:
        _executor().unsafe_compute_mask_ptr(bare, pointer, row_bytes, num_rows)
    if drafted:
        _executor().unsafe_compute_mask_ptr_with_draft_token(drafted, pointer, row_bytes, num_rows)


def _is_no_listing(line: str) -> bool:
    return not _LISTING.match(line)


@functools.cache
def _executor() -> llguidance.LLExecutor:
    """The threads that fill masks; one pool in a process."""
    return llguidance.LLExecutor()
