"""Runs a model layer group by layer group, once as one stage and once as several.

Owns the two streams of every step and what crosses between groups. As one stage, a stream goes on
from layer to layer; as several, it is sent and made anew at every stage's end, by the code that
does so between workers. Both run the same weights, so that all that can differ is what crosses:
they are compared behind the first group of each stage, and from there on have one computation.

Dimensions: T tokens, B closed blocks, N taps, H hidden size, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from stagecoach.checking.groups import Architecture, LayerGroup
from stagecoach.checking.steps import BLOCK_SIZE, NUM_DRAFT_TOKENS, NUM_PAGES, NUM_SLOTS, CheckStep
from stagecoach.checking.verdict import CheckFailedError
from stagecoach.model.attn_residual import ResidualStream
from stagecoach.model.checkpoint_reader import CheckpointReader
from stagecoach.model.kimi_k3 import StageModel
from stagecoach.model.stage_memory import StageMemory, memory_shapes
from stagecoach.model.weights import Progress, fill_from
from stagecoach.pipeline.boundary import incoming_fields, outgoing_fields
from stagecoach.pipeline.handoff import Handoff
from stagecoach.pipeline.stage import Stage
from stagecoach.pipeline.tap_relay import TapRelay
from stagecoach.pipeline.thread_links import ThreadMesh
from stagecoach.pipeline.topology import Topology


class StepEnd(NamedTuple):
    """What one step leaves behind the last layer."""

    logits_TV: Tensor
    taps_TNH: Tensor | None  # None without a draft


@dataclass
class Findings:
    """What the runs have shown so far."""

    not_finite: list[str] = field(default_factory=list)  # layers behind which a value is not
    different: list[str] = field(default_factory=list)  # boundaries behind which the runs differ
    num_boundaries: int = 0
    ends: list[StepEnd] = field(default_factory=list)  # one a step, once all layers ran

    def judge_layers(self, num_layers: int) -> str:
        """Raises CheckFailedError, naming the first layer with a value that is not finite."""
        if self.not_finite:
            raise CheckFailedError(f"NaN or infinity {self.not_finite[0]}")
        num_tokens = sum(len(end.logits_TV) for end in self.ends)
        return f"{num_layers} layers ran {len(self.ends)} steps of {num_tokens} tokens in all"

    def judge_boundaries(self) -> str:
        """Raises CheckFailedError, naming the first place where the runs differ."""
        if self.different:
            raise CheckFailedError(f"one stage and several differ {self.different[0]}")
        boundaries = "the boundary"
        if self.num_boundaries > 1:
            boundaries = f"{self.num_boundaries} boundaries"
        return (
            f"one stage and {self.num_boundaries + 1} leave the same values, bit for bit, behind "
            f"{boundaries} and the head"
        )


class LayerRun:
    """The runs of all steps; give it every group in order.

    Args:
        stages: those of the engine.
    """

    def __init__(
        self, architecture: Architecture, stages: Sequence[Stage], steps: Sequence[CheckStep]
    ) -> None:
        self._architecture = architecture
        self._steps = steps
        self._staged = _StagedRun(architecture, stages, len(steps))
        self._single: list[ResidualStream] = []
        self.findings = Findings(num_boundaries=len(stages) - 1)

    def run_group(
        self, group: LayerGroup, reader: CheckpointReader, progress: Progress | None = None
    ) -> StageModel:
        """Load a group and run both over it; the model is returned for what reads its ends.

        Raises:
            CheckpointError: a tensor is mis-shaped, mistyped or unreadable.
        """
        architecture = self._architecture
        model = architecture.build(group.layers)
        fill_from(reader, model.slots, progress)
        model.prepare()
        self._run(group, model)
        return model

    @torch.inference_mode()
    def _run(self, group: LayerGroup, model: StageModel) -> None:
        architecture = self._architecture
        shapes = memory_shapes(
            architecture.config, group.layers, 1, architecture.dtype, NUM_DRAFT_TOKENS
        )
        memory = shapes.allocate(NUM_SLOTS, NUM_PAGES * BLOCK_SIZE)
        starts_stage = group.layers.start == group.stage.start
        staged_memory = None
        if starts_stage:
            staged_memory = shapes.allocate(NUM_SLOTS, NUM_PAGES * BLOCK_SIZE)
        for number, step in enumerate(self._steps):
            if group.layers.is_first:
                num_layers = architecture.config.num_layers
                self._single.append(_embed(model, step, architecture, num_layers))
            single = self._single[number]
            model.forward(single, step.tensors, memory, self._note_finite)
            if staged_memory is not None:
                staged = self._staged.run(number, group, model, step, staged_memory)
                if not _are_equal(single, staged):
                    self.findings.different.append(f"behind layer {group.layers.end - 1}")
            else:
                staged = self._staged.follow(number, group, single)
            if group.layers.is_last:
                self._end(number, model, single, staged)

    def _end(
        self, number: int, model: StageModel, single: ResidualStream, staged: ResidualStream
    ) -> None:
        findings = self.findings
        logits_TV, staged_TV = model.logits(single, None), model.logits(staged, None)
        if not _is_finite(logits_TV):
            findings.not_finite.append("in the logits")
        taps_TNH = self._staged.taps(number)
        if taps_TNH is not None:
            single_TNH = torch.stack([single.taps[tap] for tap in sorted(single.taps)], dim=1)
            if not torch.equal(single_TNH, taps_TNH):
                findings.different.append("in the taps that reach the draft")
        if not torch.equal(logits_TV, staged_TV):
            findings.different.append("in the logits")
        findings.ends.append(StepEnd(logits_TV, taps_TNH))

    def _note_finite(self, layer: int, stream: ResidualStream) -> None:
        if not _is_finite(_running_sum(stream)):
            self.findings.not_finite.append(f"behind layer {layer}")


class _StagedRun:
    """The streams of the run as several stages."""

    def __init__(self, architecture: Architecture, stages: Sequence[Stage], num_steps: int) -> None:
        self._architecture = architecture
        config, taps = architecture.config, architecture.taps
        topology = Topology(num_stages=len(stages), tp_size=1)
        mesh = ThreadMesh(topology)
        self._handoffs = [
            Handoff(
                mesh.links(topology.worker(stage.index)),
                topology.worker(stage.index),
                topology,
                incoming=incoming_fields(config, stage, taps),
                outgoing=outgoing_fields(config, stage, taps),
                dtype=architecture.dtype,
            )
            for stage in stages
        ]
        self._relays = [
            TapRelay(taps, stage, config.hidden_size) if taps else None for stage in stages
        ]
        for handoff in self._handoffs:
            handoff.agree()
        self._streams: list[ResidualStream | None] = [None] * num_steps
        self._relayed_TNH: list[Tensor | None] = [None] * num_steps

    def run(
        self,
        number: int,
        group: LayerGroup,
        model: StageModel,
        step: CheckStep,
        memory: StageMemory,
    ) -> ResidualStream:
        """One step through the first group of a stage."""
        stage, handoff = group.stage, self._handoffs[group.stage.index]

        def send(layer: int, stream: ResidualStream) -> None:
            handoff.send_final(layer, lambda name: self._field(name, stage, number, stream))

        handoff.begin_step(number)
        stream = self._enter(number, stage, model, step, handoff)
        send(stage.start - 1, stream)
        self._streams[number] = model.forward(stream, step.tensors, memory, send)
        return stream

    def follow(self, number: int, group: LayerGroup, single: ResidualStream) -> ResidualStream:
        """Take one step's values behind a group from the run as one stage, and send what is due.

        From equal values the same layers make equal ones, so they need not run again: what can
        differ is behind the first group of a stage.
        """
        stage, handoff = group.stage, self._handoffs[group.stage.index]
        handoff.begin_step(number)
        stream = ResidualStream(
            _running_sum(single),
            single.bank_TBH,
            self._architecture.config.num_closed_blocks(stage.end),
        )
        relay = self._relays[stage.index]
        own = relay.own if relay is not None else ()
        stream.taps = {tap: single.taps[tap] for tap in own if tap in single.taps}
        for layer in group.layers.layers:
            handoff.send_final(layer, lambda name: self._field(name, stage, number, stream))
        self._streams[number] = stream
        return stream

    def taps(self, number: int) -> Tensor | None:
        """Those of a step that went through all stages, [T, N, H]; None without a draft."""
        relay, stream = self._relays[-1], self._streams[number]
        if relay is None or stream is None:
            return None
        return relay.join(self._relayed_TNH[number], stream.taps)

    def _enter(
        self, number: int, stage: Stage, model: StageModel, step: CheckStep, handoff: Handoff
    ) -> ResidualStream:
        config = self._architecture.config
        if stage.is_first:
            return _embed(model, step, self._architecture, stage.end)
        fields = handoff.receive(step.tensors.num_tokens)
        self._relayed_TNH[number] = fields.get("taps_TNH")
        hidden_TH = fields["hidden_TH"]
        bank_TBH = fields.get("bank_TBH")
        if bank_TBH is None:
            bank_TBH = hidden_TH.new_empty(len(hidden_TH), 0, hidden_TH.shape[1])
        return ResidualStream(hidden_TH, bank_TBH, config.num_closed_blocks(stage.end))

    def _field(self, name: str, stage: Stage, number: int, stream: ResidualStream) -> Tensor:
        if name == "hidden_TH":
            return stream.partial_TH
        if name == "bank_TBH":
            return stream.bank_TBH
        relay = self._relays[stage.index]
        assert name == "taps_TNH" and relay is not None, f"no field of a boundary: {name}"
        return relay.join(self._relayed_TNH[number], stream.taps)


def _embed(
    model: StageModel, step: CheckStep, architecture: Architecture, end: int
) -> ResidualStream:
    """The stream before layer 0, with room for the blocks up to layer `end`."""
    stream = model.embed(step.tensors.token_ids_T)
    wide = ResidualStream.from_embedding(
        stream.partial_TH, architecture.config.num_closed_blocks(end)
    )
    wide.taps |= stream.taps
    return wide


def _running_sum(stream: ResidualStream) -> Tensor:
    """Of the open block; the stream is left as it is."""
    partial_TH, addend_TH = stream.pending
    return partial_TH if addend_TH is None else partial_TH + addend_TH


def _are_equal(single: ResidualStream, staged: ResidualStream) -> bool:
    return torch.equal(_running_sum(single), _running_sum(staged)) and torch.equal(
        single.bank_TBH, staged.bank_TBH
    )


def _is_finite(tensor: Tensor) -> bool:
    return bool(tensor.isfinite().all())
