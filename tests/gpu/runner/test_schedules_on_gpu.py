"""Whole engines on a GPU: every schedule gives the tokens of the CPU's float64.

Float32, so that the noise of a batch's shape is far below nearly every margin: where an answer
parts from the CPU's, the CPU's two best tokens must have been that close. Stages are threads that
share the GPU. Free memory holds NaN.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stagecoach.config.engine import SpeculativeConfig
from stagecoach.draft.tiny import TinyDraftShape, mla_draft_config, write_tiny_draft
from stagecoach.model.tiny import (
    TinyShape,
    kimi_k3_config,
    kimi_linear_config,
    write_tiny_model,
)
from stagecoach.request import SamplingParams
from stagecoach.runner.graphs import StepGraphs
from tests.cpu.engine.schedules import Answer, Ask, run, start_client

SHAPE = TinyShape(num_layers=4, mla_layers=(2, 3), head_dim=32, block_size=2, max_length=512)
MODELS = {"kimi_k3": kimi_k3_config, "kimi_linear": kimi_linear_config}
NUM_TOKENS = 24
# Of log-probability, between the two best tokens.
NOISE = 1e-3

GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.8, seed=5, max_tokens=NUM_TOKENS, ignore_eos=True)
GENERAL = SamplingParams(
    temperature=0.9, seed=6, top_p=0.8, repetition_penalty=1.2, max_tokens=NUM_TOKENS
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both models, and a draft for them."""
    folder = tmp_path_factory.mktemp("models")
    for name, config in MODELS.items():
        write_tiny_model(folder / name, config(SHAPE), seed=3)
    draft = mla_draft_config(TinyDraftShape(taps=(3, -1, 1), nope_dim=16, rope_dim=16))
    write_tiny_draft(folder / "draft", draft, seed=4)
    return folder


