"""EngineConfig: ranges of single options, and that nothing writes it."""

import dataclasses

import pytest

from stagecoach.config import EngineConfig, field_docs, option
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
_CHOICES = ("dtype", "device", "load_format", "distributed_executor_backend", "log_level")


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
        ("seed", -1),
        ("seed", "a"),
        ("seed", 2**31),
        ("debug_poison", "no"),
        ("hf_overrides", [1]),
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


def test_refusals_are_value_errors() -> None:
    with pytest.raises(ValueError, match="--block-size"):
        EngineConfig(model="demo", block_size=0)


def test_a_config_is_never_written() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig(model="demo").block_size = 16  # type: ignore[misc]


def test_workers_are_stages_times_ranks() -> None:
    config = EngineConfig(model="demo", pipeline_parallel_size=3, tensor_parallel_size=2)
    assert config.num_workers == 6


def test_docs_cover_every_field() -> None:
    assert set(field_docs()) == {item.name for item in dataclasses.fields(EngineConfig)}


def test_option_is_the_command_line_spelling() -> None:
    assert option("max_num_batched_tokens") == "--max-num-batched-tokens"
