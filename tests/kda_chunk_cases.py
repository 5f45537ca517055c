"""Cases of the chunked KDA kernels: drawn, run, and compared with the reference.

What the tests on both kinds of machine and the check on a GPU share.
Dimensions as in `kernels/kda/reference.py`.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from stagecoach.kernels.kda.chunk_cuda import ChunkTiles, kda_chunked_packed
from stagecoach.kernels.kda.reference import kda_chunked, kda_gate, normalize_qk
from tests.packed_group import GroupPair, make_packed_group


@dataclass(frozen=True, kw_only=True)
class ChunkCase:
    """A chunk group in plain numbers, as `make_packed_group` takes it."""

    lengths: tuple[int, ...]
    num_heads: int = 2
    head_dim: int = 16
    lower_bound: float | None = -5.0
    starts: tuple[int, ...] | None = None
    replay: tuple[int, ...] | None = None
    read_slots: tuple[int, ...] | None = None
    write_slots: tuple[int, ...] | None = None
    saves: tuple[tuple[int, int, int], ...] | None = None
    capacity_segments: int | None = None
    capacity_tokens: int | None = None
    gate_shift: float = 0.0  # added to the gate's logits

    def make_group(self, device: str) -> GroupPair:
        def listed(values: tuple | None) -> list | None:
            return None if values is None else list(values)

        return make_packed_group(
            list(self.lengths),
            listed(self.starts),
            listed(self.replay),
            read_slots=listed(self.read_slots),
            write_slots=listed(self.write_slots),
            saves=listed(self.saves),
            capacity_segments=self.capacity_segments,
            capacity_tokens=self.capacity_tokens,
            device=device,
        )


CASES: dict[str, ChunkCase] = {
    "one token": ChunkCase(lengths=(1,)),
    "one whole chunk": ChunkCase(lengths=(64,), starts=(64,)),
    "odd lengths": ChunkCase(
        lengths=(1, 63, 130, 65),
        starts=(9, 0, 3, 64),
        read_slots=(2, 0, 2, 4),
        write_slots=(1, 5, 6, 4),
    ),
    "no bound": ChunkCase(lengths=(70, 5), starts=(1, 0), lower_bound=None),
    "no bound, steep": ChunkCase(lengths=(70, 5), starts=(1, 0), lower_bound=None, gate_shift=30.0),
    "replay": ChunkCase(
        lengths=(66, 2, 3),
        starts=(7, 7, 7),
        replay=(3, 0, 1),
        read_slots=(1, 2, 2),
        write_slots=(1, 4, 5),
    ),
    "saves": ChunkCase(
        lengths=(150, 64, 30, 9),
        starts=(64, 0, 2, 0),
        write_slots=(1, 2, 3, 4),
        read_slots=(1, 0, 3, 0),
        saves=(
            (0, 65, 5),
            (0, 96, 6),
            (0, 128, 7),
            (0, 192, 8),
            (0, 193, 9),
            (0, 214, 10),
            (1, 64, 11),
            (2, 31, 12),
        ),
    ),
    "many saves": ChunkCase(
        lengths=(177, 300, 1, 64, 129, 31, 220, 95),
        starts=(0, 128, 64, 0, 64, 0, 128, 0),
        read_slots=(0, 2, 3, 0, 5, 0, 7, 0),
        write_slots=(1, 2, 3, 4, 5, 6, 7, 8),
        saves=(
            (0, 100, 9),
            (0, 177, 10),
            (1, 130, 11),
            (1, 250, 12),
            (1, 320, 13),
            (4, 65, 14),
            (4, 191, 15),
            (5, 30, 16),
            (6, 200, 17),
            (6, 205, 18),
            (7, 64, 19),
            (7, 94, 20),
        ),
    ),
    "room to spare": ChunkCase(
        lengths=(20, 66), starts=(0, 5), capacity_segments=5, capacity_tokens=300, saves=()
    ),
}


class Drawn(NamedTuple):
    """Inputs of all tokens up to the capacity, NaN in those that are nobody's."""

    q_THK: Tensor
    k_THK: Tensor
    v_THV: Tensor
    decay_THK: Tensor
    beta_TH: Tensor
    a_log_H: Tensor
    dt_bias_HK: Tensor
    state_SHVK: Tensor
    record_SNHX: Tensor


class Errors(NamedTuple):
    """‖ours − reference‖ / ‖reference‖, and whether a slot changed that nobody names."""

    output: float
    state: float
    touched: bool


