"""From flags and a YAML file to engine options."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from stagecoach.api.settings import ServerSettings
from stagecoach.cli.options import read_config_file, with_engine_options, with_server_options
from stagecoach.config.engine import EngineConfig, SpeculativeConfig, option
from stagecoach.errors import ConfigError

FIELDS = [item for item in dataclasses.fields(EngineConfig) if item.name != "model"]

# A value for each option, as text of the command line and as the engine gets it.
VALUES: dict[str, tuple[str, Any]] = {
    "pipeline_parallel_size": ("2", 2),
    "tensor_parallel_size": ("4", 4),
    "pp_partition": ("5,4", (5, 4)),
    "dtype": ("float64", "float64"),
    "mxfp4_experts": ("packed", "packed"),
    "online_quantization": ("ptpc_fp8", "ptpc_fp8"),
    "online_quantization_include": (
        "model.*.mlp.*,model.*proj*",
        ("model.*.mlp.*", "model.*proj*"),
    ),
    "online_quantization_exclude": ("model.*.o_proj.*", ("model.*.o_proj.*",)),
    "kv_cache_dtype": ("fp8", "fp8"),
    "device": ("cpu", "cpu"),
    "max_model_len": ("100", 100),
    "max_num_seqs": ("3", 3),
    "max_num_batched_tokens": ("30", 30),
    "block_size": ("8", 8),
    "kv_cache_memory_bytes": ("1000000", 1000000),
    "gpu_memory_utilization": ("0.8", 0.8),
    "num_gpu_blocks_override": ("12", 12),
    "seed": ("9", 9),
    "load_format": ("dummy", "dummy"),
    "hf_overrides": ('{"rms_norm_eps": 0.1}', {"rms_norm_eps": 0.1}),
    "distributed_executor_backend": ("uni", "uni"),
    "launcher": ("ray", "ray"),
    "nnodes": ("3", 3),
    "node_rank": ("2", 2),
    "master_addr": ("10.0.0.1", "10.0.0.1"),
    "master_port": ("4000", 4000),
    "network_interface": ("eth1", "eth1"),
    "host_key_file": ("a-key", "a-key"),
    "distributed_timeout_seconds": ("30", 30),
    "execute_model_timeout_seconds": ("20", 20),
    "recover": ("", True),
    "max_recoveries": ("5", 5),
    "recovery_window_seconds": ("60", 60),
    "enforce_eager": ("", True),
    "cudagraph_capture_sizes": ("1,4,64", (1, 4, 64)),
    "async_scheduling": ("", True),
    "num_threads": ("1", 1),
    "log_level": ("error", "error"),
    "speculative_config": (
        '{"model": "a-draft", "watchdog": false}',
        SpeculativeConfig(model="a-draft", watchdog=False),
    ),
    "enable_prefix_caching": ("", True),
    "state_checkpoint_interval": ("128", 128),
    "max_state_checkpoints": ("12", 12),
    "kv_offloading_size": ("0.5", 0.5),
    "verify_cache": ("0.25", 0.25),
    "debug_poison": ("", True),
}


def run_options(*arguments: str) -> dict[str, Any]:
    """The engine options that a command gets from these arguments."""
    received: list[dict[str, Any]] = []

    def command(*, engine_options: dict[str, Any]) -> None:
        received.append(engine_options)

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(with_engine_options(command))
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=True)
    if isinstance(result.exception, ConfigError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return received[0]


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    return tmp_path / "engine.yaml"


def test_no_flag_gives_no_option() -> None:
    assert run_options() == {}


def test_every_field_but_the_model_has_a_value_here() -> None:
    assert list(VALUES) == [item.name for item in FIELDS]


@pytest.mark.parametrize("name", VALUES)
def test_every_field_is_a_flag(name: str) -> None:
    text, value = VALUES[name]
    arguments = [option(name), text] if text else [option(name)]
    options = run_options(*arguments)
    assert options == {name: value}
    EngineConfig(model="tiny", **options)


def test_short_flags() -> None:
    options = run_options("-pp", "2", "-tp", "4")
    assert options == {"pipeline_parallel_size": 2, "tensor_parallel_size": 4}


@pytest.mark.parametrize("spell", [str, lambda name: name.replace("_", "-")])
@pytest.mark.parametrize("name", VALUES)
def test_every_field_is_a_name_of_the_file(config_file: Path, name: str, spell: Any) -> None:
    text, value = VALUES[name]
    text = text or "true"
    quoted = f"'{text}'" if text.startswith("{") else text
    config_file.write_text(f"{spell(name)}: {quoted}\n")
    assert run_options("--config", str(config_file)) == {name: value}


def test_lists_and_maps_of_yaml(config_file: Path) -> None:
    config_file.write_text(
        "pp_partition: [5, 4]\nhf-overrides:\n  text_config:\n    a: 1\n"
        "speculative-config:\n  model: a-draft\n  num_speculative_tokens: 3\n"
    )
    assert read_config_file(config_file) == {
        "pp_partition": (5, 4),
        "hf_overrides": {"text_config": {"a": 1}},
        "speculative_config": SpeculativeConfig(model="a-draft", num_speculative_tokens=3),
    }
    config_file.write_text("pp_partition: 9\n")
    assert read_config_file(config_file) == {"pp_partition": (9,)}


@pytest.mark.parametrize(
    "name", ["enable_prefix_caching", "enforce_eager", "async_scheduling", "debug_poison"]
)
def test_what_is_on_or_off_can_be_either_on_the_command_line(config_file: Path, name: str) -> None:
    no_flag = f"--no-{option(name).removeprefix('--')}"
    assert run_options(no_flag) == {name: False}
    config_file.write_text(f"{name}: true\n")
    assert run_options("--config", str(config_file), no_flag) == {name: False}
    config_file.write_text(f"{name}: false\n")
    assert run_options("--config", str(config_file)) == {name: False}
    assert run_options("--config", str(config_file), option(name)) == {name: True}


@pytest.mark.parametrize("text", ["", "# nothing\n", "max_model_len: null\n", "dtype:\n"])
def test_nothing_and_null_leave_the_default(config_file: Path, text: str) -> None:
    config_file.write_text(text)
    assert read_config_file(config_file) == {}


def test_a_flag_wins_over_the_file(config_file: Path) -> None:
    config_file.write_text("block-size: 16\nseed: 1\n")
    options = run_options("--seed", "2", "--config", str(config_file))
    assert options == {"block_size": 16, "seed": 2}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("block_sizes: 8", "block_sizes is not an engine option"),
        ("model: demo", "chosen on the command line"),
        ("temperature: 1", "temperature is not an engine option"),
        ("block-size: 8\nblock_size: 8", "block_size is there twice"),
        ("block_size: '8'", "block_size: Expected `int`, got `str`"),
        ("block_size: 8.5", "block_size: Expected `int`, got `float`"),
        ("max_model_len: long", "max_model_len: Expected `int | null`, got `str`"),
        ("seed: [1]", "seed: Expected `int`"),
        ("debug_poison: 1", "debug_poison: Expected `bool`, got `int`"),
        ("dtype: 32", "dtype: Expected `str`, got `int`"),
        ("enable_prefix_caching: on it", "enable_prefix_caching: Expected `bool`, got `str`"),
        ("verify_cache: often", "verify_cache: Expected `float`, got `str`"),
        ("pp_partition: [5, four]", "pp_partition: Expected `int`, got `str`"),
        ("pp_partition: 5,four", "must be numbers, as in 5,4"),
        ("hf_overrides: '{'", "not valid JSON"),
        ("hf_overrides: [1]", "hf_overrides: Expected `object"),
        ("speculative_config: [1]", "--speculative-config=[1]: must be a JSON object"),
        ("speculative_config: {k: 3}", "--speculative-config: unknown key 'k'; known are model"),
        ("- block_size", "must hold `name: value` lines"),
        ("block_size", "must hold `name: value` lines"),
        ("a: [", "while parsing"),
    ],
)
def test_a_bad_file_is_refused(config_file: Path, content: str, text: str) -> None:
    config_file.write_text(content + "\n")
    with pytest.raises(ConfigError) as caught:
        read_config_file(config_file)
    assert str(caught.value).startswith(f"--config={config_file}: ")
    assert text in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_file_that_is_not_there_or_no_text_is_refused(config_file: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_config_file(config_file)
    config_file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="--config="):
        read_config_file(config_file)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--pp-partition", "5,x"), "--pp-partition=5,x: must be numbers, as in 5,4"),
        (("--pp-partition", ""), "must be numbers"),
        (("--hf-overrides", "{a}"), "--hf-overrides={a}: not valid JSON: "),
        (("--hf-overrides", "[1]"), "--hf-overrides=[1]: must be a JSON object"),
        (("--speculative-config", "demo-draft"), "--speculative-config=demo-draft: not valid"),
        (("--speculative-config", "[1]"), "--speculative-config=[1]: must be a JSON object"),
        (("--speculative-config", '{"model": "m", "k": 3}'), "unknown key 'k'; known are model"),
        (
            ("--speculative-config", '{"model": "m", "num_speculative_tokens": "3"}'),
            "--speculative-config num_speculative_tokens='3': must be an integer in 1..16",
        ),
    ],
)
def test_a_bad_flag_is_refused(arguments: tuple[str, ...], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run_options(*arguments)
    assert text in str(caught.value)


def test_help_shows_each_doc_line_and_default() -> None:
    def command(*, engine_options: dict[str, Any]) -> None:
        """Does nothing."""

    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(with_engine_options(command))
    text = " ".join(CliRunner().invoke(app, ["--help"]).output.split())
    for item in FIELDS:
        assert option(item.name) in text
        assert _wrapped(item.metadata["doc"]) in _wrapped(text)
        if item.default is not False and item.default not in (None, dataclasses.MISSING):
            assert f"[default: {item.default}]" in text
    for key in dataclasses.fields(SpeculativeConfig):
        assert _wrapped(f"{key.name}: {key.metadata['doc']}") in _wrapped(text)


def _wrapped(text: str) -> str:
    """Without the spaces and line ends that help puts in at a hyphen."""
    return "".join(text.split())


def test_a_command_may_have_defaults_of_its_own(config_file: Path) -> None:
    received: list[dict[str, Any]] = []

    def command(*, engine_options: dict[str, Any]) -> None:
        """Keeps what it gets."""
        received.append(engine_options)

    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(with_engine_options(command, pipeline_parallel_size=2))
    config_file.write_text("pipeline_parallel_size: 3")
    for arguments in ((), ("--config", str(config_file)), ("-pp", "4")):
        assert CliRunner().invoke(app, list(arguments)).exit_code == 0
    assert [options["pipeline_parallel_size"] for options in received] == [2, 3, 4]
    help_text = " ".join(CliRunner().invoke(app, ["--help"]).output.split())
    assert "Pipeline stages. [default: 2]" in help_text


def _server_flags() -> dict[str, str]:
    """By name of the setting; the log's level is the engine's."""
    return {
        item.name: item.metadata.get("option", option(item.name))
        for item in dataclasses.fields(ServerSettings)
        if item.name != "log_level"
    }


def run_server_options(*arguments: str) -> dict[str, Any]:
    """The settings of the server that `serve` gets from these arguments."""
    received: list[dict[str, Any]] = []

    def command(*, server_options: dict[str, Any]) -> None:
        received.append(server_options)

    app = typer.Typer(add_completion=False)
    app.command()(with_server_options(command))
    result = CliRunner().invoke(app, list(arguments), env={"STAGECOACH_API_KEY": None})
    if isinstance(result.exception, ConfigError):
        raise result.exception
    assert result.exit_code == 0, result.output
    [options] = received
    return options


def test_each_setting_of_the_server_is_a_flag() -> None:
    texts = {str: "/a", int: "3", float: "2.5", tuple[str, ...]: "k"}
    types = {
        item.name: next(kind for kind in texts if item.type in (kind, kind | None))
        for item in dataclasses.fields(ServerSettings)
    }
    flags = _server_flags()
    arguments = [text for name, flag in flags.items() for text in (flag, texts[types[name]])]
    assert run_server_options() == {}
    options = run_server_options(*arguments, "--api-key", "other")
    assert options.keys() == flags.keys()
    assert options["api_keys"] == ("k", "other")
    assert options["port"] == 3
    assert options["send_timeout_seconds"] == 2.5


def test_origins_may_be_a_json_list() -> None:
    flag = "--allowed-origins"
    options = run_server_options(flag, '["https://a", "https://b"]', flag, "https://c")
    assert options == {"allowed_origins": ("https://a", "https://b", "https://c")}
    with pytest.raises(ConfigError, match=re.escape('--allowed-origins=["a: no JSON list')):
        run_server_options(flag, '["a')


def test_the_table_of_the_servers_flags_is_whole() -> None:
    page = (Path(__file__).parents[3] / "docs" / "server.md").read_text(encoding="utf-8")
    cells = "".join(re.findall(r"^\| (`--[^|]*)\|", page, re.MULTILINE))
    assert sorted(re.findall(r"`(--[\w-]+)`", cells)) == sorted(_server_flags().values())
