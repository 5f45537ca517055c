"""What each request of a script must return: its one-shot result.

Owns the plain engine that makes it: one stage, one rank (unless ranks quantise), no cache, no
drafts, the prompt in one chunk, nobody beside it. A result is kept for as long as the process
lives, since scripts ask for the same prompts again and again, and serves shorter answers too.
"""

from typing import Any, NamedTuple

import msgspec

from stagecoach.config.engine import ResolvedConfig
from stagecoach.engine.messages import RequestRefused, Submit
from stagecoach.errors import ConfigError
from stagecoach.fuzz.script import Ask, Script, prompt_token_ids
from stagecoach.fuzz.turns import TurnEngine
from stagecoach.fuzz.workers import Layouts
from stagecoach.request import FinishReason, SamplingParams, TokenLogprobs
from stagecoach.resolve import resolve

_BLOCK_SIZE = 64
# What an answer depends on beside the prompt and the sampling parameters.
_MODEL_OPTIONS = (
    *("dtype", "device", "load_format", "hf_overrides", "seed", "log_level"),
    *("mxfp4_experts", "kv_cache_dtype", "online_quantization"),
    *("online_quantization_include", "online_quantization_exclude"),
)


class Answer(NamedTuple):
    """What a request returned."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None

    @property
    def is_cut(self) -> bool:
        """It would be longer if it were allowed to."""
        return self.finish_reason is FinishReason.LENGTH

    def first(self, num_tokens: int) -> "Answer":
        """What it would have been with that `max_tokens`."""
        if num_tokens >= len(self.token_ids):
            return self
        return Answer(
            self.token_ids[:num_tokens],
            self.logprobs[:num_tokens],
            self.prompt_logprobs,
            FinishReason.LENGTH,
        )


class Expected(NamedTuple):
    """A request as it is submitted, and what must come back."""

    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    answer: Answer

    @property
    def sequence(self) -> tuple[int, ...]:
        return self.prompt_token_ids + self.answer.token_ids

    def checkpoint_position(self, ask: Ask) -> int | None:
        """The one asked for, as far as the prompt reaches."""
        if ask.checkpoint_position is None:
            return None
        return min(ask.checkpoint_position, len(self.prompt_token_ids))


class Oracle:
    """One-shot results of one model."""

    def __init__(self, layouts: Layouts) -> None:
        self._layouts = layouts
        self._engines: dict[str, tuple[int, TurnEngine]] = {}
        self._answers: dict[tuple[str, tuple[int, ...], bytes], Answer] = {}

    def expect(self, script: Script, config: ResolvedConfig) -> list[Expected]:
        """Of each request of a script. Prompts are cut where an answer would not fit behind.

        Raises:
            ConfigError: a prompt without tokens, or a request that is refused.
        """
        names: tuple[str, ...] = _MODEL_OPTIONS
        if script.engine.get("online_quantization", "none") != "none":
            # Each rank quantises its own columns.
            names = (*names, "tensor_parallel_size")
        options = {name: script.engine[name] for name in names if name in script.engine}
        wanted: list[Expected] = []
        for index, ask in enumerate(script.requests):
            token_ids = prompt_token_ids(
                ask.prompt, config.model.vocab_size, lambda other: wanted[other].sequence
            )
            length = config.max_model_len - (ask.params.max_tokens or 1)
            token_ids = token_ids[: max(1, length)]
            if not token_ids:
                raise ConfigError(f"request {index}: its prompt {ask.prompt!r} has no token")
            answer = self._answer(script.model, options, config, token_ids, ask)
            wanted.append(Expected(token_ids, ask.params, answer))
        return wanted

    def _answer(
        self,
        model: str,
        options: dict[str, Any],
        config: ResolvedConfig,
        token_ids: tuple[int, ...],
        ask: Ask,
    ) -> Answer:
        most = config.max_model_len - len(token_ids)
        if ask.params.max_tokens is not None:
            most = min(most, ask.params.max_tokens)
        params = msgspec.structs.replace(
            ask.params, max_tokens=most, skip_reading_prefix_cache=False
        )
        model_key = f"{model} {sorted(options.items())}"
        endless = msgspec.structs.replace(params, max_tokens=None)
        key = (model_key, token_ids, msgspec.json.encode(endless))
        known = self._answers.get(key)
        if known is None or (known.is_cut and len(known.token_ids) < most):
            engine = self._engine(model_key, model, options, config.max_model_len)
            known = self._answers[key] = run_alone(engine, token_ids, params)
        return known.first(most)

    def _engine(
        self, key: str, model: str, options: dict[str, Any], max_model_len: int
    ) -> TurnEngine:
        length, engine = self._engines.get(key, (0, None))
        if engine is None or length < max_model_len:
            config = resolve(
                Script(
                    model=model,
                    requests=(),
                    engine=options
                    | {
                        "enable_prefix_caching": False,
                        "max_model_len": max_model_len,
                        "max_num_seqs": 1,
                        "max_num_batched_tokens": max_model_len,
                        "block_size": _BLOCK_SIZE,
                    },
                ).engine_config()
            )
            engine = TurnEngine(config, self._layouts)
            self._engines[key] = (max_model_len, engine)
        return engine


def seed_of(params: SamplingParams) -> int:
    """The seed of a request: one that depends on nothing but the request."""
    return params.seed or 0


def run_alone(engine: TurnEngine, token_ids: tuple[int, ...], params: SamplingParams) -> Answer:
    """The answer of one request that has the engine to itself.

    Raises:
        ConfigError: the engine refuses it.
    """
    engine.send(
        Submit(request_id=1, prompt_token_ids=token_ids, params=params, seed=seed_of(params))
    )
    answer = Answer()
    while answer.finish_reason is None:
        for news in engine.turn():
            if isinstance(news, RequestRefused):
                raise ConfigError(f"a request is refused: {news.field}: {news.reason}")
            answer = Answer(
                answer.token_ids + news.token_ids,
                answer.logprobs + news.logprobs,
                answer.prompt_logprobs + news.prompt_logprobs,
                news.finish_reason,
                news.stop_reason,
            )
    return answer
