"""What the HTTP server is started with, beside the engine's own options.

Owns the settings and their ranges; the command line makes one of its flags.
"""

from dataclasses import dataclass

from stagecoach.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Options of `stagecoach serve` that are not the engine's.

    Raises:
        ConfigError: a value outside its range; names the option.
    """

    served_model_names: tuple[str, ...]  # the first is the one that answers carry
    host: str = "127.0.0.1"
    port: int = 8000  # 0: one that is free
    uds: str | None = None  # path of a Unix socket, instead of host and port
    api_keys: tuple[str, ...] = ()  # none: whoever reaches the server may use it
    root_path: str = ""  # prefix that a proxy in front strips off
    allow_origins: tuple[str, ...] = ()  # web pages that may call; none: CORS is off
    max_queue_requests: int = 1024  # completions beyond --max-num-seqs before 429
    max_body_bytes: int = 16 * 2**20
    shutdown_timeout_seconds: float = 30.0
    stall_timeout_seconds: float = 60.0  # work without a step for so long: /health says 503
    log_level: str = "info"

    def __post_init__(self) -> None:
        if not self.served_model_names or not all(self.served_model_names):
            raise ConfigError("--served-model-name: must not be empty")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port={self.port}: must be in 0..65535")
        for name in ("max_queue_requests", "max_body_bytes"):
            if getattr(self, name) < 1:
                flag = name.replace("_", "-")
                raise ConfigError(f"--{flag}={getattr(self, name)}: must be at least 1")
        for flag, seconds in (
            ("--shutdown-timeout", self.shutdown_timeout_seconds),
            ("--stall-timeout", self.stall_timeout_seconds),
        ):
            if not 0 <= seconds < float("inf"):
                raise ConfigError(f"{flag}={seconds:g}: must be a number of seconds from 0")
        # A key with a blank or a letter that no header carries could never be sent.
        for key in self.api_keys:
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise ConfigError("--api-key: must be printable ASCII without blanks")
        if self.root_path and not self.root_path.startswith("/"):
            raise ConfigError(f"--root-path={self.root_path}: must begin with a slash")
