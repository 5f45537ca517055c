"""The named fields that cross from one stage to the next.

The model's config declares them; shapes follow from the plan's token count and the layer
where the stage ends, so that no metadata travels. Every field names the layer after which
it is final: it is sent as soon as that layer ran.

A stage that starts at layer s receives `hidden_TH`, the running sum after layer s - 1,
and with attention residuals `bank_TBH` with ceil(s / block) rows a token, the closed blocks
(Kimi-K3 reference modelling code). For a drafter it receives `taps_TNH` too, where there are
taps before it.
"""

from dataclasses import dataclass, replace

from stagecoach.config.model import ModelConfig, Taps
from stagecoach.pipeline.stage import Stage
from stagecoach.pipeline.tap_relay import final_after, taps_before


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryField:
    """One tensor that crosses a boundary: [T, *row_shape] in the model's dtype."""

    name: str
    row_shape: tuple[int, ...]
    final_after: int  # decoder layer whose output completes the field
    columns: tuple[int, ...] = ()  # tap ids, where the rows hold taps

    def __str__(self) -> str:
        columns = f" of taps {', '.join(map(str, self.columns))}" if self.columns else ""
        return f"{self.name} [T, {', '.join(map(str, self.row_shape))}]{columns}"


def boundary_fields(
    config: ModelConfig, layer: int, taps: Taps | None = None
) -> tuple[BoundaryField, ...]:
    """Fields that a stage starting at decoder layer `layer` (> 0) receives, in send order.

    The order is that in which they become final.

    Args:
        taps: what a drafter on the last stage reads; None without one.
    """
    hidden_size = config.hidden_size
    fields = []
    if config.attn_res_block_size is not None:
        num_blocks = config.num_closed_blocks(layer)
        bank = BoundaryField(
            name="bank_TBH",
            row_shape=(num_blocks, hidden_size),
            # A block is closed by the layer whose index is a multiple of the block size.
            final_after=(num_blocks - 1) * config.attn_res_block_size,
        )
        fields.append(bank)
    if taps is not None and (columns := taps_before(taps, layer)):
        relayed = BoundaryField(
            name="taps_TNH",
            row_shape=(len(columns), hidden_size),
            final_after=final_after(taps, columns[-1]),
            columns=columns,
        )
        fields.append(relayed)
    fields.sort(key=lambda field: field.final_after)
    hidden = BoundaryField(name="hidden_TH", row_shape=(hidden_size,), final_after=layer - 1)
    return (*fields, hidden)


def incoming_fields(
    config: ModelConfig, stage: Stage, taps: Taps | None = None
) -> tuple[BoundaryField, ...]:
    """What a stage receives, in order; nothing on the first."""
    return () if stage.is_first else boundary_fields(config, stage.start, taps)


def outgoing_fields(
    config: ModelConfig, stage: Stage, taps: Taps | None = None
) -> tuple[BoundaryField, ...]:
    """What a stage sends, in order; nothing on the last.

    A field that was final before the stage is passed on before its first layer: "after"
    the layer before it.
    """
    if stage.is_last:
        return ()
    return tuple(
        replace(field, final_after=max(field.final_after, stage.start - 1))
        for field in boundary_fields(config, stage.end, taps)
    )
