"""What one cache has counted and the next goes on with."""

from stagecoach.cache.cache_stats import PrefixCacheStats


def test_counts_add_up_and_the_present_does_not() -> None:
    earlier = PrefixCacheStats(
        num_queries=5,
        num_hit_tokens=64,
        num_query_tokens=100,
        num_stored=3,
        num_verified=2,
        num_checkpoints=7,
        num_cached_pages=9,
        device_bytes=1000,
        evictions={"memory": 4, "reset": 1},
    )
    now = PrefixCacheStats(
        num_queries=1,
        num_query_tokens=28,
        num_loaded=1,
        num_checkpoints=2,
        evictions={"memory": 1, "quarantine": 2},
    )
    told = now.after(earlier)
    assert (told.num_queries, told.num_query_tokens, told.num_hit_tokens) == (6, 128, 64)
    assert (told.num_stored, told.num_loaded, told.num_verified) == (3, 1, 2)
    assert (told.num_checkpoints, told.num_cached_pages, told.device_bytes) == (2, 0, 0)
    assert told.evictions == {"memory": 5, "reset": 1, "quarantine": 2}
    assert told.hit_rate == 0.5
    assert now.after(PrefixCacheStats()) == now


def test_every_count_grows_over_caches() -> None:
    now = {"num_checkpoints", "num_cached_pages", "num_host_checkpoints", "num_host_pages"}
    numbers = set(PrefixCacheStats.__struct_fields__) - {"evictions"}
    ones = PrefixCacheStats(**dict.fromkeys(numbers, 1))
    doubled = {name for name in numbers if getattr(ones.after(ones), name) == 2}
    assert numbers - doubled == now | {"device_bytes", "host_bytes"}
