"""One pass of a step through a stage's layers: what comes in, runs, and goes out.

Owns how the fields of a boundary become a residual stream and come out of it again. Does not
know how a step was packed, when anything runs, or what the last stage makes of its stream.

Dimensions: T tokens, B closed blocks, N taps, H hidden size.
"""

from typing import NamedTuple

from torch import Tensor

from stagecoach.kernels.ragged import StepTensors
from stagecoach.model.attn_residual import ResidualStream
from stagecoach.model.kimi_k3 import StageModel
from stagecoach.model.stage_memory import StageMemory
from stagecoach.pipeline.handoff import Handoff
from stagecoach.pipeline.stage import Stage
from stagecoach.pipeline.tap_relay import TapRelay


class StageStream(NamedTuple):
    """The residual stream in one stage, and the taps that came with it."""

    stream: ResidualStream
    relayed_TNH: Tensor | None  # None where none came


class StagePass:
    """The layers of one stage between its two boundaries.

    Args:
        relay: None without a drafter.
    """

    def __init__(
        self, model: StageModel, stage: Stage, handoff: Handoff, relay: TapRelay | None
    ) -> None:
        self._model = model
        self._stage = stage
        self._handoff = handoff
        self._relay = relay

    def receive(self, num_tokens: int) -> dict[str, Tensor]:
        """The fields of this step's tokens from the stage before, by name; none on the first."""
        return {} if self._stage.is_first else self._handoff.receive(num_tokens)

    def enter(self, step: StepTensors, fields: dict[str, Tensor]) -> StageStream:
        """The stream before the stage's first layer."""
        if self._stage.is_first:
            return StageStream(self._model.embed(step.token_ids_T), None)
        own = {name: field for name, field in fields.items() if name != "taps_TNH"}
        return StageStream(self._model.resume(**own), fields.get("taps_TNH"))

    def run(
        self, at: StageStream, step: StepTensors, memory: StageMemory, *, sends: bool
    ) -> StageStream:
        """Run the layers; with `sends`, each field leaves as soon as it is final."""
        if not sends:
            return at._replace(stream=self._model.forward(at.stream, step, memory))

        def send(layer: int, stream: ResidualStream) -> None:
            self._handoff.send_final(
                layer, lambda name: self.read(at._replace(stream=stream), name)
            )

        send(self._stage.start - 1, at.stream)
        return at._replace(stream=self._model.forward(at.stream, step, memory, send))

    def read(self, at: StageStream, name: str) -> Tensor:
        """The field of that name, as it now is."""
        match name:
            case "hidden_TH":
                return at.stream.partial_TH
            case "bank_TBH":
                return at.stream.bank_TBH
            case "taps_TNH":
                taps_TNH = self.taps(at)
                assert taps_TNH is not None, "taps without a drafter"
                return taps_TNH
        raise AssertionError(f"no field of a boundary: {name}")

    def taps(self, at: StageStream) -> Tensor | None:
        """All taps known so far, [T, N, H]; None without a drafter."""
        if self._relay is None:
            return None
        return self._relay.join(at.relayed_TNH, at.stream.taps)
