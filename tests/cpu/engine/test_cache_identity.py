"""What keeps the caches of different engines apart, and the bytes behind the cache's numbers."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from stagecoach.cache.cache_stats import PrefixCacheStats
from stagecoach.cache.memory_plan import MemoryNeeds
from stagecoach.config.engine import EngineConfig, SpeculativeConfig
from stagecoach.engine.cache_identity import cache_identity, with_bytes
from stagecoach.resolve import resolve
from tests.cpu.engine.fakes import resolved


def test_the_same_model_has_one_identity_however_it_is_split_and_served() -> None:
    one = cache_identity(resolved())
    assert cache_identity(resolved(pipeline_parallel_size=2, pp_partition=(2, 7))) == one
    assert cache_identity(resolved(tensor_parallel_size=2, max_num_seqs=9)) == one
    assert cache_identity(resolved(max_num_batched_tokens=5, verify_cache=0.5)) == one


@pytest.mark.parametrize(
    "changed",
    [
        {"checkpoint": Path("elsewhere")},
        {"engine": EngineConfig(model="nowhere", load_format="dummy", seed=1)},
        {"engine": EngineConfig(model="nowhere", load_format="dummy", seed=2)},
    ],
)
def test_other_weights_have_another_identity(changed: dict[str, Any]) -> None:
    config = resolved()
    assert cache_identity(dataclasses.replace(config, **changed)) != cache_identity(config)


@pytest.mark.parametrize(
    "changed",
    [
        {"online_quantization": "ptpc_fp8"},
        {"kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": "bfloat16"},
    ],
)
def test_quantised_weights_or_rows_have_another_identity(changed: dict[str, Any]) -> None:
    assert cache_identity(resolved(**changed)) != cache_identity(resolved())


def test_what_ranks_quantise_by_themselves_depends_on_the_split() -> None:
    one, two = (
        cache_identity(resolved(online_quantization="ptpc_fp8", tensor_parallel_size=size))
        for size in (1, 2)
    )
    assert one != two


def test_seeds_of_dummy_weights_are_told_apart() -> None:
    first, second = (cache_identity(resolved(load_format="dummy", seed=seed)) for seed in (1, 2))
    assert first != second
    # Read weights do not depend on it.
    assert cache_identity(resolved(seed=1)) == cache_identity(resolved(seed=2))


def test_an_overridden_key_of_the_model_is_another_model(small_config: Any) -> None:
    plain, other = (small_config(hf_overrides=keys) for keys in ({}, {"rms_norm_eps": 0.25}))
    assert cache_identity(plain) != cache_identity(other)


def test_a_draft_belongs_to_the_pages(small_config: Any, draft_checkpoint: Path) -> None:
    draft = SpeculativeConfig(model=str(draft_checkpoint), num_speculative_tokens=2)
    speculating = cache_identity(small_config(speculative_config=draft))
    assert speculating != cache_identity(small_config())
    longer = dataclasses.replace(draft, num_speculative_tokens=3)
    assert cache_identity(small_config(speculative_config=longer)) == speculating


@pytest.fixture
def small_config(checkpoint: Path) -> Any:
    return lambda **options: resolve(EngineConfig(model=str(checkpoint), **options))


def test_a_number_is_memory_on_every_worker() -> None:
    needs = [
        MemoryNeeds(bytes_per_page=0, bytes_per_slot=1000, available_bytes=0),
        MemoryNeeds(bytes_per_page=30, bytes_per_slot=500, available_bytes=0),
        MemoryNeeds(bytes_per_page=7, bytes_per_slot=0, available_bytes=0),
    ]
    counts = PrefixCacheStats(
        num_hits=4, num_cached_pages=10, num_checkpoints=2, num_host_pages=3, num_host_checkpoints=1
    )
    told = with_bytes(counts, needs)
    assert (told.device_bytes, told.host_bytes) == (10 * 37 + 2 * 1500, 3 * 37 + 1500)
    assert (told.num_hits, told.num_cached_pages) == (4, 10)
    assert with_bytes(PrefixCacheStats(), needs) == PrefixCacheStats()


def test_the_hit_rate_counts_tokens() -> None:
    assert PrefixCacheStats().hit_rate is None
    assert PrefixCacheStats(num_query_tokens=8, num_hit_tokens=6, num_queries=3).hit_rate == 0.75
