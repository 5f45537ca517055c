"""What a run has to leave as it is: the model, and the engine options that the caller gave.

Owns which options make no sense here, and which layouts and drafts there are for a model.
"""

from typing import Any

from stagecoach.config.engine import ResolvedConfig, option, speculation_key
from stagecoach.errors import ConfigError
from stagecoach.fuzz.draw import Given
from stagecoach.fuzz.grammars import has_vocabulary
from stagecoach.fuzz.script import Script
from stagecoach.resolve import resolve

_DRAFTS = {"tiny": "tiny-draft", "demo": "demo-draft"}
_MOST_STAGES = 4
_RANKS = (1, 2, 4)


def refuse_options(options: dict[str, Any], *, is_exact: bool = True) -> None:
    """Refuse engine options under which a request has not one right answer.

    Args:
        is_exact: a schedule must be the same whenever it is run.

    Raises:
        ConfigError: names the option and why.
    """
    dtype = options.get("dtype", "float64")
    if dtype not in ("auto", "float64"):
        raise ConfigError(
            f"{option('dtype')}={dtype}: tokens are only the same under every schedule in "
            "float64, where another order of a sum changes no choice"
        )
    speculation = options.get("speculative_config")
    if speculation is None:
        return
    if speculation.acceptance != "shared":
        raise ConfigError(
            f"{speculation_key('acceptance')}={speculation.acceptance}: keeps the distribution of "
            "tokens and not the tokens, which are compared here; use shared"
        )
    if speculation.synthetic_acceptance_length is not None:
        raise ConfigError(
            f"{speculation_key('synthetic_acceptance_length')}="
            f"{speculation.synthetic_acceptance_length}: its tokens are not the model's"
        )
    if is_exact and speculation.kv_cache_dtype != "auto":
        raise ConfigError(
            f"{speculation_key('kv_cache_dtype')}={speculation.kv_cache_dtype}: a drafter that is "
            "told the answers writes whole numbers into these rows, which need the activations' "
            "type; leave it out, or use --processes"
        )
    for name in ("confidence_schedule", "watchdog"):
        if is_exact and getattr(speculation, name):
            raise ConfigError(
                f"{speculation_key(name)}=true: it follows the clock, and a schedule could not be "
                "run again; leave it out, or use --processes"
            )


def find_given(model: str, options: dict[str, Any], *, is_costly: bool = False) -> Given:
    """What is there to draw from.

    Args:
        options: engine options that are fixed, as JSON spells them.
        is_costly: an engine takes long to start.

    Raises:
        ConfigError: the options cannot be served in any layout.
    """
    stages = _allowed("pipeline_parallel_size", options, range(1, _MOST_STAGES + 1))
    ranks = _allowed("tensor_parallel_size", options, _RANKS)
    layouts = []
    refused: ConfigError | None = None
    config: ResolvedConfig | None = None
    for num_stages in stages:
        for num_ranks in ranks:
            layout = {"pipeline_parallel_size": num_stages, "tensor_parallel_size": num_ranks}
            try:
                script = Script(model=model, engine=options | layout, requests=())
                config = resolve(script.engine_config())
                layouts.append((num_stages, num_ranks))
            except ConfigError as error:
                refused = refused or error
    if config is None:
        assert refused is not None
        raise refused
    if is_costly:
        layouts = [layout for layout in layouts if layout[0] * layout[1] <= 4]
    return Given(
        model,
        options,
        tuple(layouts),
        _DRAFTS.get(model),
        longest=config.max_model_len,
        has_vocabulary=has_vocabulary(config),
    )


def _allowed(name: str, options: dict[str, Any], sizes: Any) -> tuple[int, ...]:
    return (options[name],) if name in options else tuple(sizes)
