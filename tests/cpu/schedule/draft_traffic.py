"""Simulated traffic under a DraftPolicy: texts that are easy or hard to draft, and the time spent.

There is no scheduler here: all requests alive are in every plan. Time is the cost table's.
"""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stagecoach.config.draft import DraftConfig, DraftGqaConfig
from stagecoach.config.engine import ResolvedSpeculation
from stagecoach.config.model import Taps
from stagecoach.schedule.draft_policy import Candidate, DraftPolicy
from stagecoach.schedule.step_cost import Curve, StageCost, StepCost, StepShape


def speculation(
    num_places: int = 7,
    *,
    schedule: bool = True,
    watchdog: bool = True,
    acceptance: str = "shared",
    temperatures: tuple[float, ...] = (),
) -> ResolvedSpeculation:
    draft = DraftConfig(
        taps=Taps((0,)),
        hidden_size=8,
        vocab_size=16,
        num_layers=1,
        attention=DraftGqaConfig(num_heads=1, num_kv_heads=1, head_dim=4),
        rope=None,
        is_causal=False,
        intermediate_size=8,
        rms_norm_eps=1e-5,
        has_tap_norms=False,
        markov_rank=4,
        has_confidence_head=True,
        confidence_reads_markov=True,
        confidence_temperatures=temperatures,
        mask_token_id=15,
        block_length=None,
    )
    return ResolvedSpeculation(
        draft=draft,
        checkpoint=Path("a-draft"),
        num_speculative_tokens=num_places,
        acceptance=acceptance,
        has_confidence_schedule=schedule,
        has_watchdog=watchdog,
        synthetic_acceptance_length=None,
    )


def step_cost(
    *,
    token: float = 0.1,
    width: float = 0.05,
    block: float = 0.4,
    block_token: float = 0.02,
    num_stages: int = 1,
) -> StepCost:
    """A plain step of one token costs 1, of each further one `token` more."""
    stages = [
        StageCost(
            Curve(
                [1, 2, 1024],
                [1 / num_stages, (1 + token) / num_stages, (1 + 1023 * token) / num_stages],
            ),
            Curve([1, 2, 64], [0, width / num_stages, 63 * width / num_stages]),
        )
        for _ in range(num_stages)
    ]
    blocks = Curve([0, 1, 64], [0, block, block + 63 * block_token])
    return StepCost(stages, blocks)


@dataclass
class Text:
    """One request: how many tokens it wants, and how often its drafts are right."""

    num_tokens: int
    rate: float
    has_confidences: bool = True
    num_done: int = 0
    drafts: tuple[float, ...] | None = None  # their confidences; None: none at hand


@dataclass
class Run:
    """What traffic came to."""

    seconds: float = 0.0
    plain_seconds: float = 0.0
    num_block_passes: int = 0
    lengths: list[list[int]] = field(default_factory=list)

    @property
    def speedup(self) -> float:
        return self.plain_seconds / self.seconds


def run(
    policy: DraftPolicy,
    cost: StepCost,
    texts: Sequence[Text],
    *,
    num_at_once: int,
    num_places: int = 7,
    budget: int = 1024,
    seed: int = 0,
) -> Run:
    """Serve all texts, so many at once, and compare with plain decoding.

    Args:
        budget: tokens of a plan; what is left beside the anchors goes to drafts.
    """
    noise = random.Random(seed)
    waiting = deque(enumerate(texts))
    running: dict[int, Text] = {}
    result = Run()
    while waiting or running:
        while waiting and len(running) < num_at_once:
            number, text = waiting.popleft()
            running[number] = text
            policy.should_propose(number)
        room = max(0, budget - len(running)) // len(running)
        candidates = [
            Candidate(
                number,
                text.drafts if text.drafts and text.has_confidences else (),
                min(len(text.drafts or ()), text.num_tokens - text.num_done - 1, room),
            )
            for number, text in running.items()
        ]
        lengths = policy.choose_lengths(candidates, 0)
        result.lengths.append(lengths)
        proposing = [
            number
            for number, text in running.items()
            if text.num_tokens - text.num_done >= 3 and policy.should_propose(number)
        ]
        shape = StepShape(len(running) + sum(lengths), 1 + max(lengths), len(proposing))
        result.seconds += cost.seconds(shape)
        result.num_block_passes += bool(proposing)
        for (number, text), length in zip(list(running.items()), lengths, strict=True):
            num_accepted = 0
            while num_accepted < length and noise.random() < text.rate:
                num_accepted += 1
            text.num_done += 1 + num_accepted
            if length:
                policy.note_window(number, length, num_accepted)
            else:
                policy.note_plain(number)
            text.drafts = None
            if number in proposing:
                text.drafts = (text.rate,) * num_places
                policy.note_proposal(number, num_places)
            if text.num_done >= text.num_tokens:
                policy.forget(number)
                del running[number]
    # The same tokens, one a step.
    left = deque(text.num_done for text in texts)
    alive: list[int] = []
    while left or alive:
        while left and len(alive) < num_at_once:
            alive.append(left.popleft())
        result.plain_seconds += cost.seconds(StepShape(len(alive), 1, 0))
        alive = [count - 1 for count in alive if count > 1]
    return result
