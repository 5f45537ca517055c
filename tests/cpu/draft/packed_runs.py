"""Steps and blocks of a drafter as a device has them: fixed capacities, some of it nobody's."""

from typing import Any

import torch

from stagecoach.draft.tiny import TinyDraftShape, gqa_draft_config, mla_draft_config
from stagecoach.kernels.ragged import PackedBlocks, StepTensors
from tests.cpu.draft.draft_runs import Request
from tests.cpu.model.model_runs import PAGE_SIZE, cache_row

SHAPE = TinyDraftShape()
CONFIGS: dict[str, dict[str, Any]] = {
    "mla": mla_draft_config(SHAPE),
    "mla, causal": mla_draft_config(SHAPE) | {"is_causal": True},
    "gqa": gqa_draft_config(TinyDraftShape(num_kv_heads=2)),
    "gqa, causal": gqa_draft_config(SHAPE) | {"is_causal": True},
}
LENGTHS = [9, 1, 21]
ANCHORS = [7, 300, 41]


def packed_step(requests: list[Request], num_idle: int, device: str = "cpu") -> StepTensors:
    """All tokens of the requests in one step, then some that are nobody's."""
    rows, positions = [], []
    for request in requests:
        for position in range(len(request.taps)):
            rows.append(cache_row(request.row, position))
            positions.append(position)
    rows += [-1] * num_idle
    positions += [0] * num_idle
    ids_T = torch.zeros(len(rows), dtype=torch.int32, device=device)
    return StepTensors(
        num_tokens=len(rows),
        token_ids_T=ids_T,
        cache_rows_T=torch.tensor(rows, dtype=torch.int32, device=device),
        windows=(),
        chunks=(),
        positions_T=torch.tensor(positions, dtype=torch.int32, device=device),
        num_real_1=torch.tensor([len(rows) - num_idle], dtype=torch.int32, device=device),
    )


def packed_blocks(requests: list[Request], num_idle: int, device: str = "cpu") -> PackedBlocks:
    """A block behind each request, then some that are not real."""
    pages, firsts = [], []
    for request in requests:
        firsts.append(len(pages))
        pages += request.row.page_ids
    idle = [0] * num_idle

    def int32(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return PackedBlocks(
        num_blocks=len(requests) + num_idle,
        max_context=max(LENGTHS),
        anchor_ids_N=int32(ANCHORS + idle),
        starts_N=int32(LENGTHS + idle),
        is_real_N=int32([1] * len(requests) + idle),
        first_pages_N=int32(firsts + idle),
        pages_P=int32(pages),
        block_size=PAGE_SIZE,
    )
