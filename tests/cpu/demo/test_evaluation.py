"""Solved examples before a question: never one that is asked, and the same for all questions."""

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stagecoach.demo.evaluation import draw_shots, render_prompt
from stagecoach.demo.tasks import FAMILIES, generate
from stagecoach.text.chat_format import render
from stagecoach.text.tokenizer import Tokenizer, load_tokenizer

DEMO = Path(__file__).parents[3] / "stagecoach" / "demo" / "checkpoint"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(DEMO)


@pytest.fixture(scope="module")
def llm(tokenizer: Tokenizer) -> Any:
    """All of an LLM that rendering needs."""
    return SimpleNamespace(render_chat=functools.partial(render, tokenizer))


def shared_tokens(prompt: list[int], other: list[int]) -> int:
    pairs = enumerate(zip(prompt, other, strict=False))
    return next(place for place, (one, two) in pairs if one != two)


@pytest.mark.parametrize("family", FAMILIES)
def test_shots_are_never_asked_and_repeat_themselves(family: str) -> None:
    shots = draw_shots(family, 1, 5)
    assert shots == draw_shots(family, 1, 5) != draw_shots(family, 2, 5)
    assert len(shots) == 5
    # A prompt's own hash decides, so no seed can draw one of them as a question.
    assert all(shot.split == "train" for shot in shots)
    assert draw_shots(family, 1, 0) == ()


@pytest.mark.parametrize("family", FAMILIES)
def test_questions_of_a_family_share_the_shots_and_no_more(
    family: str, llm: Any, tokenizer: Tokenizer
) -> None:
    shots = draw_shots(family, 1, 3)
    prompts = [render_prompt(llm, generate(family, 1, index), shots) for index in range(4)]
    alone = [render_prompt(llm, generate(family, 1, index)) for index in range(4)]
    num_shared = min(shared_tokens(prompts[0], other) for other in prompts[1:])
    for shot in shots:
        reply = tokenizer.encode(shot.expected.content)
        assert any(
            prompts[0][place : place + len(reply)] == reply for place in range(num_shared)
        ), "its answer stands in what is shared"
    for prompt, question in zip(prompts, alone, strict=True):
        assert num_shared > len(prompt) - len(question) - 60
        assert len(prompt) > len(question) + num_shared // 2


def test_tools_are_declared_where_they_are_used_first(llm: Any, tokenizer: Tokenizer) -> None:
    """At the front they would differ from question to question."""
    prompt = render_prompt(llm, generate("tool_calls", 1, 0), draw_shots("tool_calls", 1, 2))
    late = tokenizer.encode("## New Tools Available")
    places = [at for at in range(len(prompt)) if prompt[at : at + len(late)] == late]
    assert len(places) == 3