@pytest.fixture
def num_replays(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often graphs of layers and of ends were replayed."""
    counts = {"replay_layers": 0, "replay_end": 0}

    def counted(name: str) -> Any:
        original = getattr(StepGraphs, name)

        def call(self: StepGraphs, *arguments: Any) -> Any:
            counts[name] += 1
            return original(self, *arguments)

        return call

    for name in counts:
        monkeypatch.setattr(StepGraphs, name, counted(name))
    return counts


def prompt(number: int, length: int) -> tuple[int, ...]:
    return tuple((31 * place + 17 * number) % 256 for place in range(length))


def asks(params: Sequence[SamplingParams] = (GREEDY, DRAWN, GREEDY)) -> list[Ask]:
    """Prompts around the page size of 8, from one token on."""
    lengths = (1, 8, 9, 23, 40, 64)
    return [
        Ask(prompt(number, length), params[number % len(params)])
        for number, length in enumerate(lengths)
    ]


def answers(checkpoint: Path, wanted: Sequence[Ask], **options: Any) -> list[Answer]:
    client = start_client(checkpoint, **options)
    try:
        return run(client, wanted, timeout_seconds=300.0)
    finally:
        client.close()


def on_gpu(checkpoint: Path, wanted: Sequence[Ask], **options: Any) -> list[Answer]:
    defaults = {"dtype": "float32", "device": "cuda", "max_num_batched_tokens": 48}
    return answers(checkpoint, wanted, **(defaults | options))


def assert_agree(
    checkpoint: Path,
    wanted: Sequence[Ask],
    got: Sequence[Answer],
    noise: float = NOISE,
    least_share: float = 0.8,
    **options: Any,
) -> None:
    """With the CPU, up to a token that was a close call there, in so many of all tokens."""
    told = [ask._replace(params=msgspec.structs.replace(ask.params, logprobs=2)) for ask in wanted]
    num_equal = num_tokens = 0
    reference = answers(checkpoint, told, device="cpu", **options)
    for ask, ours, theirs in zip(wanted, got, reference, strict=True):
        num_tokens += len(theirs.token_ids)
        for place, (token, expected) in enumerate(
            zip(ours.token_ids, theirs.token_ids, strict=False)
        ):
            if token != expected:
                # Drawn tokens have a margin, too, but nobody tells it.
                first, second = theirs.logprobs[place].top_logprobs[:2]
                assert not ask.params.is_greedy or first - second < noise, (place, ours.token_ids)
                break
            num_equal += 1
    assert num_equal > least_share * num_tokens


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"pipeline_parallel_size": 2}])
def test_captured_or_not_and_over_stages_the_tokens_are_the_cpus(
    folder: Path, num_replays: dict[str, int], model: str, options: dict[str, Any]
) -> None:
    wanted = asks()
    assert_agree(folder / model, wanted, on_gpu(folder / model, wanted, **options))
    is_eager = options.get("enforce_eager", False)
    assert (num_replays["replay_layers"] > 0) == (num_replays["replay_end"] > 0) == (not is_eager)


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"pipeline_parallel_size": 2}])
def test_drafts_change_no_token(
    folder: Path, num_replays: dict[str, int], options: dict[str, Any]
) -> None:
    wanted = asks()
    speculation = SpeculativeConfig(
        model=str(folder / "draft"), num_speculative_tokens=3, watchdog=False
    )
    checkpoint = folder / "kimi_k3"
    got = on_gpu(checkpoint, wanted, speculative_config=speculation, **options)
    assert_agree(checkpoint, wanted, got)
    assert sum(answer.num_windows for answer in got) > 0
    assert (num_replays["replay_end"] > 0) == (not options.get("enforce_eager", False))


@pytest.mark.parametrize(
    ("formats", "noise", "least_share"),
    [
        ({"mxfp4_experts": "packed"}, NOISE, 0.8),
        ({"mxfp4_experts": "decoded"}, NOISE, 0.8),
        # The code of an input or a row flips now and then, by a sixteenth of its value, and with
        # it the choice of an expert. On a CPU float32 parts from float64 in one of ten tokens so.
        ({"online_quantization": "ptpc_fp8"}, math.inf, 0.5),
        ({"kv_cache_dtype": "fp8"}, math.inf, 0.5),
    ],
    ids=lambda value: next(iter(value.values())) if isinstance(value, dict) else None,
)
def test_quantised_models_give_the_tokens_of_the_cpus(
    folder: Path,
    num_replays: dict[str, int],
    formats: dict[str, Any],
    noise: float,
    least_share: float,
) -> None:
    """The draft is quantised, too, which changes no token."""
    wanted, checkpoint = asks(), folder / "kimi_k3"
    speculation = SpeculativeConfig(
        model=str(folder / "draft"),
        num_speculative_tokens=3,
        watchdog=False,
        online_quantization="follow" if "online_quantization" in formats else "none",
        kv_cache_dtype=formats.get("kv_cache_dtype", "auto"),
    )
    got = on_gpu(checkpoint, wanted, speculative_config=speculation, **formats)
    assert_agree(checkpoint, wanted, got, noise, least_share, **formats)
    assert sum(answer.num_windows for answer in got) > 0
    assert num_replays["replay_layers"] > 0


@pytest.mark.parametrize("is_eager", [False, True])
def test_chained_or_not_the_tokens_are_the_same(folder: Path, *, is_eager: bool) -> None:
    """With requests whose steps a graph cannot end among them."""
    wanted = asks((GREEDY, DRAWN, GENERAL))
    chained, plain = (
        on_gpu(folder / "kimi_linear", wanted, async_scheduling=is_chaining, enforce_eager=is_eager)
        for is_chaining in (True, False)
    )
    assert_agree(folder / "kimi_linear", wanted, chained)
    num_equal = sum(
        one.token_ids == other.token_ids for one, other in zip(chained, plain, strict=True)
    )
    # Plans are composed otherwise, so that a close call may fall otherwise.
    assert num_equal >= len(wanted) - 1


def test_forced_acceptance_gives_as_many_tokens_as_were_asked_for(folder: Path) -> None:
    wanted = asks([GREEDY])
    speculation = SpeculativeConfig(
        model=str(folder / "draft"), num_speculative_tokens=3, synthetic_acceptance_length=2.5
    )
    got = on_gpu(folder / "kimi_k3", wanted, speculative_config=speculation)
    assert [len(answer.token_ids) for answer in got] == [NUM_TOKENS] * len(wanted)
    num_windows = sum(answer.num_windows for answer in got)
    num_accepted = sum(answer.num_accepted_tokens for answer in got)
    assert 1.0 < num_accepted / num_windows < 2.0


def test_requests_that_a_graph_cannot_end_run_its_layers(
    folder: Path, num_replays: dict[str, int]
) -> None:
    wanted = asks([GENERAL, GREEDY])
    checkpoint = folder / "kimi_linear"
    assert_agree(checkpoint, wanted, on_gpu(checkpoint, wanted))
    assert num_replays["replay_layers"] > num_replays["replay_end"]


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_hit_changes_no_token(folder: Path, num_stages: int) -> None:
    checkpoint = folder / "kimi_k3"
    first = asks([GREEDY])
    client = start_client(
        checkpoint, dtype="float32", device="cuda", pipeline_parallel_size=num_stages
    )
    try:
        told = run(client, first, timeout_seconds=300.0)
        further = [
            Ask(ask.prompt_token_ids + answer.token_ids + (7, 8, 9), GREEDY)
            for ask, answer in zip(first, told, strict=True)
        ]
        got = run(client, further, timeout_seconds=300.0)
    finally:
        client.close()
    assert all(answer.num_cached_tokens > 0 for answer in got[-3:])
    assert_agree(checkpoint, further, got)


def test_a_preempted_request_goes_on_with_the_same_tokens(folder: Path) -> None:
    checkpoint = folder / "kimi_k3"
    wanted = asks([GREEDY])
    # Pages of 8 tokens: fewer than all six can hold at once.
    got = on_gpu(checkpoint, wanted, num_gpu_blocks_override=20, max_model_len=96)
    assert_agree(checkpoint, wanted, got)
    assert any(answer.preemptions for answer in got)


def test_what_is_evicted_comes_back_from_the_host(folder: Path) -> None:
    checkpoint = folder / "kimi_linear"
    wanted = asks([GREEDY])
    client = start_client(
        checkpoint,
        dtype="float32",
        device="cuda",
        num_gpu_blocks_override=18,
        max_model_len=96,
        kv_offloading_size=0.01,
    )
    try:
        for _ in range(2):
            got = run(client, wanted, timeout_seconds=300.0)
        stats = client.stats().prefix_cache
    finally:
        client.close()
    assert stats is not None and stats.num_stored and stats.num_loaded
    assert_agree(checkpoint, wanted, got)
