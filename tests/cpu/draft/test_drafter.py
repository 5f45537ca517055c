"""Context rows and block passes against the formulas over whole rows, and what must not matter."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stagecoach.draft.tiny import TinyDraftShape, gqa_draft_config, mla_draft_config
from tests.cpu.draft.draft_runs import (
    HIDDEN,
    Stage,
    empty_step,
    greedy,
    make_requests,
    target_tables,
)
from tests.cpu.draft.oracle import Block, Oracle

pytestmark = pytest.mark.cpu

WriteDraft = Callable[[dict[str, Any]], Path]

SHAPE = TinyDraftShape()
NUM_TAPS = len(SHAPE.taps)
CONFIGS: dict[str, dict[str, Any]] = {
    "mla": mla_draft_config(SHAPE),
    "mla, unscaled rope": mla_draft_config(TinyDraftShape(yarn_factor=None)),
    "mla, no positions": mla_draft_config(SHAPE) | {"mla_use_nope": True},
    "mla, full-rank query": mla_draft_config(TinyDraftShape(q_lora_rank=None)),
    "mla, causal": mla_draft_config(SHAPE) | {"is_causal": True},
    "mla, tap norms": mla_draft_config(SHAPE) | {"fc_norm": True},
    "mla, confidence without Markov": mla_draft_config(SHAPE)
    | {"confidence_head_with_markov": False},
    "gqa": gqa_draft_config(TinyDraftShape(num_kv_heads=2)),
    "gqa, one key head": gqa_draft_config(TinyDraftShape(num_kv_heads=1, num_layers=3)),
    "gqa, causal": gqa_draft_config(SHAPE) | {"is_causal": True},
}
every_config = pytest.mark.parametrize("name", CONFIGS)
BOTH = pytest.mark.parametrize("name", ["mla", "gqa"])


@pytest.fixture(scope="module")
def both_folders(write_draft: WriteDraft) -> dict[str, Path]:
    return {name: write_draft(CONFIGS[name]) for name in ("mla", "gqa")}


def oracle_block(folder: Path, taps: Tensor, anchor: int, num_tokens: int, name: str) -> Block:
    oracle = Oracle.read(folder, is_causal="causal" in name)
    embedding, head = target_tables()
    token_ids = [anchor] + [SHAPE.mask_token_id] * (num_tokens - 1)
    return oracle.block(taps, embedding[token_ids], head)


@every_config
def test_a_block_is_that_of_the_formulas(name: str, write_draft: WriteDraft) -> None:
    """Requests of unlike lengths in one call, each alone in the formulas: 1e-11 in float64."""
    folder = write_draft(CONFIGS[name])
    oracle = Oracle.read(folder, is_causal="causal" in name)
    requests = make_requests([9, 1, 21], NUM_TAPS)
    anchors = [7, 300, 41]
    stage = Stage.read(folder)
    stage.write_all(requests)
    seen: list[Tensor] = []

    def choose(place: int, logits_NV: Tensor, drafts_NJ: Tensor) -> Tensor:
        seen.append(logits_NV)
        return greedy(place, logits_NV, drafts_NJ)

    proposal = stage.propose(requests, anchors, choose)
    assert proposal.token_ids_NK.shape == (3, 7)
    assert proposal.confidences_NK is not None
    for index, (request, anchor) in enumerate(zip(requests, anchors, strict=True)):
        block = oracle_block(folder, request.taps, anchor, 7, name)
        before = anchor
        for place in range(7):
            logits = block.logits[place] + oracle.markov_bias(before)
            torch.testing.assert_close(seen[place][index], logits, rtol=1e-11, atol=1e-11)
            confidence = oracle.confidence(block.hidden[place], before)
            torch.testing.assert_close(
                proposal.confidences_NK[index, place], confidence, rtol=1e-11, atol=1e-11
            )
            before = int(logits.argmax())
            assert int(proposal.token_ids_NK[index, place]) == before


@BOTH
def test_what_was_chosen_decides_what_comes_next(name: str, write_draft: WriteDraft) -> None:
    """A choice that is not the best one moves the next place's bias."""
    folder = write_draft(CONFIGS[name])
    oracle = Oracle.read(folder)
    requests = make_requests([5], NUM_TAPS)
    stage = Stage.read(folder, num_draft_tokens=3)
    stage.write_all(requests)
    seen: list[Tensor] = []

    def choose(place: int, logits_NV: Tensor, drafts_NJ: Tensor) -> Tensor:
        assert drafts_NJ.tolist() == [[100 + index for index in range(place)]]
        seen.append(logits_NV[0])
        return torch.tensor([100 + place])

    proposal = stage.propose(requests, [7], choose)
    assert proposal.token_ids_NK.tolist() == [[100, 101, 102]]
    block = oracle_block(folder, requests[0].taps, 7, 3, name)
    for place, before in enumerate((7, 100, 101)):
        expected = block.logits[place] + oracle.markov_bias(before)
        torch.testing.assert_close(seen[place], expected, rtol=1e-11, atol=1e-11)


