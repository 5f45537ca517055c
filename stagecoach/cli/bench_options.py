"""The options of `stagecoach bench serve`, in the shape of `vllm bench serve`.

Owns their names, defaults and help, and what contradicts what; what they do is bench.py's.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer

from stagecoach.errors import ConfigError

DataSet = Literal["random", "sharegpt", "prefix-repetition", "multi-turn"]

_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


_of_server = typer.Option(help="Sampling parameter; default: the server's.")
_FloatOfServer = Annotated[float | None, _of_server]
_IntOfServer = Annotated[int | None, _of_server]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """One field an option; its annotation is what the command line says about it."""

    backend: Annotated[
        Literal["openai", "openai-chat"],
        typer.Option(help="Which API to use: prompts, or conversations."),
    ] = "openai"
    base_url: Annotated[
        str | None, typer.Option(metavar="URL", help="The server; default: --host and --port.")
    ] = None
    host: Annotated[str, typer.Option(help="Host of the server.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(help="Port of the server.")] = 8000
    endpoint: Annotated[
        str | None, typer.Option(metavar="PATH", help="Path of the API; default: the backend's.")
    ] = None
    model: Annotated[
        str | None, typer.Option(help="Model to ask for; default: the first of /v1/models.")
    ] = None
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", help="Sent as a bearer token.")
    ] = None
    header: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Header of each request; may be repeated."),
    ] = None
    dataset_name: Annotated[DataSet, typer.Option(help="What is asked.")] = "random"
    dataset_path: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="ShareGPT file, for sharegpt and multi-turn."),
    ] = None
    num_prompts: Annotated[int, typer.Option(help="Requests of the run.")] = 1000
    seed: Annotated[int, typer.Option(help="Seed of prompts, lengths and arrivals.")] = 0
    random_input_len: Annotated[
        int,
        typer.Option(
            "--random-input-len",
            "--input-len",
            help="Tokens of a random prompt, or of a message of multi-turn.",
        ),
    ] = 1024
    random_output_len: Annotated[
        int, typer.Option("--random-output-len", "--output-len", help="Tokens of an answer.")
    ] = 128
    random_range_ratio: Annotated[
        float, typer.Option(help="Random lengths lie within this share of the given ones.")
    ] = 0.0
    random_prefix_len: Annotated[
        int, typer.Option(help="Tokens that all prompts begin with, beside their own.")
    ] = 0
    prefix_repetition_prefix_len: Annotated[
        int, typer.Option(help="Tokens of a shared beginning.")
    ] = 256
    prefix_repetition_suffix_len: Annotated[
        int, typer.Option(help="Tokens after the shared beginning.")
    ] = 256
    prefix_repetition_num_prefixes: Annotated[
        int, typer.Option(help="Number of different shared beginnings.")
    ] = 10
    prefix_repetition_output_len: Annotated[
        int, typer.Option(help="Tokens of an answer with prefix-repetition.")
    ] = 128
    sharegpt_output_len: Annotated[
        int | None, typer.Option(help="Tokens of an answer; default: as in the file.")
    ] = None
    multi_turn_num_turns: Annotated[
        int, typer.Option(help="Most messages of one conversation.")
    ] = 4
    multi_turn_delay_sec: Annotated[
        float, typer.Option(help="Seconds from an answer to the next message.")
    ] = 0.0
    request_rate: Annotated[
        float, typer.Option(help="Requests, or conversations, a second; inf: all at once.")
    ] = float("inf")
    burstiness: Annotated[
        float, typer.Option(help="1: a Poisson process; less: bursts; more: even intervals.")
    ] = 1.0
    max_concurrency: Annotated[
        int | None, typer.Option(help="Most requests at a time; the others wait here.")
    ] = None
    ignore_eos: Annotated[
        bool | None,
        typer.Option(help="Answers of full length; default: with all sets but sharegpt."),
    ] = None
    temperature: _FloatOfServer = None
    top_p: _FloatOfServer = None
    top_k: _IntOfServer = None
    min_p: _FloatOfServer = None
    presence_penalty: _FloatOfServer = None
    frequency_penalty: _FloatOfServer = None
    repetition_penalty: _FloatOfServer = None
    extra_body: Annotated[
        str, typer.Option(metavar="JSON", help="Further fields of each request.")
    ] = "{}"
    continuous_usage: Annotated[
        bool,
        typer.Option(help="Ask for the number of tokens in each event; some servers refuse."),
    ] = True
    num_warmups: Annotated[
        int, typer.Option(help="Copies of the first request before the run.")
    ] = 0
    ready_check_timeout_sec: Annotated[
        float, typer.Option(help="Wait so long for the server, then try one request; 0: do not.")
    ] = 0.0
    request_timeout_sec: Annotated[
        float, typer.Option(help="A request that takes longer has failed.")
    ] = 21600.0
    request_id_prefix: Annotated[
        str | None, typer.Option(help="X-Request-Id is this and a number; default: random.")
    ] = None
    percentile_metrics: Annotated[
        str, typer.Option(help="Of ttft, tpot, itl, icl, e2el, separated by commas.")
    ] = "ttft,tpot,itl"
    metric_percentiles: Annotated[
        str, typer.Option(help="Percentiles to report, separated by commas.")
    ] = "99"
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METRIC:MS", help="Bound of ttft, tpot or e2el on a good request; repeatable."
        ),
    ] = None
    label: Annotated[str | None, typer.Option(help="Name of the run; default: the backend.")] = None
    metadata: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Also stored in the result; may be repeated."),
    ] = None
    save_result: Annotated[
        bool, typer.Option("--save-result", help="Write the result to a JSON file.")
    ] = False
    save_detailed: Annotated[
        bool, typer.Option("--save-detailed", help="Store the times of each request as well.")
    ] = False
    result_dir: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where to write it; default: here.")
    ] = None
    result_filename: Annotated[
        str | None, typer.Option(help="Name of the file; default: from label, rate and date.")
    ] = None
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON instead of a table.")
    ] = False
    disable_tqdm: Annotated[bool, typer.Option("--disable-tqdm", help="Draw no progress bar.")] = (
        False
    )

    def __post_init__(self) -> None:
        """Raises ConfigError for options that are out of range or contradict each other."""
        for name, low in (
            ("num_prompts", 1),
            ("num_warmups", 0),
            ("max_concurrency", 1),
            ("multi_turn_delay_sec", 0),
            ("ready_check_timeout_sec", 0),
            ("seed", 0),
        ):
            value = getattr(self, name)
            if value is not None and not value >= low:
                raise ConfigError(f"--{_dashed(name)}={value}: must be at least {low}")
        if not self.request_timeout_sec > 0:
            raise ConfigError(
                f"--request-timeout-sec={self.request_timeout_sec}: must be greater than 0"
            )
        reads_file = self.dataset_name in ("sharegpt", "multi-turn")
        if self.dataset_path is not None and not reads_file:
            raise ConfigError(f"--dataset-path: --dataset-name={self.dataset_name} reads no file")
        if self.dataset_path is None and self.dataset_name == "sharegpt":
            raise ConfigError("--dataset-name=sharegpt: needs --dataset-path")
        if self.dataset_name == "multi-turn" and self.backend != "openai-chat":
            raise ConfigError("--dataset-name=multi-turn: needs --backend=openai-chat")

    @property
    def url(self) -> str:
        """The server's address without a slash at its end."""
        if self.base_url is not None:
            return self.base_url.rstrip("/")
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def request_fields(self) -> dict[str, Any]:
        """What each request's body says beside its prompt, length and stream.

        Raises:
            ConfigError: --extra-body is no JSON object.
        """
        given = {name: getattr(self, name) for name in _SAMPLING}
        body = {name: value for name, value in given.items() if value is not None}
        is_synthetic = self.dataset_name != "sharegpt" and self.dataset_path is None
        if is_synthetic if self.ignore_eos is None else self.ignore_eos:
            body["ignore_eos"] = True
        try:
            return body | msgspec.json.decode(self.extra_body, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise ConfigError(f"--extra-body={self.extra_body}: {error}") from None

    def metadata_fields(self) -> dict[str, str]:
        """What --metadata adds to the result.

        Raises:
            ConfigError: an item is not NAME=VALUE.
        """
        found = {}
        for item in self.metadata or ():
            name, separator, value = item.partition("=")
            if not separator or not name.strip():
                raise ConfigError(f"--metadata={item}: must be NAME=VALUE")
            found[name.strip()] = value.strip()
        return found


def _dashed(name: str) -> str:
    return name.replace("_", "-")
