"""How far two states of one stage are apart.

Owns the measure. Which states must be equal, and what a difference means, is the head's
business.

Dimensions: C pairs, M = 2 C states, S slots, N rows of a slot, H heads, V and K head dim,
C channels of a convolution row, R history rows.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from stagecoach.kernels.kda import read_states
from stagecoach.model.stage_memory import KdaMemory, StageMemory
from stagecoach.runner.transfer import upload
from stagecoach.schedule.step_plan import Comparison


def state_differences(memory: StageMemory, comparisons: Sequence[Comparison]) -> tuple[float, ...]:
    """For each pair the largest difference of any KDA layer's recurrent state or history rows.

    A difference is relative to the largest magnitude in either tensor. NaN makes it infinite;
    a stage without KDA layers has none, 0.0.
    """
    layers = [layer for layer in memory.layers.values() if isinstance(layer, KdaMemory)]
    if not comparisons or not layers:
        return (0.0,) * len(comparisons)
    slots = [item.slot for item in comparisons] + [item.other_slot for item in comparisons]
    replay = [item.replay for item in comparisons] + [item.other_replay for item in comparisons]
    device = layers[0].recurrent_SHVK.device
    slots_M, replay_M = (upload(numbers, torch.int64, device) for numbers in (slots, replay))
    worst_C = torch.zeros(len(comparisons), dtype=torch.float64, device=device)
    for recurrent_SHVK, conv_rows_SNC, record_SNHX in layers:
        states_MHVK = read_states(recurrent_SHVK, record_SNHX, slots_M, replay_M, max(replay))
        num_history_rows = conv_rows_SNC.shape[1] - record_SNHX.shape[1]
        places_MR = replay_M.unsqueeze(1) + torch.arange(num_history_rows, device=device)
        history_MRC = conv_rows_SNC[slots_M.unsqueeze(1), places_MR]
        for part in (states_MHVK, history_MRC):
            worst_C = torch.maximum(worst_C, _relative_differences(part))
    return tuple(worst_C.tolist())


def _relative_differences(both: Tensor) -> Tensor:
    """[2 C, ...] -> float64 [C], between the first half and the second."""
    one, other = both.to(torch.float64).flatten(1).chunk(2)
    size_C = torch.maximum(one.abs().amax(1), other.abs().amax(1))
    difference_C = (one - other).abs().amax(1) / size_C
    # Two states of zeros are equal; whatever holds NaN or infinity is not.
    return difference_C.masked_fill(size_C == 0, 0.0).nan_to_num(torch.inf, posinf=torch.inf)