@BOTH
def test_a_causal_block_does_not_depend_on_its_length(name: str, write_draft: WriteDraft) -> None:
    """The first places of 7 are those of 3; without the mask they are others."""
    for is_causal in (True, False):
        folder = write_draft(CONFIGS[name] | {"is_causal": is_causal})
        confidences = []
        for num_tokens in (3, 7):
            stage = Stage.read(folder, num_draft_tokens=num_tokens)
            requests = make_requests([6], NUM_TAPS)
            stage.write_all(requests)
            proposal = stage.propose(
                requests, [7], lambda place, logits, _: logits[:, 0].long() * 0
            )
            assert proposal.confidences_NK is not None
            confidences.append(proposal.confidences_NK[0, :3])
        assert torch.allclose(*confidences, rtol=1e-12) == is_causal


@BOTH
@settings(max_examples=15, deadline=None)
@given(sizes=st.lists(st.tuples(st.integers(0, 1), st.integers(1, 6)), max_size=8))
def test_chunks_of_a_context_change_nothing(
    name: str, sizes: list[tuple[int, int]], both_folders: dict[str, Path]
) -> None:
    """Rows written in any chunks, alone or beside others, are those of one write (I34)."""
    lengths = [11, 6]
    whole = Stage.read(both_folders[name])
    whole.write_all(make_requests(lengths, NUM_TAPS))
    chunked = Stage.read(both_folders[name])
    requests = make_requests(lengths, NUM_TAPS)

    def left(index: int) -> int:
        return len(requests[index].taps) - requests[index].row.num_computed

    for index, size in sizes:
        if left(index):
            chunked.write([(requests[index], min(size, left(index)))])
    if parts := [(requests[index], left(index)) for index in (1, 0) if left(index)]:
        chunked.write(parts)
    torch.testing.assert_close(
        chunked.caches[0], whole.caches[0], rtol=1e-13, atol=1e-13, equal_nan=True
    )


@BOTH
def test_rows_of_rejected_drafts_are_overwritten(name: str, write_draft: WriteDraft) -> None:
    folder = write_draft(CONFIGS[name])
    expected = Stage.read(folder)
    kept = make_requests([8], NUM_TAPS)
    expected.write_all(kept)
    stage = Stage.read(folder)
    requests = make_requests([8], NUM_TAPS)
    rejected = requests[0]._replace(taps=-5.0 * requests[0].taps)
    stage.write([(rejected, 8)])
    requests[0].row.num_computed = 3
    first = stage.propose(requests, [9])  # what lies behind the context is not seen
    requests[0].row.num_computed = 0
    stage.write_all(requests)
    second = stage.propose(requests, [9])
    assert torch.equal(second.token_ids_NK, expected.propose(kept, [9]).token_ids_NK)
    assert first.confidences_NK is not None and not first.confidences_NK.isnan().any()


