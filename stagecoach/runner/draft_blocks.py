"""The blocks that the drafter proposes behind a step's segments, as tensors on the device.

Owns which segments a block stands behind, at what anchor, and with whose noise its drafts are
chosen. Knows neither the head nor what was accepted.

Dimensions: N segments that propose, B segments of a step of windows, J drafts of a block so far,
V vocabulary, P pages.
"""

import torch
from torch import Tensor

from stagecoach.draft.drafter import Choose
from stagecoach.kernels.ragged import PackedBlocks, PackedGroup, StepTensors
from stagecoach.kernels.sampling import SamplingRows, choose_tokens
from stagecoach.runner.packed_inputs import PackedStep
from stagecoach.runner.row_results import Sampled
from stagecoach.runner.sampling_table import SamplingTable
from stagecoach.runner.transfer import upload
from stagecoach.schedule.step_plan import StepPlan


def newest_of_proposing(plan: StepPlan, sampled: Sampled) -> Tensor:
    """Id and position of the newest token of each segment that proposes: int64 [2, N]."""
    inputs = sampled.inputs
    newest_row_N = sampled.verdict.newest_rows(inputs)
    proposing = [
        place for place, index in enumerate(inputs.segments) if plan.segments[index].proposes
    ]
    if len(proposing) < len(inputs.segments):
        newest_row_N = newest_row_N[upload(proposing, torch.int64, newest_row_N.device)]
    return torch.stack(
        [sampled.verdict.token_ids_R[newest_row_N], inputs.positions_R[newest_row_N]]
    )


def blocks_of_all(packed: PackedStep, newest_2B: Tensor) -> PackedBlocks:
    """A block behind every segment of a step of windows; real where it proposes."""
    group = packed.step.windows[0]
    assert isinstance(group, PackedGroup), "a packed step"
    anchor_ids_B, starts_B = newest_2B.unbind()
    return PackedBlocks(
        num_blocks=packed.num_segments,
        max_context=group.max_context,
        anchor_ids_N=anchor_ids_B,
        starts_N=starts_B,
        is_real_N=packed.proposes_B,
        first_pages_N=group.first_pages_B,
        pages_P=group.pages_P,
        block_size=group.block_size,
    )


def own_noise_choice(packed: PackedStep, newest_2B: Tensor, table: SamplingTable) -> Choose:
    """How the blocks of `blocks_of_all` are chosen from: with the target's own noise."""
    sampling_rows_B = packed.sampling_rows_B.where(packed.proposes_B > 0, -1)

    def choose(place: int, logits_BV: Tensor, drafts_BJ: Tensor) -> Tensor:
        rows = SamplingRows(
            sampling_rows_B,
            segment_T=None,
            positions_T=newest_2B[1],
            position_offset=1 + place,
            temperatures_N=table.temperatures_N,
            seeds_N=table.seeds_N,
        )
        return choose_tokens(logits_BV, rows).token_ids_T

    return choose


def blocks_of_proposing(
    plan: StepPlan, step: StepTensors, anchor_ids_N: Tensor, starts_N: Tensor
) -> PackedBlocks:
    """Blocks behind the segments of any packed plan that propose, and no others."""
    groups = [span.group for span in step.spans() if isinstance(span.group, PackedGroup)]
    device = anchor_ids_N.device
    proposing = [index for index, segment in enumerate(plan.segments) if segment.proposes]
    # The groups share one list of pages.
    first_pages_B = torch.cat([group.first_pages_B for group in groups])
    return PackedBlocks(
        num_blocks=len(proposing),
        max_context=max(plan.segments[index].end for index in proposing),
        anchor_ids_N=anchor_ids_N.to(torch.int32),
        starts_N=starts_N.to(torch.int32),
        is_real_N=torch.ones(len(proposing), dtype=torch.int32, device=device),
        first_pages_N=first_pages_B[upload(proposing, torch.int64, device)],
        pages_P=groups[0].pages_P,
        block_size=groups[0].block_size,
    )
