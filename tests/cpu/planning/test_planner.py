"""Plans of published models: what fits, what is said where it does not, options that count."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from stagecoach.config.engine import EngineConfig, SpeculativeConfig
from stagecoach.costs.machine import H200, MACHINES
from stagecoach.errors import ConfigError
from stagecoach.planning.planner import make_plan
from stagecoach.planning.report import Plan
from stagecoach.published import published_folder

pytestmark = pytest.mark.cpu


def plan_of(name: str, gpu_bytes: int | None = None, **options: Any) -> Plan:
    if (draft := options.pop("draft", None)) is not None:
        folder = str(published_folder(draft))
        options["speculative_config"] = SpeculativeConfig(model=folder)
    engine = EngineConfig(model=str(published_folder(name)), **options)
    return make_plan(engine, H200, gpu_bytes)


def weights(made: Plan) -> int:
    return sum(stage.weight_bytes for stage in made.stages)


@pytest.fixture(scope="module")
def kimi_k3() -> Plan:
    """On 64 GPUs."""
    return plan_of(
        "kimi-k3",
        pipeline_parallel_size=8,
        tensor_parallel_size=8,
        max_model_len=131072,
        draft="kimi-k3-dspark",
    )


def test_kimi_k3_fits_64_gpus(kimi_k3: Plan) -> None:
    assert kimi_k3.fits and not kimi_k3.problems and not kimi_k3.remedies
    assert len(kimi_k3.stages) == 8 and sum(kimi_k3.partition) == 93
    assert [stage.kda_layers + stage.mla_layers for stage in kimi_k3.stages] == [*kimi_k3.partition]
    for stage in kimi_k3.stages:
        assert stage.spare_bytes >= 0
        assert stage.total_bytes == sum(
            (
                stage.weight_bytes,
                stage.drafter_bytes,
                stage.page_bytes,
                stage.slot_bytes,
                stage.checkpoint_bytes,
                stage.context_bytes,
                stage.activation_bytes,
                stage.graph_bytes,
            )
        )


def test_all_weights_are_there_once(kimi_k3: Plan) -> None:
    # 2.779 T parameters: packed experts 1.4465 TB, all else in two bytes; what every rank has whole
    # and the router in float32 come on top.
    assert 8 * weights(kimi_k3) == pytest.approx(1.5609e12, rel=0.1)
    assert 8 * weights(kimi_k3) > 1.5609e12


def test_boundaries_are_hidden_blocks_and_taps(kimi_k3: Plan) -> None:
    width, start = 2 * 7168, 0
    for stage in kimi_k3.stages[:-1]:
        start += stage.num_layers
        num_taps = sum(tap < start for tap in (2, 23, 47, 71, 89))
        assert stage.boundary_bytes_per_token == width * (1 + -(-start // 12) + num_taps)
        assert stage.boundary_bytes_per_step == 8 * 8 * stage.boundary_bytes_per_token
    assert kimi_k3.stages[-1].boundary_bytes_per_token == 0


def test_the_draft_is_on_the_last_stage(kimi_k3: Plan) -> None:
    *others, last = kimi_k3.stages
    assert not any(stage.drafter_bytes for stage in others)
    # As docs/drafts.md has it, of rank 0 of 8.
    assert last.drafter_bytes == 1_409_901_572


def test_longer_requests_are_fewer(kimi_k3: Plan) -> None:
    counts = [(item.planned, item.most) for item in kimi_k3.contexts]
    assert counts == sorted(counts, reverse=True)
    assert kimi_k3.contexts[-1].context == 131072 and counts[-1][0] >= 1
    assert all(planned <= most for planned, most in counts)


def test_times_grow_with_requests_and_stages_are_even(kimi_k3: Plan) -> None:
    seconds = [item.step_seconds for item in kimi_k3.decode]
    rates = [item.tokens_per_second for item in kimi_k3.decode]
    assert seconds == sorted(seconds) and rates == sorted(rates)
    of_stages = kimi_k3.decode[-1].stage_seconds
    assert max(of_stages) < 1.25 * min(of_stages)


def test_times_are_of_requests_that_run_at_once() -> None:
    engine = EngineConfig(
        model=str(published_folder("kimi-k3")),
        pipeline_parallel_size=2,
        tensor_parallel_size=8,
        max_model_len=131072,
    )
    made = make_plan(engine, H200, context=130_000)
    at_once = made.contexts[-1].planned
    assert 1 < at_once < made.max_num_seqs
    assert [item.num_requests for item in made.decode] == [1, 8, at_once]
    assert {item.num_requests for item in made.partitions} == {at_once}
    assert made.partitions[0].step_seconds == made.decode[-1].step_seconds


def test_the_planned_partition_is_about_as_good_as_any(kimi_k3: Plan) -> None:
    planned, *others = kimi_k3.partitions
    assert planned.partition == kimi_k3.partition and planned.balances[0] == "planned"
    assert planned.step_seconds < 1.05 * min(item.step_seconds for item in kimi_k3.partitions)
    (for_memory,) = [item for item in kimi_k3.partitions if "memory" in item.balances]
    assert for_memory.most_requests == max(item.most_requests for item in kimi_k3.partitions)
    assert len({item.partition for item in (planned, *others)}) == len(kimi_k3.partitions)


@pytest.mark.parametrize(
    ("options", "smaller"),
    [
        ({"kv_cache_dtype": "fp8"}, "bytes_per_page"),
        ({"online_quantization": "ptpc_fp8"}, "weight_bytes"),
        ({"max_num_seqs": 8}, "slot_bytes"),
        ({"max_num_batched_tokens": 512}, "activation_bytes"),
        ({"enforce_eager": True}, "graph_bytes"),
        ({"tensor_parallel_size": 16}, "bytes_per_slot"),
        ({"enable_prefix_caching": False}, "checkpoint_bytes"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else value,
)
def test_options_that_change_bytes(options: dict[str, Any], smaller: str) -> None:
    shared = {"pipeline_parallel_size": 4, "tensor_parallel_size": 8, "max_model_len": 32768}
    plain, other = plan_of("kimi-k3", **shared), plan_of("kimi-k3", **{**shared, **options})
    for before, after in zip(plain.stages, other.stages, strict=True):
        assert getattr(after, smaller) < getattr(before, smaller)


def test_decoded_experts_take_almost_four_times_as_much() -> None:
    shared = {"pipeline_parallel_size": 8, "tensor_parallel_size": 8, "max_model_len": 32768}
    packed = plan_of("kimi-k3", **shared)
    decoded = plan_of("kimi-k3", mxfp4_experts="decoded", **shared)
    assert 3 < weights(decoded) / weights(packed) < 16 / 4.25
    assert packed.decode[0].step_seconds < decoded.decode[0].step_seconds


def test_a_host_tier_is_shared_out() -> None:
    made = plan_of("kimi-linear-48b", kv_offloading_size=50.0, max_model_len=32768)
    assert made.num_host_pages > 0 and made.num_host_slots > 0
    (stage,) = made.stages
    assert 0.99 * 50 * 2**30 < stage.host_bytes <= 50 * 2**30


def test_weights_that_do_not_fit_name_layouts_that_do() -> None:
    made = plan_of("kimi-k3", tensor_parallel_size=8, max_model_len=131072)
    assert not made.fits and made.num_pages == 0
    assert "stage 0 does not fit" in made.problems[0] and "weights" in made.problems[0]
    assert "--pipeline-parallel-size 2" in made.remedies
    shared = {"max_model_len": 131072, "tensor_parallel_size": 8}
    assert plan_of("kimi-k3", pipeline_parallel_size=2, **shared).fits


def test_smaller_rows_are_a_remedy_where_they_are_enough() -> None:
    made = plan_of("kimi-linear-48b", 112 * 2**30, max_num_seqs=64, max_model_len=500_000)
    assert not made.fits and "--kv-cache-dtype fp8" in made.remedies
    fitting = plan_of(
        "kimi-linear-48b",
        112 * 2**30,
        max_num_seqs=64,
        max_model_len=500_000,
        kv_cache_dtype="fp8",
    )
    assert fitting.fits


def test_too_many_requests_are_told_how_many_would_fit() -> None:
    shared = {"max_model_len": 8192}
    made = plan_of("kimi-linear-48b", 110 * 2**30, max_num_seqs=1024, **shared)
    assert not made.fits
    (fewer,) = [text for text in made.remedies if text.startswith("--max-num-seqs")]
    number = int(fewer.split()[1])
    fitting = plan_of("kimi-linear-48b", 110 * 2**30, max_num_seqs=number, **shared)
    assert fitting.fits
    more = plan_of("kimi-linear-48b", 110 * 2**30, max_num_seqs=number + 1, **shared)
    assert not more.fits


def test_each_option_is_advised_once() -> None:
    made = plan_of("kimi-linear-48b", max_num_seqs=4096, max_model_len=8192)
    assert not made.fits and "fits with" not in made.problems[0]
    options = [text.split()[0] for text in made.remedies]
    assert options.count("--max-num-seqs") == 1


def test_given_bytes_of_pools_are_advised_only_beside_weights_that_fit() -> None:
    shared = {"kv_cache_memory_bytes": 10**6, "max_model_len": 8192}
    small = plan_of("kimi-linear-48b", 79 * 2**30, **shared)
    assert "stage 0 does not fit" in small.problems[0]
    assert not any(text.startswith("--kv-cache-memory-bytes") for text in small.remedies)
    large = plan_of("kimi-linear-48b", 140 * 2**30, **shared)
    (advised,) = [text for text in large.remedies if text.startswith("--kv-cache-memory-bytes ")]
    number = int(advised.split()[1])
    shared["kv_cache_memory_bytes"] = number
    assert plan_of("kimi-linear-48b", 140 * 2**30, **shared).fits


def test_a_balanced_partition_is_a_remedy_for_one_that_is_not() -> None:
    shared = {"pipeline_parallel_size": 2, "max_model_len": 32768}
    made = plan_of("kimi-linear-48b", 80 * 2**30, pp_partition=(25, 2), **shared)
    assert not made.fits
    balanced = ",".join(map(str, plan_of("kimi-linear-48b", 80 * 2**30, **shared).partition))
    assert f"--pp-partition {balanced}" in made.remedies


def test_weights_on_cpus_are_held_against_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def has(in_all: int) -> None:
        memory = SimpleNamespace(total=in_all, available=in_all)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)

    engine = EngineConfig(
        model=str(published_folder("kimi-linear-48b")),
        dtype="bfloat16",
        pipeline_parallel_size=2,
        max_model_len=4096,
        max_num_seqs=1,
        kv_cache_memory_bytes=2**31,
    )
    has(80 * 2**30)
    made = make_plan(engine, None)
    assert not made.fits and "the host does not hold its workers: 91." in made.problems[0]
    has(100 * 2**30)
    assert make_plan(engine, None).fits
    # Of two hosts each holds one stage.
    has(60 * 2**30)
    assert make_plan(replace(engine, nnodes=2), None).fits
    assert not make_plan(engine, None).fits


@pytest.mark.parametrize(
    "options",
    [{"num_gpu_blocks_override": 10**6}, {"kv_cache_memory_bytes": 200 * 2**30}],
    ids=lambda options: next(iter(options)),
)
def test_pools_that_options_fix_are_held_against_the_gpu(options: dict[str, Any]) -> None:
    made = plan_of("kimi-linear-48b", max_num_seqs=1024, max_model_len=1 << 20, **options)
    assert not made.fits
    assert "--" + next(iter(options)).replace("_", "-") in made.problems[0]


def test_another_gpu_has_less_and_is_scaled() -> None:
    engine = EngineConfig(
        model=str(published_folder("kimi-linear-48b")),
        tensor_parallel_size=2,
        max_model_len=32768,
        max_num_seqs=256,
    )
    h200, h100 = (make_plan(engine, MACHINES[name]) for name in ("h200", "h100"))
    assert h200.is_measured and not h100.is_measured
    assert h100.num_pages < h200.num_pages
    assert h100.decode[-1].step_seconds > h200.decode[-1].step_seconds


def test_refused_combinations_stay_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tensor-parallel-size=5"):
        plan_of("kimi-k3", tensor_parallel_size=5)


def test_patterns_of_what_is_never_quantised_are_refused() -> None:
    options: dict[str, Any] = {"online_quantization": "ptpc_fp8"}
    with pytest.raises(ConfigError, match=r"include: the pattern 'lm_head\.\*' matches none of"):
        plan_of("kimi-linear-48b", **options, online_quantization_include=("lm_head.*",))
    plan_of("kimi-linear-48b", **options, online_quantization_include=("*.layers.26.*",))
