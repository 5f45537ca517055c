"""Packed plans on a GPU: no copy reads a host buffer that a later plan has been written into."""

import torch

from stagecoach.runner.packed_inputs import GroupBounds, PackedInputs, StepBounds
from stagecoach.schedule.step_plan import Segment, StepPlan, pack_page_table

BLOCK_SIZE = 4
BOUNDS = StepBounds(
    windows=GroupBounds(
        num_tokens=8,
        num_segments=8,
        max_length=1,
        max_context=64,
        max_replay=0,
        max_drafts=0,
        num_saves=0,
    ),
    chunks=None,
)


def plan(step: int) -> StepPlan:
    """Numbers that no other step has."""
    return StepPlan(
        step=step,
        segments=tuple(
            Segment(
                request_id=number,
                epoch=0,
                start=0,
                token_ids=(100 * step + number,),
                read_slot=0,
                write_slot=1 + number,
                page_table=pack_page_table([1 + number]),
                sampling_row=number,
            )
            for number in range(1 + step % 8)
        ),
    )


def test_plans_that_wait_for_a_busy_device_arrive_whole() -> None:
    device = torch.device("cuda")
    inputs = PackedInputs(BLOCK_SIZE, device, num_values=1024, num_buffers=2)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    seen = []
    with torch.cuda.stream(stream):
        for step in range(20):
            # Some milliseconds: the host is far ahead.
            torch.cuda._sleep(10_000_000)
            packed = inputs.pack(plan(step), BOUNDS if step % 2 else None)
            seen.append((packed.step.token_ids_T.clone(), packed.sampling_rows_B.clone()))
    stream.synchronize()
    for step, (token_ids_T, sampling_rows_B) in enumerate(seen):
        segments = plan(step).segments
        num_padded = 8 - len(segments) if step % 2 else 0
        assert token_ids_T.tolist() == [
            *(segment.token_ids[0] for segment in segments),
            *[0] * num_padded,
        ]
        assert sampling_rows_B.tolist() == [*range(len(segments)), *[-1] * num_padded]
