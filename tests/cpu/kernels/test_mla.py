"""MLA over scattered cache rows: published attention, decode against prefill, and the masks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.kimi_linear import modeling_kimi_linear as hf
from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig

from stagecoach.kernels.mla import head_product, mla_decode, mla_prefill, write_rows
from stagecoach.kernels.ragged import SegmentGroup
from tests.cpu.kernels.group_builder import cut, make_group, scattered_rows

NUM_HEADS, LATENT, PE, NOPE, VALUE = 3, 20, 6, 10, 8
SCALE = (NOPE + PE) ** -0.5


class Layer:
    """Random queries and cache rows of sequences, in a pool whose free rows are NaN."""

    def __init__(self, totals: list[int], seed: int, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

        self.kv_b_HXC = draw(NUM_HEADS, NOPE + VALUE, LATENT) / LATENT**0.5
        self.queries = [draw(total, NUM_HEADS, NOPE + PE) for total in totals]
        self.rows = [draw(total, LATENT + PE) for total in totals]
        self.places, num_rows = scattered_rows(totals, page_size=4, seed=seed)
        self.cache_RD = torch.full((num_rows, LATENT + PE), float("nan"), dtype=dtype)
        self.cache_RD[:4] = 0  # the null page

    def group(
        self,
        live: list[int],
        spans: list[tuple[int, int]],
        num_drafts: list[int] | None = None,
    ) -> SegmentGroup:
        """Segments `spans` of the sequences `live`; their rows are written."""
        for index, (start, end) in zip(live, spans, strict=True):
            places = torch.tensor(self.places[index][start:end])
            self.cache_RD[places] = self.rows[index][start:end]
        return make_group(
            [end - start for start, end in spans],
            [start for start, _ in spans],
            context_rows=[
                self.places[index][:end] for index, (_, end) in zip(live, spans, strict=True)
            ],
            num_drafts=num_drafts,
        )

    def kv_up(self, latent_BLC: Tensor) -> tuple[Tensor, Tensor]:
        both_BLHX = torch.einsum("blc,hxc->blhx", latent_BLC, self.kv_b_HXC)
        return both_BLHX[..., :NOPE], both_BLHX[..., NOPE:]

    def prefill(self, q_THD: Tensor, group: SegmentGroup) -> Tensor:
        kv_up_OC = self.kv_b_HXC.flatten(0, 1)
        return mla_prefill(q_THD, self.cache_RD, kv_up_OC, group, SCALE)

    def decode(self, q_THD: Tensor, group: SegmentGroup) -> Tensor:
        k_up_HNC, v_up_HVC = self.kv_b_HXC[:, :NOPE], self.kv_b_HXC[:, NOPE:]
        q_latent_THC = head_product(q_THD[..., :NOPE], k_up_HNC)
        o_THC = mla_decode(q_latent_THC, q_THD[..., NOPE:], self.cache_RD, group, SCALE)
        return head_product(o_THC, v_up_HVC.mT)

    def whole(self, index: int) -> Tensor:
        """The sequence alone, query by query in plain sums."""
        k_nope_LHN, v_LHV = (x[0] for x in self.kv_up(self.rows[index][None, :, :LATENT]))
        pe_LP = self.rows[index][:, LATENT:]
        outputs = []
        for t, q_HD in enumerate(self.queries[index]):
            scores_LH = (k_nope_LHN[: t + 1] * q_HD[:, :NOPE]).sum(-1)
            scores_LH = scores_LH + pe_LP[: t + 1] @ q_HD[:, NOPE:].t()
            shares_LH = (scores_LH * SCALE).softmax(0)
            outputs.append((shares_LH.unsqueeze(2) * v_LHV[: t + 1]).sum(0))
        return torch.stack(outputs)


forms = pytest.mark.parametrize("form", ["prefill", "decode"])


@pytest.mark.parametrize("q_lora_rank", [None, 12])
@forms
def test_equals_published_attention(form: str, q_lora_rank: int | None) -> None:
    """transformers KimiLinearAttention, eager, float32: 1e-7."""
    config = KimiLinearConfig(
        hidden_size=32,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_HEADS,
        q_lora_rank=q_lora_rank,
        kv_lora_rank=LATENT,
        qk_nope_head_dim=NOPE,
        qk_rope_head_dim=PE,
        v_head_dim=VALUE,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    attention = hf.KimiLinearAttention(config, layer_idx=0).eval()
    x_1TH = torch.randn(1, 23, 32)
    mask = torch.full((23, 23), float("-inf")).triu(1).view(1, 1, 23, 23)
    layer = Layer([23], seed=1, dtype=torch.float32)
    with torch.no_grad():
        expected_TH = attention(x_1TH, attention_mask=mask)[0][0]
        if q_lora_rank is None:
            q_TX = attention.q_proj(x_1TH[0])
        else:
            q_TX = attention.q_b_proj(attention.q_a_layernorm(attention.q_a_proj(x_1TH[0])))
        latent_TC, pe_TP = attention.kv_a_proj_with_mqa(x_1TH[0]).split((LATENT, PE), dim=1)
        layer.rows = [torch.cat((attention.kv_a_layernorm(latent_TC), pe_TP), dim=1)]
        layer.kv_b_HXC = attention.kv_b_proj.weight.view(NUM_HEADS, NOPE + VALUE, LATENT)
        group = layer.group([0], [(0, 23)])
        o_THV = getattr(layer, form)(q_TX.view(23, NUM_HEADS, NOPE + PE), group)
        o_TH = attention.o_proj(o_THV.flatten(1))
    torch.testing.assert_close(o_TH, expected_TH, rtol=1e-5, atol=2e-6)


@settings(max_examples=40, deadline=None)
@given(
    totals=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    sizes=st.lists(st.sampled_from([1, 2, 3, 4, 5, 8, 30]), min_size=1, max_size=5),
    form=st.sampled_from(["prefill", "decode"]),
    seed=st.integers(0, 1000),
)
def test_any_split_in_any_company_is_the_same(
    totals: list[int], sizes: list[int], form: str, seed: int
) -> None:
    """Ragged steps over shuffled pages, free rows NaN, against plain sums.

    float64: required 1e-13, reached 1.3e-15."""
    layer = Layer(totals, seed)
    spans = [cut(total, sizes[index:] or sizes) for index, total in enumerate(totals)]
    outputs: list[list[Tensor]] = [[] for _ in totals]
    for step in range(max(map(len, spans))):
        live = [index for index, row in enumerate(spans) if step < len(row)]
        now = [spans[index][step] for index in live]
        group = layer.group(live, now)
        q_THD = torch.cat([layer.queries[i][s:e] for i, (s, e) in zip(live, now, strict=True)])
        o_THV = getattr(layer, form)(q_THD, group)
        for index, piece in zip(live, o_THV.split([e - s for s, e in now]), strict=True):
            outputs[index].append(piece)
    for index, pieces in enumerate(outputs):
        torch.testing.assert_close(torch.cat(pieces), layer.whole(index), rtol=1e-12, atol=1e-13)
    assert not layer.cache_RD[:4].any()


@forms
def test_a_neighbour_full_of_nan_stays_alone(form: str) -> None:
    """float64: the other segments equal themselves without it; reached 4e-16."""
    layer = Layer([9, 13, 5], seed=2)
    layer.rows[1][:] = float("nan")
    spans = [(5, 9), (9, 13), (4, 5)]
    layer.group([0, 1, 2], [(0, start) for start, _ in spans])
    queries = [layer.queries[i][s:e] for i, (s, e) in enumerate(spans)]
    o_THV = getattr(layer, form)(torch.cat(queries), layer.group([0, 1, 2], spans))
    assert o_THV[4:8].isnan().all()
    for index, rows in ((0, slice(0, 4)), (2, slice(8, 9))):
        alone = getattr(layer, form)(queries[index], layer.group([index], [spans[index]]))
        torch.testing.assert_close(o_THV[rows], alone, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [1, 2, 3])
def test_a_draft_that_is_not_finite_reaches_no_token_before_it(place: int, value: float) -> None:
    """Windows of three drafts and of none beside each other, the rows of one spoilt.

    The tokens before are the same bit for bit; the draft and those behind it show it."""
    layer = Layer([12, 9], seed=5)
    spans = [(8, 12), (8, 9)]
    queries = torch.cat([layer.queries[0][8:12], layer.queries[1][8:9]])
    layer.group([0, 1], [(0, 8), (0, 8)])
    clean_THV = layer.decode(queries, layer.group([0, 1], spans, num_drafts=[3, 0]))
    layer.rows[0][8 + place, :LATENT] = value
    o_THV = layer.decode(queries, layer.group([0, 1], spans, num_drafts=[3, 0]))
    intact = [*range(place), 4]
    assert torch.equal(o_THV[intact], clean_THV[intact])
    assert o_THV[place:4].isnan().flatten(1).any(1).all()


@forms
def test_half_precision(form: str) -> None:
    """bfloat16 cache and queries, float32 softmax: 6e-3 from float64 on the same values."""
    layer = Layer([40], seed=3, dtype=torch.bfloat16)
    group = layer.group([0], [(0, 40)])
    o_THV = getattr(layer, form)(layer.queries[0], group)
    assert o_THV.dtype == torch.bfloat16
    layer.rows = [layer.rows[0].double()]
    layer.queries = [layer.queries[0].double()]
    layer.kv_b_HXC = layer.kv_b_HXC.double()
    torch.testing.assert_close(o_THV.double(), layer.whole(0), rtol=3e-2, atol=3e-2)


def test_rows_are_normed_and_stored_where_they_belong() -> None:
    """float64: the latent's mean square is one; no other row is touched."""
    torch.manual_seed(6)
    latent_TC = torch.randn(3, LATENT, dtype=torch.float64)
    k_pe_TP = torch.randn(3, PE, dtype=torch.float64)
    weight_C = torch.rand(LATENT, dtype=torch.float64)
    cache_RD = torch.full((9, LATENT + PE), 7.0, dtype=torch.float64)
    write_rows(cache_RD, latent_TC, k_pe_TP, weight_C, 0.5, torch.tensor([8, 2, 5]))
    normed_TC = latent_TC / (latent_TC.square().mean(1, keepdim=True) + 0.5).sqrt() * weight_C
    torch.testing.assert_close(cache_RD[[8, 2, 5], :LATENT], normed_TC, rtol=1e-13, atol=0)
    assert torch.equal(cache_RD[[8, 2, 5], LATENT:], k_pe_TP)
    assert (cache_RD[[0, 1, 3, 4, 6, 7]] == 7).all()


