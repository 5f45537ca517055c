"""KDA: recurrent and chunked form against published code, each other, and their promises."""

import itertools
from collections.abc import Callable
from functools import wraps
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.kimi_linear import modeling_kimi_linear as hf

from stagecoach.kernels.kda import kda_chunked, kda_gate, kda_recurrent, normalize_qk
from tests.cpu.kernels.group_builder import cut, make_group
from tests.cpu.kernels.oracles import fla_function, in_float64, torch_path


def without_record(operator: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The operator as an engine that does not speculate calls it: no slot has recorded rows."""

    @wraps(operator)
    def run(q_THK, k_THK, v_THV, g_THK, beta_TH, state_SHVK, *rest) -> Tensor:
        record_SNHX = state_SHVK.new_empty(
            len(state_SHVK), 0, q_THK.shape[1], 2 * q_THK.shape[2] + v_THV.shape[2]
        )
        return operator(q_THK, k_THK, v_THV, g_THK, beta_TH, state_SHVK, record_SNHX, *rest)

    return run


recurrent, chunked = without_record(kda_recurrent), without_record(kda_chunked)
FORMS = [recurrent, chunked]
form = pytest.mark.parametrize("run", FORMS)


class Inputs(NamedTuple):
    q_THK: Tensor
    k_THK: Tensor
    v_THV: Tensor
    g_THK: Tensor
    beta_TH: Tensor

    def rows(self, start: int, end: int) -> "Inputs":
        return Inputs(*(x[start:end] for x in self))


def make_inputs(
    num_tokens: int,
    seed: int,
    *,
    num_heads: int = 2,
    num_keys: int = 12,
    num_values: int = 10,
    dtype: torch.dtype = torch.float64,
) -> Inputs:
    """Normalised queries and keys, gates over the whole of (−5, 0), rates in (0, 1)."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(num_tokens, num_heads, *shape, generator=generator, dtype=torch.float64)

    q_THK, k_THK = normalize_qk(draw(num_keys), draw(num_keys))
    g_THK = -5 * (2 * draw(num_keys)).sigmoid()
    inputs = Inputs(q_THK, k_THK, draw(num_values), g_THK, draw().sigmoid())
    return Inputs(*(x.to(dtype) for x in inputs))


def make_pool(inputs: Inputs, num_slots: int, seed: int = 0) -> Tensor:
    """States of zeros in slot 0, random ones elsewhere."""
    num_heads, num_values = inputs.v_THV.shape[1:]
    generator = torch.Generator().manual_seed(seed)
    shape = (num_slots, num_heads, num_values, inputs.k_THK.shape[2])
    pool = torch.randn(shape, generator=generator, dtype=torch.float64)
    pool[0] = 0
    wide = inputs.v_THV.dtype == torch.float64
    return pool if wide else pool.float()


def difference(a: Tensor, b: Tensor) -> float:
    return (a.double() - b.double()).abs().max().item()


@pytest.mark.parametrize("num_tokens", [1, 7, 64, 130])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@form
def test_equals_published_recurrences(run, dtype: torch.dtype, num_tokens: int) -> None:
    """fla 0.6.0 naive_recurrent_kda and transformers recurrent_kimi_delta_attention.

    Reached: 2e-16 with their code widened to float64, 1.2e-7 in float32. Their state is [K, V].
    """
    inputs = make_inputs(num_tokens, seed=num_tokens, dtype=dtype)
    pool_SHVK = make_pool(inputs, 4)
    state_1HKV = pool_SHVK[2:3].mT.clone()
    o_THV = run(*inputs, pool_SHVK, make_group([num_tokens], [5], [2], [3]))
    batched = [x.unsqueeze(0) for x in inputs]
    fla = fla_function("ops/kda/naive.py", "naive_recurrent_kda")
    transformers = torch_path(hf.recurrent_kimi_delta_attention)
    tolerance = 2e-6
    if dtype == torch.float64:
        fla, transformers, tolerance = in_float64(fla), in_float64(transformers), 1e-13
    fla_o, fla_state = fla(*batched, scale=1.0, initial_state=state_1HKV, output_final_state=True)
    # transformers scales queries by K^-1/2 itself.
    batched[0] = batched[0] * inputs.k_THK.shape[2] ** 0.5
    hf_o, hf_state = transformers(*batched, initial_state=state_1HKV, output_final_state=True)
    for oracle_o, oracle_state in ((fla_o, fla_state), (hf_o, hf_state)):
        assert difference(o_THV, oracle_o[0]) < tolerance
        assert difference(pool_SHVK[3].mT, oracle_state[0]) < tolerance


@pytest.mark.parametrize("run", FORMS)
def test_equals_published_chunked_forms(run) -> None:
    """fla 0.6.0 naive_chunk_kda widened to float64; transformers chunk_kimi_delta_attention.

    Reached: 3e-16 against fla, 1.4e-6 against transformers, which stays in float32.
    """
    inputs = make_inputs(128, seed=3)
    pool_SHVK = make_pool(inputs, 3)
    state_1HKV = pool_SHVK[1:2].mT.clone()
    o_THV = run(*inputs, pool_SHVK, make_group([128], [64], [1], [2]))
    batched = [x.unsqueeze(0) for x in inputs]
    fla = in_float64(fla_function("ops/kda/naive.py", "naive_chunk_kda"))
    fla_o, fla_state = fla(*batched, scale=1.0, initial_state=state_1HKV, output_final_state=True)
    assert difference(o_THV, fla_o[0]) < 1e-13
    assert difference(pool_SHVK[2].mT, fla_state[0]) < 1e-13
    batched[0] = batched[0] * inputs.k_THK.shape[2] ** 0.5
    hf_o, hf_state = torch_path(hf.chunk_kimi_delta_attention)(
        *batched, initial_state=state_1HKV, output_final_state=True
    )
    assert difference(o_THV, hf_o[0]) < 1e-5
    assert difference(pool_SHVK[2].mT, hf_state[0]) < 1e-5


def test_gate_equals_published_gates() -> None:
    """fla 0.6.0 naive gates and transformers KimiLinearForgetGate, both in float32.

    Reached: 5e-7, on values up to 20.
    """
    generator = torch.Generator().manual_seed(1)
    raw_THK = 8 * torch.randn(9, 3, 5, generator=generator)
    a_log_H = torch.randn(3, generator=generator)
    dt_bias_HK = torch.randn(3, 5, generator=generator)
    bounded = fla_function("ops/kda/gate.py", "naive_kda_lowerbound_gate")
    legacy = fla_function("ops/kda/gate.py", "naive_kda_gate")
    expected = bounded(raw_THK, a_log_H, dt_bias_HK, lower_bound=-5.0)
    for dtype in (torch.float32, torch.float64):
        g_THK = kda_gate(raw_THK.to(dtype), a_log_H, dt_bias_HK, lower_bound=-5.0)
        assert g_THK.dtype == dtype
        torch.testing.assert_close(g_THK.float(), expected, rtol=1e-6, atol=1e-6)
        assert (g_THK <= 0).all() and (g_THK >= -5).all()
    g_THK = kda_gate(raw_THK, a_log_H, dt_bias_HK, lower_bound=None)
    torch.testing.assert_close(g_THK, legacy(raw_THK, a_log_H, dt_bias_HK), rtol=1e-6, atol=1e-6)

    gate = hf.KimiLinearForgetGate.__new__(hf.KimiLinearForgetGate)
    torch.nn.Module.__init__(gate)
    gate.head_dim, gate.f_a_proj, gate.f_b_proj = 5, torch.nn.Identity(), torch.nn.Identity()
    gate.dt_bias = torch.nn.Parameter(dt_bias_HK.flatten())
    gate.A_log = torch.nn.Parameter(a_log_H.view(1, 1, 3, 1))
    with torch.no_grad():
        expected = gate(raw_THK.flatten(1).unsqueeze(0))[0]
    torch.testing.assert_close(g_THK, expected, rtol=2e-6, atol=2e-6)


def test_normalize_qk_equals_published_norm() -> None:
    """transformers l2norm (x / sqrt(Σx² + 1e-6), as fla) in float64: 1.2e-16.

    The row of tiny values tells + eps from max(norm, eps).
    """
    q_THK, k_THK = torch.randn(2, 6, 3, 12, dtype=torch.float64).unbind(0)
    k_THK[0] *= 1e-4
    before = q_THK.clone(), k_THK.clone()
    q_out_THK, k_out_THK = normalize_qk(q_THK, k_THK)
    torch.testing.assert_close(q_out_THK, hf.l2norm(q_THK) * 12**-0.5, rtol=1e-14, atol=0)
    torch.testing.assert_close(k_out_THK, hf.l2norm(k_THK), rtol=1e-14, atol=0)
    assert torch.equal(q_THK, before[0]) and torch.equal(k_THK, before[1])
    assert normalize_qk(q_THK.bfloat16(), k_THK.bfloat16())[0].dtype == torch.float32


EDGES = [1, 2, 3, 15, 16, 17, 31, 33, 63, 64, 65, 95, 96, 127, 128, 129, 200]


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.sampled_from(EDGES), min_size=1, max_size=4),
    num_keys=st.sampled_from([4, 7, 12, 60]),
    num_values=st.sampled_from([5, 16]),
    chunk_size=st.sampled_from([16, 32, 64]),
    seed=st.integers(0, 1000),
)
def test_chunked_equals_recurrent(
    lengths: list[int], num_keys: int, num_values: int, chunk_size: int, seed: int
) -> None:
    """Ragged batches in float64, states read from and written to other slots.

    Required 1e-12, reached 7e-16."""
    inputs = make_inputs(sum(lengths), seed, num_keys=num_keys, num_values=num_values)
    count = len(lengths)
    # Neighbours in the batch share a read slot; the first starts from nothing.
    read_slots = [0] + [1 + index // 2 for index in range(1, count)]
    group = make_group(
        lengths,
        [0] + [7] * (count - 1),
        read_slots,
        [10 + index for index in range(count)],
        chunk_size=chunk_size,
    )
    pool_SHVK = make_pool(inputs, 20, seed)
    before_SHVK = pool_SHVK.clone()
    chunked_pool_SHVK = pool_SHVK.clone()
    o_THV = recurrent(*inputs, pool_SHVK, group)
    chunked_o_THV = chunked(*inputs, chunked_pool_SHVK, group)
    assert difference(o_THV, chunked_o_THV) < 1e-12
    assert difference(pool_SHVK, chunked_pool_SHVK) < 1e-12
    assert torch.equal(pool_SHVK[:10], before_SHVK[:10])
    assert torch.equal(pool_SHVK[10 + count :], before_SHVK[10 + count :])
    assert not torch.equal(pool_SHVK[10], before_SHVK[10])


@pytest.mark.parametrize("gate", [-5.0, -3.0, -1e-3, 0.0])
@pytest.mark.parametrize("num_tokens", [64, 100])
def test_chunked_survives_constant_gates(gate: float, num_tokens: int) -> None:
    """Constant log-decay in float32 stays at rounding level: 1.1e-6 from the float64 recurrence.

    The largest difference is at gate 0, where nothing is ever forgotten."""
    inputs = make_inputs(num_tokens, seed=5, num_keys=32, num_values=16)
    inputs = inputs._replace(g_THK=torch.full_like(inputs.g_THK, gate))
    group = make_group([num_tokens], [1], [1], [2])
    pool_SHVK = make_pool(inputs, 3)
    narrow = Inputs(*(x.float() for x in inputs))
    narrow_pool_SHVK = pool_SHVK.float()
    o_THV = recurrent(*inputs, pool_SHVK, group)
    narrow_o_THV = chunked(*narrow, narrow_pool_SHVK, group)
    assert difference(o_THV, narrow_o_THV) < 5e-6
    assert difference(pool_SHVK[2], narrow_pool_SHVK[2]) < 5e-6


def test_chunked_keeps_slow_channels_beside_fast_ones() -> None:
    """Late in a chunk, where summed gates are large, slow decays keep float32 precision.

    Differences of cumulative sums near −300 carry errors of 1e-5; products reach 1.4e-7.
    """
    inputs = make_inputs(64, seed=6, num_keys=16, num_values=16)
    g_THK = torch.full_like(inputs.g_THK, -5.0)
    g_THK[60:] = -1e-4
    inputs = inputs._replace(g_THK=g_THK)
    group = make_group([64])
    pool_SHVK = make_pool(inputs, 2)
    narrow_pool_SHVK = pool_SHVK.float()
    o_THV = recurrent(*inputs, pool_SHVK, group)
    narrow_o_THV = chunked(*(x.float() for x in inputs), narrow_pool_SHVK, group)
    assert difference(o_THV, narrow_o_THV) < 1e-6
    assert difference(pool_SHVK, narrow_pool_SHVK) < 1e-6


@settings(max_examples=25, deadline=None)
@given(
    total=st.integers(1, 150),
    sizes=st.lists(st.sampled_from([1, 2, 3, 8, 16, 17, 64, 65]), min_size=1, max_size=5),
    form_order=st.sampled_from(list(itertools.product(FORMS, repeat=2))),
    seed=st.integers(0, 1000),
)
def test_any_split_into_calls_is_the_same(
    total: int, sizes: list[int], form_order: tuple, seed: int
) -> None:
    """Outputs and state of a sequence do not depend on its cuts or forms.

    float64: required 1e-12, reached 4e-16."""
    inputs = make_inputs(total, seed, num_keys=7, num_values=5)
    whole_pool_SHVK = make_pool(inputs, 3)
    whole_o_THV = recurrent(*inputs, whole_pool_SHVK, make_group([total]))
    pool_SHVK = torch.full_like(whole_pool_SHVK, float("nan"))
    pool_SHVK[0] = 0
    pieces = []
    read_slot, write_slot = 0, 1
    for number, (start, end) in enumerate(cut(total, sizes)):
        group = make_group([end - start], [start], [read_slot], [write_slot])
        run = form_order[number % 2]
        pieces.append(run(*inputs.rows(start, end), pool_SHVK, group))
        # Sometimes in place, sometimes into the other slot.
        read_slot = write_slot
        write_slot = 1 + (number // 2) % 2
    assert difference(torch.cat(pieces), whole_o_THV) < 1e-12
    assert difference(pool_SHVK[read_slot], whole_pool_SHVK[1]) < 1e-12


@form
def test_neighbours_and_free_slots_never_change_a_row(run) -> None:
    """float64, alone or in a ragged batch beside NaN slots and a NaN neighbour.

    Required 1e-13, reached 2e-17."""
    lengths, starts = [70, 1, 33, 16], [0, 4, 9, 2]
    inputs = make_inputs(sum(lengths), seed=8)
    pool_SHVK = make_pool(inputs, 12)
    pool_SHVK[6:] = float("nan")
    pool_SHVK[4] = float("nan")  # a poisoned request's state stays its own
    group = make_group(lengths, starts, [0, 2, 3, 4], [6, 7, 8, 9])
    batch_pool_SHVK = pool_SHVK.clone()
    o_THV = run(*inputs, batch_pool_SHVK, group)
    offset = 0
    for index in range(3):
        rows = inputs.rows(offset, offset + lengths[index])
        alone_pool_SHVK = pool_SHVK.clone()
        slots = [int(group.read_slots_B[index])], [int(group.write_slots_B[index])]
        alone = make_group([lengths[index]], [starts[index]], *slots)
        alone_o_THV = run(*rows, alone_pool_SHVK, alone)
        assert difference(o_THV[offset : offset + lengths[index]], alone_o_THV) < 1e-13
        assert difference(batch_pool_SHVK[slots[1]], alone_pool_SHVK[slots[1]]) < 1e-13
        offset += lengths[index]
    assert batch_pool_SHVK[10:].isnan().all()
    assert torch.equal(batch_pool_SHVK[:4], pool_SHVK[:4])


@form
def test_half_precision_inputs(run) -> None:
    """bfloat16 values with a float32 state: 1.3e-7 from float64 on the same rounded inputs."""
    inputs = make_inputs(40, seed=9, dtype=torch.bfloat16)
    group = make_group([25, 15])
    pool_SHVK = make_pool(inputs, 3)
    wide_pool_SHVK = pool_SHVK.double()
    o_THV = run(*inputs, pool_SHVK, group)
    wide_o_THV = recurrent(*(x.double() for x in inputs), wide_pool_SHVK, group)
    assert o_THV.dtype == pool_SHVK.dtype == torch.float32
    assert difference(o_THV, wide_o_THV) < 2e-6
    assert difference(pool_SHVK, wide_pool_SHVK) < 2e-6


@form
def test_inputs_are_left_alone(run) -> None:
    for lengths in ([64], [1, 1], [5, 2]):
        inputs = make_inputs(sum(lengths), seed=10, num_heads=1)
        before = [x.clone() for x in inputs]
        run(*inputs, make_pool(inputs, 4), make_group(lengths))
        assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))
