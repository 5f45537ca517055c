"""EngineConfig and its parts: ranges of single options, and that nothing writes them."""

import dataclasses
import math
from typing import Any

import pytest

from stagecoach.config.engine import EngineConfig, SpeculativeConfig, option
from stagecoach.errors import ConfigError

_COUNTS = (
    "pipeline_parallel_size",
    "tensor_parallel_size",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "kv_cache_memory_bytes",
    "num_gpu_blocks_override",
    "num_threads",
)
_CHOICES = (
    *("dtype", "device", "load_format", "distributed_executor_backend", "log_level"),
    *("mxfp4_experts", "online_quantization", "kv_cache_dtype"),
)


@pytest.mark.parametrize("name", _COUNTS)
@pytest.mark.parametrize("value", [0, -1, True, 1.5, "2"])
def test_a_count_below_one_or_of_another_type_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{option(name)}={value!r}"):
        EngineConfig(model="demo", **{name: value})


@pytest.mark.parametrize("name", _COUNTS)
def test_the_least_count_is_accepted(name: str) -> None:
    # A request needs room for a prompt token and an output token.
    least = 2 if name == "max_model_len" else 1
    assert getattr(EngineConfig(model="demo", **{name: least}), name) == least


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_model_len", 1),
        ("launcher", "mpirun"),
        ("nnodes", 0),
        ("node_rank", -1),
        ("master_port", 0),
        ("master_port", 65536),
        ("distributed_timeout_seconds", 0),
        ("seed", -1),
        ("seed", "a"),
        ("seed", 2**31),
        ("debug_poison", "no"),
        ("enable_prefix_caching", None),
        ("enable_prefix_caching", 1),
        ("state_checkpoint_interval", -1),
        ("state_checkpoint_interval", 0.5),
        ("state_checkpoint_interval", None),
        ("max_state_checkpoints", -1),
        ("max_state_checkpoints", True),
        ("kv_offloading_size", 0),
        ("kv_offloading_size", -0.5),
        ("kv_offloading_size", math.inf),
        ("kv_offloading_size", math.nan),
        ("kv_offloading_size", "4"),
        ("gpu_memory_utilization", 0),
        ("gpu_memory_utilization", 1.01),
        ("gpu_memory_utilization", True),
        ("enforce_eager", 1),
        ("async_scheduling", "yes"),
        ("cudagraph_capture_sizes", ()),
        ("cudagraph_capture_sizes", [1, 2]),
        ("cudagraph_capture_sizes", (4, 0)),
        ("cudagraph_capture_sizes", (True,)),
        ("verify_cache", -0.01),
        ("verify_cache", 1.01),
        ("verify_cache", math.nan),
        ("verify_cache", True),
        ("verify_cache", None),
        ("hf_overrides", [1]),
        ("online_quantization_include", "*"),
        ("online_quantization_include", ()),
        ("online_quantization_exclude", ("",)),
        ("online_quantization_exclude", (1,)),
        ("speculative_config", {"model": "demo-draft"}),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=option(name)):
        EngineConfig(model="demo", **{name: value})


@pytest.mark.parametrize("name", _CHOICES)
def test_an_unknown_choice_is_refused_and_the_choices_are_named(name: str) -> None:
    default = getattr(EngineConfig(model="demo"), name)
    with pytest.raises(ConfigError, match=f"{option(name)}='neither'.*{default}"):
        EngineConfig(model="demo", **{name: "neither"})


def test_the_cache_is_on_unless_it_is_switched_off() -> None:
    config = EngineConfig(model="demo")
    assert config.enable_prefix_caching and config.state_checkpoint_interval == 512
    assert (config.max_state_checkpoints, config.kv_offloading_size) == (None, None)
    assert config.verify_cache == 0.0


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("state_checkpoint_interval", (0, 1, 10**6)),
        ("max_state_checkpoints", (0, 1, None)),
        ("kv_offloading_size", (1, 0.001, None)),
        ("verify_cache", (0, 1, 0.5)),
    ],
)
def test_the_ends_of_the_cache_options_are_accepted(name: str, values: tuple[Any, ...]) -> None:
    for value in values:
        assert getattr(EngineConfig(model="demo", **{name: value}), name) == value


