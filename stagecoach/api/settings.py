"""What the HTTP server is started with, beside the engine's own options.

Owns the settings, their doc lines and their ranges; the command line makes a flag of each.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from stagecoach.config.engine import option
from stagecoach.errors import ConfigError


def _setting(default: Any, doc: str, **flag: str) -> Any:
    """A field; `flag` has its spelling where that is not the field's name, and its METAVAR."""
    return dataclasses.field(default=default, metadata={"doc": doc, **flag})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Options of `stagecoach serve` that are not the engine's.

    Raises:
        ConfigError: a value outside its range; names the option.
    """

    host: str = _setting("127.0.0.1", "Address to listen on.")
    port: int = _setting(8000, "Port to listen on; 0: one that is free.")
    uds: str | None = _setting(None, "A Unix socket instead of host and port.", metavar="PATH")
    api_keys: tuple[str, ...] = _setting(
        (),
        "What clients must send as `authorization: Bearer KEY`; may be repeated.",
        option="--api-key",
        metavar="KEY",
        envvar="STAGECOACH_API_KEY",
    )
    served_model_names: tuple[str, ...] = _setting(
        dataclasses.MISSING,
        "What clients call the model; may be repeated. Default: MODEL.",
        option="--served-model-name",
        metavar="NAME",
    )
    root_path: str = _setting("", "Prefix that a proxy in front strips off.", metavar="PATH")
    allowed_origins: tuple[str, ...] = _setting(
        (),
        "A web origin whose pages may call, or a JSON list of them; may be repeated; `*`: any. "
        "Default: none.",
        metavar="ORIGIN",
    )
    max_queue_requests: int = _setting(1024, "Completions taken beyond --max-num-seqs; then 429.")
    max_body_bytes: int = _setting(16 * 2**20, "Largest body of a request.")
    api_server_count: int = _setting(
        1, "Processes that answer requests, in front of the one engine."
    )
    client_header_timeout_seconds: float = _setting(
        60.0,
        "Seconds that a client has for the headers of a request.",
        option="--client-header-timeout",
    )
    client_body_timeout_seconds: float = _setting(
        60.0,
        "Seconds that a client has for the body of a request; then 408.",
        option="--client-body-timeout",
    )
    send_timeout_seconds: float = _setting(
        60.0,
        "Seconds after which a reader that takes nothing is cut off.",
        option="--send-timeout",
    )
    request_timeout_seconds: float | None = _setting(
        None,
        "Seconds that an answer may take; then 504. Default: any time.",
        option="--request-timeout",
    )
    shutdown_timeout_seconds: float = _setting(
        30.0,
        "Seconds that open requests have after SIGTERM.",
        option="--shutdown-timeout",
    )
    stall_timeout_seconds: float = _setting(
        60.0,
        "Seconds without a step, with work, before /health says 503.",
        option="--stall-timeout",
    )
    otlp_traces_endpoint: str | None = _setting(
        None,
        "Where spans of requests are sent, as OTLP over HTTP; needs the extra `otel`.",
        metavar="URL",
    )
    profiler_dir: str | None = _setting(
        None, "Folder for profiles; allows /start_profile and /stop_profile.", metavar="DIR"
    )
    log_level: str = "info"  # the engine's

    def __post_init__(self) -> None:
        if not self.served_model_names or not all(self.served_model_names):
            raise ConfigError("--served-model-name: must not be empty")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port={self.port}: must be in 0..65535")
        for name in ("max_queue_requests", "max_body_bytes", "api_server_count"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{option(name)}={getattr(self, name)}: must be at least 1")
        self._check_times()
        self._check_traces()
        # A key with a blank or a letter that no header carries could never be sent.
        for key in self.api_keys:
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise ConfigError("--api-key: must be printable ASCII without blanks")
        if self.root_path and not self.root_path.startswith("/"):
            raise ConfigError(f"--root-path={self.root_path}: must begin with a slash")

    def _check_traces(self) -> None:
        if self.otlp_traces_endpoint is None:
            return
        try:
            # Needs an extra that most do without.
            from stagecoach.api.tracing import check_endpoint
        except ImportError as error:
            raise ConfigError(
                "--otlp-traces-endpoint: needs packages that are not installed "
                f"({error.name}): pip install 'stagecoach[otel]'"
            ) from None
        check_endpoint(self.otlp_traces_endpoint)

    def _check_times(self) -> None:
        for item in dataclasses.fields(self):
            seconds = getattr(self, item.name)
            if not item.name.endswith("_seconds") or seconds is None:
                continue
            may_be_zero = item.name in ("shutdown_timeout_seconds", "stall_timeout_seconds")
            if not 0 <= seconds < float("inf") or (seconds == 0 and not may_be_zero):
                least = "from 0" if may_be_zero else "above 0"
                raise ConfigError(
                    f"{item.metadata['option']}={seconds:g}: must be a number of seconds {least}"
                )
