"""Which steps are captured: the ladder, and the rung that a plan falls on."""

from pathlib import Path
from typing import Any

import pytest

from stagecoach.config.engine import EngineConfig, SpeculativeConfig
from stagecoach.model.tiny import TinyShape, kimi_linear_config, write_tiny_model
from stagecoach.resolve import resolve
from stagecoach.runner.buckets import Bucket, Buckets, bounds_of, make_buckets, pages_of

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder, kimi_linear_config(TinyShape()), seed=1)
    return folder


def resolved(folder: Path, num_drafts: int = 0, **options: Any) -> Any:
    if num_drafts:
        options["speculative_config"] = SpeculativeConfig(
            model="tiny-draft", num_speculative_tokens=num_drafts
        )
    return resolve(EngineConfig(model=str(folder), device="cpu", **options))


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (1, {1}),
        (3, {1, 2, 3}),
        (8, {1, 2, 4, 8}),
        (40, {1, 2, 4, 8, 16, 24, 32, 40}),
        (70, {1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 70}),
        (256, {1, 2, 4, *range(8, 64, 8), *range(64, 257, 16)}),
    ],
)
def test_the_ladder_ends_with_the_largest_batch(
    folder: Path, most: int, expected: set[int]
) -> None:
    buckets = make_buckets(resolved(folder, max_num_seqs=most))
    assert {bucket.num_segments for bucket in buckets.all} == expected
    assert {bucket.width for bucket in buckets.all} == {1}
    sizes = [bucket.num_tokens for bucket in buckets.all]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(
    ("num_drafts", "widths"), [(1, {1, 2}), (4, {1, 2, 4, 5}), (7, {1, 2, 4, 8})]
)
def test_widths_double_up_to_the_widest_window(
    folder: Path, num_drafts: int, widths: set[int]
) -> None:
    buckets = make_buckets(resolved(folder, num_drafts, max_num_seqs=4))
    assert {bucket.width for bucket in buckets.all} == widths
    assert len(buckets.all) == 3 * len(widths)


def test_asked_for_sizes_are_taken_if_a_batch_can_be_that_large(folder: Path) -> None:
    config = resolved(folder, max_num_seqs=10, cudagraph_capture_sizes=(3, 10, 12))
    assert {bucket.num_segments for bucket in make_buckets(config).all} == {3, 10}


@pytest.mark.parametrize(
    ("num_segments", "width", "expected"),
    [
        (1, 1, Bucket(1, 1)),
        (2, 1, Bucket(4, 1)),
        (4, 2, Bucket(4, 2)),
        (5, 3, Bucket(8, 8)),
        (8, 8, Bucket(8, 8)),
        (9, 1, None),
        (1, 9, None),
    ],
)
def test_a_plan_falls_on_the_next_larger_rung(
    num_segments: int, width: int, expected: Bucket | None
) -> None:
    assert Buckets([8, 1, 4], [2, 8, 1]).choose(num_segments, width) == expected


def test_bounds_have_room_for_the_longest_request_and_its_drafts(folder: Path) -> None:
    config = resolved(folder, 3, max_num_seqs=4, max_model_len=128, block_size=16)
    [largest, *_] = make_buckets(config).all
    windows = bounds_of(largest, config).windows
    assert windows is not None
    assert (windows.num_segments, windows.max_length, windows.num_tokens) == (4, 4, 16)
    assert (windows.max_context, windows.max_replay, windows.max_drafts) == (131, 3, 3)
    assert windows.num_saves == 8
    assert pages_of(4, config) == 4 * 9
    uncached = resolved(folder, 3, max_num_seqs=4, enable_prefix_caching=False)
    windows = bounds_of(largest, uncached).windows
    assert windows is not None and windows.num_saves == 0
