"""The named fields that cross from one stage to the next.

The model's config declares them; shapes follow from the plan's token count and the layer
where the stage ends, so that no metadata travels. Every field names the layer after which
it is final: it is sent as soon as that layer ran.

A stage that starts at layer s receives `hidden_TH`, the running sum after layer s - 1,
and with attention residuals `bank_TBH` with ceil(s / block) rows a token, the closed blocks
(Kimi-K3 reference modelling code; behaviour reference §2.3).
"""

from dataclasses import dataclass

from stagecoach.model_config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryField:
    """One tensor that crosses a boundary: [T, *row_shape] in the model's dtype."""

    name: str
    row_shape: tuple[int, ...]
    final_after: int  # decoder layer whose output completes the field


def boundary_fields(config: ModelConfig, layer: int) -> tuple[BoundaryField, ...]:
    """Fields that a stage starting at decoder layer `layer` (> 0) receives, in send order."""
    hidden = BoundaryField(name="hidden_TH", row_shape=(config.hidden_size,), final_after=layer - 1)
    if config.attn_res_block_size is None:
        return (hidden,)
    num_blocks = config.num_closed_blocks(layer)
    bank = BoundaryField(
        name="bank_TBH",
        row_shape=(num_blocks, config.hidden_size),
        # A block is closed by the layer whose index is a multiple of the block size.
        final_after=(num_blocks - 1) * config.attn_res_block_size,
    )
    return (bank, hidden)
