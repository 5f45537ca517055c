"""The few steps that a check runs a model through: fixed texts, cut as an engine cuts them.

Owns the texts, the plans, and where their tokens lie in memory. Every token is known beforehand, so
that the steps can be run layer by layer. They cover what an engine does: two chunks of a prompt, a
window, a window with a draft, and one that folds the accepted draft in.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stagecoach.cache.page_pool import NUM_RESERVED_PAGES
from stagecoach.cache.state_slots import NUM_RESERVED_SLOTS, ZERO_SLOT
from stagecoach.kernels.ragged import StepTensors
from stagecoach.runner.step_inputs import build_step_tensors
from stagecoach.schedule.step_plan import Segment, StepPlan, pack_page_table

TEXTS = (
    "The train left the station at nine. By noon it had crossed the river, and the passengers "
    "were looking out of the windows at the hills, the vineyards and the small white villages.",
    "def greatest_common_divisor(a, b):\n    while b:\n        a, b = b, a % b\n    return a\n",
    '{"city": "Zürich", "temperature": 21.5, "unit": "celsius", "hours": [6, 12, 18]}',
)
MAX_TOKENS = 56
# Of a model that does not fit: each further token has it decode further experts in every layer.
FEW_TOKENS = 16
NUM_DRAFT_TOKENS = 1
BLOCK_SIZE = 64
NUM_SLOTS = NUM_RESERVED_SLOTS + len(TEXTS)
NUM_PAGES = NUM_RESERVED_PAGES + len(TEXTS)
# Ends of the steps, counted from a text's end; the last text token is computed too.
_TAIL = (4, 3, 1, 0)
_LEAST_TOKENS = 12


class CheckStep(NamedTuple):
    """A plan with its tensors, and the place of each token in its text."""

    plan: StepPlan
    tensors: StepTensors

    @property
    def places(self) -> list[tuple[int, int]]:
        """(text, position) of each token on the flat axis."""
        return [
            (segment.request_id, position)
            for segment in self.plan.segments
            for position in range(segment.start, segment.end)
        ]


def made_up_texts(vocab_size: int) -> list[list[int]]:
    """Token ids where no tokenizer makes any."""
    return [
        [(7919 * (place + 1) + 101 * text) % vocab_size for place in range(32 + 8 * text)]
        for text in range(len(TEXTS))
    ]


def make_steps(texts: Sequence[Sequence[int]], max_tokens: int = MAX_TOKENS) -> list[CheckStep]:
    """The steps over some texts, all at once.

    Args:
        texts: token ids; short ones are repeated.
        max_tokens: what is beyond is left out.
    """
    assert len(texts) <= len(TEXTS), f"memory is for {len(TEXTS)} texts"
    assert _LEAST_TOKENS <= max_tokens <= BLOCK_SIZE, f"{max_tokens} tokens of a page"
    whole = [_fitted(text, max_tokens) for text in texts]
    cuts = [[0, len(text) // 2, *(len(text) - tail for tail in _TAIL)] for text in whole]
    steps = []
    for number in range(len(_TAIL) + 1):
        segments = tuple(
            _segment(text_id, text, cut[number], cut[number + 1], number)
            for text_id, (text, cut) in enumerate(zip(whole, cuts, strict=True))
        )
        plan = StepPlan(step=number, segments=segments)
        steps.append(CheckStep(plan, build_step_tensors(plan, BLOCK_SIZE)))
    return steps


def context_rows(texts: Sequence[int], longest: int) -> Tensor:
    """int64 [N, L]: the cache rows of each position of these texts."""
    first_rows = torch.tensor([(NUM_RESERVED_PAGES + text) * BLOCK_SIZE for text in texts])
    return first_rows[:, None] + torch.arange(longest)


def _fitted(text: Sequence[int], max_tokens: int) -> list[int]:
    """As many tokens as the steps take."""
    assert text, "a text without a token"
    repeated = list(text) * -(-_LEAST_TOKENS // len(text))
    return repeated[:max_tokens]


def _segment(text_id: int, text: list[int], start: int, end: int, number: int) -> Segment:
    slot = NUM_RESERVED_SLOTS + text_id
    num_tokens = end - start
    is_last = number == len(_TAIL)
    has_draft = number == len(_TAIL) - 1
    assert num_tokens == 1 + has_draft or number < len(_TAIL) - 2, "a window is a token and drafts"
    return Segment(
        request_id=text_id,
        epoch=0,
        start=start,
        token_ids=tuple(text[start:end]),
        num_draft_tokens=NUM_DRAFT_TOKENS if has_draft else 0,
        read_slot=slot if start else ZERO_SLOT,
        write_slot=slot,
        replay=NUM_DRAFT_TOKENS if is_last else 0,
        page_table=pack_page_table((NUM_RESERVED_PAGES + text_id,)),
        sampling_row=text_id if has_draft else None,
    )