@BOTH
def test_a_request_does_not_see_its_neighbours(name: str, write_draft: WriteDraft) -> None:
    folder = write_draft(CONFIGS[name])
    stage = Stage.read(folder)
    requests = make_requests([9, 2, 17], NUM_TAPS)
    stage.write_all(requests)
    together = stage.propose(requests, [5, 6, 7])
    for index, request in enumerate(requests):
        alone = stage.propose([request], [5 + index])
        assert torch.equal(alone.token_ids_NK[0], together.token_ids_NK[index])
        torch.testing.assert_close(
            alone.confidences_NK[0], together.confidences_NK[index], rtol=1e-12, atol=1e-12
        )


@pytest.mark.parametrize("tp_size", [2, 4])
@BOTH
def test_ranks_together_are_one(name: str, tp_size: int, write_draft: WriteDraft) -> None:
    config = gqa_draft_config(SHAPE) if name == "gqa" else CONFIGS[name]
    folder = write_draft(config)
    proposals = []
    for size in (1, tp_size):
        stage = Stage.read(folder, tp_size=size)
        requests = make_requests([9, 14], NUM_TAPS)
        stage.write([(requests[0], 9), (requests[1], 5)])
        stage.write([(requests[1], 9)])
        proposals.append(stage.propose(requests, [5, 6]))
    one, many = proposals
    assert torch.equal(one.token_ids_NK, many.token_ids_NK)
    torch.testing.assert_close(one.confidences_NK, many.confidences_NK, rtol=1e-12, atol=1e-12)


def test_only_the_rank_that_chooses_holds_the_heads(write_draft: WriteDraft) -> None:
    stage = Stage.read(write_draft(CONFIGS["mla"]), tp_size=2)
    first, second = stage.drafters
    markov_bytes = 2 * SHAPE.vocab_size * SHAPE.markov_rank * 8
    assert first.num_parameter_bytes - second.num_parameter_bytes > markov_bytes


@BOTH
def test_a_step_without_tokens_writes_nothing(name: str, write_draft: WriteDraft) -> None:
    stage = Stage.read(write_draft(CONFIGS[name]))
    before = stage.caches[0].clone()
    taps = torch.empty(0, NUM_TAPS, HIDDEN, dtype=torch.float64)
    stage.drafters[0].write_context(taps, empty_step(), stage.caches[0])
    torch.testing.assert_close(stage.caches[0], before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@BOTH
def test_narrow_types_stay_near_the_formulas(
    name: str, dtype: torch.dtype, write_draft: WriteDraft
) -> None:
    folder = write_draft(CONFIGS[name])
    stage = Stage.read(folder, dtype=dtype)
    requests = make_requests([13], NUM_TAPS)
    stage.write_all(requests)
    seen: list[Tensor] = []

    def choose(place: int, logits_NV: Tensor, drafts_NJ: Tensor) -> Tensor:
        seen.append(logits_NV[0])
        return torch.tensor([3])

    proposal = stage.propose(requests, [7], choose)
    oracle = Oracle.read(folder)
    block = oracle_block(folder, requests[0].taps, 7, 7, name)
    expected = torch.stack(
        [block.logits[place] + oracle.markov_bias(3 if place else 7) for place in range(7)]
    )
    error = (torch.stack(seen).double() - expected).abs().max() / expected.abs().max()
    assert error < (1e-5 if dtype == torch.float32 else 0.1)
    assert all(logits.dtype == torch.float32 for logits in seen)
    assert proposal.confidences_NK is not None and proposal.confidences_NK.dtype == torch.float32


def test_without_a_confidence_head_there_are_none(write_draft: WriteDraft) -> None:
    stage = Stage.read(write_draft(CONFIGS["mla"] | {"enable_confidence_head": False}))
    requests = make_requests([4], NUM_TAPS)
    stage.write_all(requests)
    assert stage.propose(requests, [1]).confidences_NK is None