def draw(case: ChunkCase, pair: GroupPair, dtype: torch.dtype, device: str, seed: int) -> Drawn:
    """Random numbers of one case. Slots that nobody reads hold NaN, slot 0 holds zeros."""
    generator = torch.Generator(device).manual_seed(seed)
    heads, dim = case.num_heads, case.head_dim
    num_tokens, num_real = pair.packed.num_tokens, pair.num_real_tokens

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    def tokens(x_T: Tensor) -> Tensor:
        x_T = x_T.to(dtype)
        x_T[num_real:] = torch.nan
        return x_T

    q_THK, k_THK = normalize_qk(normal(num_tokens, heads, dim), normal(num_tokens, heads, dim))
    segments = pair.segments
    used = [0, *segments.read_slots_B.tolist(), *segments.write_slots_B.tolist()]
    used += [slot for *_, slot in case.saves or ()]
    state_SHVK = normal(max(used) + 2, heads, dim, dim)
    record_SNHX = normal(len(state_SHVK), max(case.replay or (0,)), heads, 3 * dim)
    record_SNHX[..., :dim].sigmoid_()
    is_read = torch.zeros(len(state_SHVK), dtype=torch.bool)
    is_read[segments.read_slots_B] = True
    state_SHVK[~is_read] = torch.nan
    record_SNHX[~is_read] = torch.nan
    state_SHVK[0], record_SNHX[0] = 0, 0
    for slot in set(segments.read_slots_B.tolist()):
        longest = int(segments.replay_B[segments.read_slots_B == slot].max())
        record_SNHX[slot, longest:] = torch.nan
    # Rows of a wider tensor, as the layer's fused projection leaves them.
    beta_TH = tokens(normal(num_tokens, heads + 3))[:, :heads]
    return Drawn(
        q_THK=tokens(q_THK),
        k_THK=tokens(k_THK),
        v_THV=tokens(normal(num_tokens, heads, dim)),
        decay_THK=tokens(2 * normal(num_tokens, heads, dim) + case.gate_shift),
        beta_TH=beta_TH,
        a_log_H=normal(heads).abs(),
        dt_bias_HK=normal(heads, dim),
        state_SHVK=state_SHVK,
        record_SNHX=record_SNHX,
    )


def run_device(
    case: ChunkCase, drawn: Drawn, pair: GroupPair, tiles: ChunkTiles | None = None
) -> Tensor:
    """The kernels; states of `drawn` are updated."""
    *of_tokens, state_SHVK, record_SNHX = drawn
    return kda_chunked_packed(
        *of_tokens, case.lower_bound, state_SHVK, record_SNHX, pair.packed, tiles
    )


def run_reference(case: ChunkCase, drawn: Drawn, pair: GroupPair, dtype: torch.dtype) -> Tensor:
    """The reference on the CPU in `dtype`; `drawn.state_SHVK`, then of that type, is updated."""
    real = slice(pair.num_real_tokens)
    g_THK = kda_gate(
        drawn.decay_THK[real].to(dtype),
        drawn.a_log_H.to(dtype),
        drawn.dt_bias_HK.to(dtype),
        case.lower_bound,
    )
    return kda_chunked(
        *(x_T[real].to(dtype) for x_T in (drawn.q_THK, drawn.k_THK, drawn.v_THV)),
        g_THK,
        drawn.beta_TH[real].to(dtype).sigmoid(),
        drawn.state_SHVK,
        drawn.record_SNHX,
        pair.segments,
    )


def compare(
    case: ChunkCase,
    dtype: torch.dtype,
    device: str,
    seed: int = 0,
    tiles: ChunkTiles | None = None,
) -> Errors:
    """Both on the same inputs of `dtype`; the reference computes in float64."""
    pair = case.make_group(device)
    drawn = draw(case, pair, dtype, device, seed)
    wide = drawn._replace(
        state_SHVK=drawn.state_SHVK.double(), record_SNHX=drawn.record_SNHX.double()
    )
    wide = Drawn(*(x.cpu().clone() for x in wide))
    o_THV = run_device(case, drawn, pair, tiles)
    expected_THV = run_reference(case, wide, pair, torch.float64)
    ours, expected = drawn.state_SHVK.cpu().double(), wide.state_SHVK
    expected[0] = 0
    written = ~expected.isnan()
    return Errors(
        relative_error(o_THV[: pair.num_real_tokens].cpu(), expected_THV),
        relative_error(ours[written], expected[written]),
        not torch.equal(ours.isnan(), expected.isnan()),
    )


def relative_error(ours: Tensor, expected: Tensor) -> float:
    difference = (ours.double() - expected.double()).norm() / expected.double().norm()
    return difference.item()
