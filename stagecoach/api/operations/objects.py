"""What the routes for operators and tools answer with.

Knows nothing of how they are filled.
"""

from typing import Any, Literal

import msgspec

from stagecoach.api.answers import Model
from stagecoach.engine.messages import EngineStats


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """All of them; the last three fields are a page's, as Anthropic has it."""

    object: Literal["list"] = "list"
    data: list[Model]
    has_more: Literal[False] = False
    first_id: str
    last_id: str


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class TokenizerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Names as in `tokenizer_config.json`. No special token is put before a prompt."""

    eos_token: str | None
    bos_token: str | None = None
    pad_token: str | None = None
    vocab_size: int
    model_max_length: int
    chat_template: str | None


class Text(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of /detokenize."""

    prompt: str


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """`status` is ok, loading, recovering, draining, dead or stalled; `reason` says more."""

    status: str
    reason: str | None = None


class Version(msgspec.Struct, frozen=True, kw_only=True):
    version: str


class CacheReset(msgspec.Struct, frozen=True, kw_only=True):
    """Requests from now on find nothing older in the prefix cache."""

    status: Literal["ok"] = "ok"


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What runs, as it was resolved, and the engine's counts since start."""

    version: str
    models: list[str]
    engine: dict[str, Any]
    max_model_len: int
    dtype: str
    partition: list[int]
    num_open_requests: int
    num_tasks: int  # of the event loop of the process that answers
    stats: dict[str, Any] | None  # null unless the engine serves


def stats_fields(stats: EngineStats | None) -> dict[str, Any] | None:
    """Counts of the engine as an answer has them: without the number of the question."""
    if stats is None:
        return None
    return {name: getattr(stats, name) for name in stats.__struct_fields__ if name != "query_id"}