@forms
def test_a_gate_multiplies_the_output(form: str) -> None:
    layer = Layer([5], seed=7)
    group = layer.group([0], [(0, 5)])
    gate_THV = torch.linspace(-3, 3, 5 * NUM_HEADS * VALUE, dtype=torch.float64)
    gate_THV = gate_THV.view(5, NUM_HEADS, VALUE)
    plain_THV = getattr(layer, form)(layer.queries[0], group)
    if form == "prefill":
        kv_up_OC = layer.kv_b_HXC.flatten(0, 1)
        o_THV = mla_prefill(layer.queries[0], layer.cache_RD, kv_up_OC, group, SCALE, gate_THV)
    else:
        identity_HVV = torch.eye(VALUE, dtype=torch.float64).expand(NUM_HEADS, -1, -1)
        o_THV = head_product(plain_THV, identity_HVV, gate_THV)
    torch.testing.assert_close(o_THV, plain_THV / (1 + (-gate_THV).exp()), rtol=1e-13, atol=0)


def test_inputs_are_left_alone() -> None:
    layer = Layer([6], seed=4)
    group = layer.group([0], [(0, 6)])
    before = layer.queries[0].clone(), layer.cache_RD.clone()
    layer.prefill(layer.queries[0], group)
    layer.decode(layer.queries[0], group)
    assert torch.equal(layer.queries[0], before[0])
    torch.testing.assert_close(layer.cache_RD, before[1], rtol=0, atol=0, equal_nan=True)
