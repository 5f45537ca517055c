"""/metrics: names, types and labels against a table, and what it tells of the engine."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as openmetrics_families,
)

from stagecoach.api.operations.request_metrics import length_buckets
from stagecoach.cache.cache_stats import PrefixCacheStats
from stagecoach.engine.messages import EngineStats
from stagecoach.errors import EngineDeadError
from stagecoach.observe.histogram import Histogram
from stagecoach.schedule.speculation_stats import SpeculationStats
from tests.cpu.api.conftest import Server
from tests.cpu.api.operations.metrics_text import ENGINE, TABLE, scrape
from tests.cpu.api.scripted import ScriptedEngine, scripted_server

PAGE = (Path(__file__).parents[4] / "docs" / "metrics.md").read_text(encoding="utf-8")
TEXT = "/v1/completions"

SPECULATION = SpeculationStats(
    num_windows=5,
    num_draft_tokens=10,
    num_accepted_tokens=6,
    accepted_per_position=(4, 2, 0),
    window_lengths=(1, 0, 5, 2),
    num_pauses=1,
)
PREFIX_CACHE = PrefixCacheStats(
    num_query_tokens=90,
    num_hit_tokens=64,
    num_checkpoints=3,
    evictions={"memory": 2},
    device_bytes=1000,
    host_bytes=50,
    num_verified=7,
    num_mismatches=1,
)
FULL: dict[str, Any] = {
    "num_waiting": 4,
    "num_running": 2,
    "num_preemptions": 3,
    "num_recoveries": 2,
    "recovery_seconds": 1.5,
    "num_pages": 20,
    "num_free_pages": 5,
    "num_slots": 9,
    "num_free_slots": 6,
    "stage_busy_seconds": (3.0, 2.0),
    "stage_hop_seconds": (0.0, 1.0),
    "stage_idle_seconds": (1.0, 1.5),
    "num_plans_in_flight": 2,
    "iteration_tokens": Histogram((1.0, 8.0), (2, 3, 1), 40.0),
    "speculation": SPECULATION,
    "prefix_cache": PREFIX_CACHE,
}


def tell_stats(engine: ScriptedEngine, **fields: Any) -> None:
    """Have the engine count this, beside what it counts anyway."""
    plain = engine.stats

    def stats(timeout_seconds: float) -> EngineStats:
        return msgspec.structs.replace(plain(timeout_seconds), **fields)

    engine.stats = stats  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def full(model_folder: Path) -> Iterator[Server]:
    """A server with everything on, that has answered."""
    with scripted_server(model_folder) as (server, engine):
        tell_stats(engine, **FULL)
        engine.say([97] * 5)
        assert server.post(TEXT, prompt="abc", max_tokens=9).status == 200
        yield server


@pytest.mark.parametrize("name", TABLE)
def test_every_name_has_its_type_and_labels(full: Server, name: str) -> None:
    told = scrape(full)
    kind, labels = TABLE[name]
    assert told.types[f"stagecoach:{name}"] == kind
    expected = {*ENGINE, *labels, *(("le",) if kind == "histogram" else ())}
    assert told.labels[f"stagecoach:{name}"] == expected


def test_nothing_else_is_told(full: Server) -> None:
    known = {f"stagecoach:{name}" for name in (*TABLE, "http_requests_total")}
    assert scrape(full).types.keys() == known


def test_the_page_has_them_all() -> None:
    rows = re.findall(r"^\| `stagecoach:(\w+)` \| (\w+) \|([^|]*)\|", PAGE, re.MULTILINE)
    told = {name: (kind, set(re.findall(r"\w+", labels))) for name, kind, labels in rows}
    http = ("counter", {"handler", "method", "status"})
    table = {name: (kind, set(labels)) for name, (kind, labels) in TABLE.items()}
    assert told == table | {"http_requests_total": http}
    assert len(rows) == len(told)


# Field bugs of the kind K07: a counter whose name is not the one that is asked for reads as zero.


def test_counters_end_in_total_once(full: Server) -> None:
    text = full.get("/metrics").body.decode()
    counters = [line.split()[2] for line in text.splitlines() if line.endswith(" counter")]
    assert counters
    for name in counters:
        assert name.endswith("_total") and name.count("_total") == 1
    for line in text.splitlines():
        if not line.startswith("#"):
            assert "_created" not in line.partition("{")[0]


def test_buckets_are_those_of_vllm(full: Server) -> None:
    bounds = {
        name: sorted(
            float(dict(labels)["le"])
            for sample, labels in scrape(full).values
            if sample == f"stagecoach:{name}_bucket"
        )
        for name in ("time_to_first_token_seconds", "request_prompt_tokens")
    }
    first = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5]
    first += [10, 20, 40, 80, 160, 640, 2560, float("inf")]
    assert bounds["time_to_first_token_seconds"] == first
    lengths = [1, 2, 5, 10, 20, 50, 100, 200, 500, float("inf")]
    assert bounds["request_prompt_tokens"] == lengths
    assert length_buckets(100) == (1, 2, 5, 10, 20, 50, 100)


def test_the_engines_counts_are_told(full: Server) -> None:
    told = scrape(full)
    expected = {
        "num_requests_waiting": 4,
        "num_requests_running": 2,
        "num_preemptions_total": 3,
        "num_recoveries_total": 2,
        "recovery_seconds_total": 1.5,
        "kv_cache_usage_perc": 0.75,
        "num_state_slots": 9,
        "num_state_slots_used": 3,
        "num_checkpoint_slots": 7,
        "num_checkpoint_slots_used": 3,
        "prefix_cache_queries_total": 90,
        "prefix_cache_hits_total": 64,
        "prefix_cache_mismatches_total": 1,
        "spec_decode_num_drafts_total": 5,
        "spec_decode_num_draft_tokens_total": 10,
        "spec_decode_num_accepted_tokens_total": 6,
        "plans_in_flight": 2,
        "iteration_tokens_total_count": 6,
        "iteration_tokens_total_sum": 40,
        # 1 window of one token, 5 of three, 2 of four.
        "window_length_count": 8,
        "window_length_sum": 24,
    }
    assert {name: told.value(name) for name in expected} == expected
    assert told.value("iteration_tokens_total_bucket", le="8.0") == 5
    assert told.value("window_length_bucket", le="3.0") == 6
    assert told.value("spec_decode_num_accepted_tokens_per_pos_total", position="1") == 2
    assert told.value("stage_hop_seconds_total", stage="1") == 1.0
    assert told.value("stage_idle_seconds_total", stage="1") == 1.5
    assert told.value("prefix_cache_bytes", tier="host") == 50
    assert told.value("prefix_cache_evictions_total", cause="memory") == 2


def test_openmetrics_is_told_where_it_is_asked_for(full: Server) -> None:
    accept = {"accept": "application/openmetrics-text; version=1.0.0,text/plain;q=0.5"}
    answer = full.call("GET", "/metrics", headers=accept)
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    text = answer.body.decode()
    assert text.endswith("# EOF\n")
    names = {family.name for family in openmetrics_families(text)}
    assert {name.removeprefix("stagecoach:") for name in names} >= {
        name if kind != "counter" else name.removesuffix("_total")
        for name, (kind, _) in TABLE.items()
    }


def test_no_key_is_needed(model_folder: Path) -> None:
    with scripted_server(model_folder, api_keys=("k",)) as (server, _):
        assert server.get("/metrics").status == 200
        assert server.get("/server_info").status == 401
        told = scrape(server)
        key = frozenset({"handler": "other", "method": "GET", "status": "401"}.items())
        assert told.values["stagecoach:http_requests_total", key] == 1


def test_answers_are_counted_by_route_and_status(model_folder: Path) -> None:
    with scripted_server(model_folder) as (server, engine):
        engine.say([97])
        server.post(TEXT, prompt="a")
        server.post(TEXT, prompt="a", stream=True)
        server.post(TEXT, prompt="a", n=0)
        server.get("/v1/models/small")
        server.get("/v1/models/other/name")
        # What a client makes up becomes no label.
        for number in range(3):
            server.get(f"/made/up/{number}")
            server.call(f"MADE{number}", TEXT)
        counts = {
            tuple(sorted(labels)): value
            for (name, labels), value in scrape(server).values.items()
            if name == "stagecoach:http_requests_total"
        }

    def key(handler: str, method: str, status: int) -> tuple[tuple[str, str], ...]:
        return (("handler", handler), ("method", method), ("status", str(status)))

    assert counts == {
        key(TEXT, "POST", 200): 2,
        key(TEXT, "POST", 400): 1,
        key("/v1/models/{name:path}", "GET", 200): 1,
        key("/v1/models/{name:path}", "GET", 404): 1,
        key("other", "GET", 404): 3,
        key(TEXT, "other", 405): 3,
    }


def test_without_an_engine_the_servers_own_counts_are_told(model_folder: Path) -> None:
    with scripted_server(model_folder, is_loaded=False) as (server, engine):
        assert scrape(server).value("engine_up") == 0
        # The first scrape was an answer, too.
        route = {"handler": "/metrics", "method": "GET", "status": "200"}
        key = ("stagecoach:http_requests_total", frozenset(route.items()))
        assert scrape(server).values[key] == 1
        engine.say([97])
        server.run(server.service.load())
        server.post(TEXT, prompt="a")
        assert scrape(server).value("engine_up") == 1
        engine.die(EngineDeadError("it is gone"))
        told = scrape(server)
        assert told.value("engine_up") == 0
        assert told.value("generation_tokens_total") == 1
        assert "stagecoach:num_requests_running" not in told.types
