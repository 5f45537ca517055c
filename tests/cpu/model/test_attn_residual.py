"""The residual stream against the published loop written out, and its boundary tensors."""

import pytest
import torch
from torch import Tensor

from stagecoach.model.attn_residual import ResidualRead, ResidualStream
from stagecoach.model.norm import RmsNorm
from stagecoach.model.weight_slots import WeightScope

pytestmark = pytest.mark.cpu

NUM_TOKENS, HIDDEN, BLOCK, NUM_LAYERS, EPS = 3, 8, 3, 8, 1e-5


def published_mix(blocks: list[Tensor], partial: Tensor, norm: Tensor, proj: Tensor) -> Tensor:
    """Token by token, candidate by candidate."""
    rows = []
    for token in range(NUM_TOKENS):
        candidates = [block[token] for block in blocks] + [partial[token]]
        scores = torch.stack(
            [
                (value * norm * proj).sum() / torch.sqrt((value * value).mean() + EPS)
                for value in candidates
            ]
        )
        shares = scores.softmax(0)
        rows.append(sum(share * value for share, value in zip(shares, candidates, strict=True)))
    return torch.stack(rows)


def outputs(generator: torch.Generator) -> list[Tensor]:
    return [
        torch.randn(NUM_TOKENS, HIDDEN, generator=generator, dtype=torch.float64)
        for _ in range(2 * NUM_LAYERS + 1)
    ]


def reads(generator: torch.Generator) -> list[tuple[ResidualRead, Tensor, Tensor]]:
    made = []
    for _ in range(2 * NUM_LAYERS):
        scope = WeightScope(torch.float64)
        read = ResidualRead(scope, "res", HIDDEN, EPS, has_mixing=True)
        for slot in scope.slots:
            slot.target.copy_(torch.randn(slot.shape, generator=generator, dtype=torch.float64))
        read.prepare()
        norm, proj = (slot.target.flatten() for slot in scope.slots)
        made.append((read, norm, proj))
    return made


@pytest.mark.parametrize("cut", [0, 1, 2, 3, 4, 6, 7])
def test_every_read_is_the_published_one_with_a_boundary_anywhere(cut: int) -> None:
    """Sublayers add given outputs; at layer `cut` the stream is handed to another stage."""
    generator = torch.Generator().manual_seed(cut)
    embedding, *added = outputs(generator)
    mixers = reads(generator)
    stream = ResidualStream.from_embedding(embedding, -(-max(cut, 1) // BLOCK))
    blocks: list[Tensor] = []
    partial: Tensor | None = embedding
    for layer in range(NUM_LAYERS):
        if layer == cut:
            assert stream.bank_TBH.shape[1] == -(-layer // BLOCK)
            capacity = -(-NUM_LAYERS // BLOCK)
            stream = ResidualStream(stream.partial_TH, stream.bank_TBH.contiguous(), capacity)
        for half in range(2):
            read, norm, proj = mixers[2 * layer + half]
            assert partial is not None
            expected = published_mix(blocks, partial, norm, proj)
            torch.testing.assert_close(read(stream), expected, rtol=0, atol=1e-12)
            if half == 0 and layer % BLOCK == 0:
                blocks.append(partial)
                partial = None
                stream.close_block()
            output = added[2 * layer + half]
            partial = output if partial is None else partial + output
            stream.add(output)
    assert stream.bank_TBH.is_contiguous()
    torch.testing.assert_close(stream.bank_TBH, torch.stack(blocks, dim=1), rtol=0, atol=0)
    torch.testing.assert_close(stream.partial_TH, partial, rtol=0, atol=1e-12)


def test_tensors_that_were_handed_out_are_never_written_again() -> None:
    stream = ResidualStream.from_embedding(torch.ones(2, 4), 2)
    stream.close_block()
    stream.add(torch.full((2, 4), 2.0))
    partial, bank = stream.partial_TH, stream.bank_TBH
    stream.add(torch.full((2, 4), 3.0))
    stream.close_block()
    stream.add(torch.full((2, 4), 7.0))
    assert partial.unique().tolist() == [2.0]
    assert bank.shape == (2, 1, 4) and bank.unique().tolist() == [1.0]
    assert stream.bank_TBH[:, 1].unique().tolist() == [5.0]


def test_a_plain_stream_is_a_running_sum() -> None:
    scope = WeightScope(torch.float32)
    read = ResidualRead(scope, "res", 4, EPS, has_mixing=False)
    assert not scope.slots
    read.prepare()
    stream = ResidualStream.from_embedding(torch.ones(2, 4), 0)
    stream.add(torch.full((2, 4), 2.0))
    assert read(stream).unique().tolist() == [3.0]
    assert stream.bank_TBH.shape == (2, 0, 4)


def test_reading_between_closing_and_adding_is_our_mistake() -> None:
    stream = ResidualStream.from_embedding(torch.ones(2, 4), 1)
    stream.close_block()
    with pytest.raises(AssertionError, match="just closed"):
        _ = stream.partial_TH


@pytest.mark.parametrize("has_mixing", [False, True])
def test_a_fused_read_has_the_bits_of_its_parts(*, has_mixing: bool) -> None:
    """The addition, the read and the norm, one after the other or as one call; then the sum."""
    generator = torch.Generator().manual_seed(3)
    scope = WeightScope(torch.float64)
    read = ResidualRead(scope, "res", HIDDEN, EPS, has_mixing=has_mixing)
    norm = RmsNorm(scope, "norm", HIDDEN, EPS)
    for slot in scope.slots:
        slot.target.normal_(generator=generator)
    read.prepare()
    embedding, *added = outputs(generator)
    streams = [ResidualStream.from_embedding(embedding, 1) for _ in range(3)]
    for output in (None, *added[:3]):
        if output is not None:
            for stream in streams:
                stream.add(output)
        expected = read(streams[0])
        assert torch.equal(read.normed(streams[1], norm), norm(expected))
        mixed, normed = read.both(streams[2], norm)
        assert torch.equal(mixed, expected) and torch.equal(normed, norm(expected))
        sums = [stream.partial_TH for stream in streams]
        assert torch.equal(sums[0], sums[1]) and torch.equal(sums[0], sums[2])
        rows = torch.tensor([1, 0])
        bank = streams[0].bank_TBH[rows]
        assert torch.equal(read.normed_rows(bank, sums[0][rows], norm), normed[rows])
        if output is None:
            for stream in streams:
                stream.close_block()
                stream.add(added[-1])
