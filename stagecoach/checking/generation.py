"""Whether whole engines agree: one stage, the layout asked for, and the same with a draft.

Owns the requests. Runs in float64, where a difference of order changes no token.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from stagecoach.checking.verdict import CheckFailedError, CheckSkippedError, counted
from stagecoach.config.engine import SpeculativeConfig
from stagecoach.errors import CapacityError
from stagecoach.llm import LLM
from stagecoach.request import SamplingParams

# Tokens of each answer.
NUM_GENERATED = 24
# Threads of one process, on no other host. Ranks quantise the inputs that they have, so with fp8 a
# layout's values are its own.
_OWN_OPTIONS: dict[str, Any] = {
    "dtype": "float64",
    "kv_cache_dtype": "auto",
    "online_quantization": "none",
    "online_quantization_include": None,
    "online_quantization_exclude": None,
    "distributed_executor_backend": "uni",
    "launcher": "local",
    "nnodes": 1,
    "node_rank": 0,
    "recover": False,
    "speculative_config": None,
}


class Generated(NamedTuple):
    """What an engine answered."""

    token_ids: list[list[int]]
    num_draft_tokens: int
    num_accepted_tokens: int


class GenerationCheckup:
    """Engines over one checkpoint, one after the other, as threads of this process.

    Args:
        options: of the engine, without a draft.
        prompts: token ids.
    """

    def __init__(
        self, model: str, options: Mapping[str, Any], prompts: Sequence[Sequence[int]]
    ) -> None:
        self._model = model
        self._options = {**options, **_OWN_OPTIONS}
        self._prompts = [list(prompt) for prompt in prompts]
        self._single: Generated | None = None

    def check_layouts(self) -> str:
        """One stage of one rank against the layout asked for."""
        options = self._options
        layout = layout_of(options)
        self._single = self._generate(
            pipeline_parallel_size=1, tensor_parallel_size=1, pp_partition=None
        )
        num_tokens = sum(map(len, self._single.token_ids))
        split = self._generate()
        _compare(self._single, split, layout)
        return f"one stage and {layout} answer {len(self._prompts)} prompts with the same " + (
            f"{num_tokens} tokens"
        )

    def check_draft(self, speculation: SpeculativeConfig) -> str:
        """The layout asked for with a draft, against one stage without."""
        assert self._single is not None, "nothing to compare with"
        config = {
            "model": speculation.model,
            "num_speculative_tokens": speculation.num_speculative_tokens,
            # Every window is as long as can be, whatever it costs here.
            "confidence_schedule": False,
            "watchdog": False,
        }
        drafted = self._generate(speculative_config=config)
        _compare(self._single, drafted, f"{layout_of(self._options)} with the draft")
        if not drafted.num_accepted_tokens:
            raise CheckFailedError(
                f"none of {drafted.num_draft_tokens} drafts is what the target says: the tokens "
                "are right, but this draft was not trained for this target"
            )
        return (
            f"the same tokens with the draft, {drafted.num_accepted_tokens} of "
            f"{drafted.num_draft_tokens} drafts accepted"
        )

    def _generate(self, **changes: Any) -> Generated:
        params = SamplingParams(temperature=0.0, max_tokens=NUM_GENERATED, ignore_eos=True)
        try:
            with LLM(self._model, show_progress=False, **(self._options | changes)) as llm:
                outputs = llm.generate(self._prompts, params, use_tqdm=False)
        except CapacityError as error:
            # Of this host, not of the checkpoint.
            raise CheckSkippedError(str(error)) from None
        for output in outputs:
            if output.outputs[0].error is not None:
                raise CheckFailedError(output.outputs[0].error)
        return Generated(
            [list(output.outputs[0].token_ids) for output in outputs],
            sum(output.timings.num_draft_tokens for output in outputs),
            sum(output.timings.num_accepted_tokens for output in outputs),
        )


def _compare(expected: Generated, found: Generated, layout: str) -> None:
    for number, (ours, theirs) in enumerate(
        zip(expected.token_ids, found.token_ids, strict=True), start=1
    ):
        if ours != theirs:
            same = [ours[:end] == theirs[:end] for end in range(1, len(ours) + 1)]
            raise CheckFailedError(
                f"prompt {number}: {layout} differs from one stage from token {sum(same)} on"
            )


def layout_of(options: Mapping[str, Any]) -> str:
    """In words, from options of EngineConfig."""
    stages, ranks = (options.get(f"{kind}_parallel_size", 1) for kind in ("pipeline", "tensor"))
    return f"{counted(stages, 'stage')} x {counted(ranks, 'rank')}"