def test_refusals_are_value_errors() -> None:
    with pytest.raises(ValueError, match="--block-size"):
        EngineConfig(model="demo", block_size=0)


def test_a_config_is_never_written() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig(model="demo").block_size = 16  # type: ignore[misc]


def test_workers_are_stages_times_ranks() -> None:
    config = EngineConfig(model="demo", pipeline_parallel_size=3, tensor_parallel_size=2)
    assert config.num_workers == 6


def test_option_is_the_command_line_spelling() -> None:
    assert option("max_num_batched_tokens") == "--max-num-batched-tokens"


def test_a_draft_alone_switches_speculation_on() -> None:
    config = SpeculativeConfig.parse({"model": "demo-draft"})
    assert config == SpeculativeConfig(model="demo-draft")
    assert (config.method, config.num_speculative_tokens) == ("dspark", 7)
    assert config.acceptance == "shared"
    assert SpeculativeConfig.parse(config) is config


def test_every_key_is_taken_from_the_object() -> None:
    values = {
        "model": "folder",
        "method": "dspark",
        "num_speculative_tokens": 3,
        "acceptance": "rejection",
        "confidence_schedule": False,
        "watchdog": True,
        "synthetic_acceptance_length": 2,
        "online_quantization": "follow",
        "kv_cache_dtype": "fp8",
    }
    assert list(values) == [item.name for item in dataclasses.fields(SpeculativeConfig)]
    assert dataclasses.asdict(SpeculativeConfig.parse(values)) == values


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model", ""),
        ("model", None),
        ("method", "eagle"),
        ("method", ["dspark"]),
        ("online_quantization", "ptpc_fp8"),
        ("kv_cache_dtype", "e4m3"),
        ("num_speculative_tokens", 0),
        ("num_speculative_tokens", 17),
        ("num_speculative_tokens", True),
        ("num_speculative_tokens", 2.0),
        ("num_speculative_tokens", "7"),
        ("acceptance", "greedy"),
        ("confidence_schedule", 1),
        ("watchdog", "yes"),
        ("synthetic_acceptance_length", 0.9),
        ("synthetic_acceptance_length", 8.1),
        ("synthetic_acceptance_length", math.nan),
        ("synthetic_acceptance_length", True),
        ("synthetic_acceptance_length", "3"),
    ],
)
def test_a_bad_value_of_a_key_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        SpeculativeConfig.parse({"model": "demo-draft", key: value})
    assert str(caught.value).startswith(f"--speculative-config {key}={value!r}: must be ")


@pytest.mark.parametrize("length", [1, 4.0])
def test_a_synthetic_length_reaches_from_one_to_the_whole_window(length: float) -> None:
    keys = {"model": "m", "num_speculative_tokens": 3, "synthetic_acceptance_length": length}
    assert SpeculativeConfig.parse(keys).synthetic_acceptance_length == length


def test_an_unknown_key_is_refused_and_the_known_ones_are_named() -> None:
    with pytest.raises(ConfigError, match="unknown key 'num_tokens'") as caught:
        SpeculativeConfig.parse({"model": "demo-draft", "num_tokens": 3})
    for item in dataclasses.fields(SpeculativeConfig):
        assert item.name in str(caught.value)


@pytest.mark.parametrize("values", [None, [], "demo-draft", 7])
def test_what_is_no_object_is_refused(values: object) -> None:
    with pytest.raises(ConfigError, match=r"--speculative-config=.*must be a JSON object"):
        SpeculativeConfig.parse(values)


def test_a_draft_must_be_named() -> None:
    with pytest.raises(ConfigError, match="the key model is missing"):
        SpeculativeConfig.parse({"num_speculative_tokens": 3})
