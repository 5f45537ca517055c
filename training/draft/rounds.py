"""Verify rounds, replayed over whole answers: which drafts the target would have taken.

Owns the count of tokens per round as the engine makes it: prefill gives the answer's first token;
a round drafts after the last token and returns the accepted drafts and one more token, cut where
the answer ends. Draft and target choose with the same noise, so a draft is accepted where it
equals the row's next token; and because a draft only counts if all before it were accepted, the
Markov head may be given the row's own tokens.

Shapes: B rows, A places of an answer, K places of a block, V vocabulary.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from stagecoach.demo.tasks import ALL_FAMILIES
from training.draft.data import Batch, blocks_per_row
from training.draft.frozen_target import Answers, FrozenTarget
from training.draft.model import Draft
from training.draft.objective import CHUNK, draft_logits, heads

# Places behind a likely answer, for the target's own may be longer.
ROOM = 16


class Trial(NamedTuple):
    """A draft from every place of every answer, on the CPU."""

    is_taken_BAK: Tensor  # whether the draft equals the row's token
    confidence_BAK: Tensor  # logits
    num_tokens_B: Tensor  # of each answer; 0 for an empty row
    family_B: Tensor


class Round(NamedTuple):
    """One verify round."""

    family: str
    num_tokens: int  # returned
    is_taken: list[bool]  # of each draft inside the answer, up to the first that is not taken
    confidence: list[float]  # their logits


def gumbel_noise(
    num_rows: int, num_places: int, vocab_size: int, seed: int, device: torch.device
) -> Tensor:
    """Standard Gumbel noise `[B, A, V]`."""
    generator = torch.Generator(device).manual_seed(seed)
    shape = (num_rows, num_places, vocab_size)
    noise = torch.empty(shape, device=device).exponential_(generator=generator)
    return noise.log_().neg_()


@torch.no_grad()
def try_drafts(
    draft: Draft, target: FrozenTarget, batch: Batch, *, temperature: float, seed: int,
    block_length: int,
) -> Trial:  # fmt: skip
    """Let the target answer, and draft from every place of its answers."""
    device = target.head_VH.device
    ids_BT, start_B, end_B = (torch.from_numpy(x).to(device, torch.long) for x in batch[:3])
    num_places = int((end_B - start_B).max()) + ROOM
    noise_BAV = None
    if temperature > 0:
        noise_BAV = temperature * gumbel_noise(
            len(ids_BT), num_places, len(target.head_VH), seed, device
        )
    answers = target.own_answers(ids_BT, start_B, num_places, noise_BAV)
    taken, confidence = [], []
    group = blocks_per_row(ids_BT.shape[1])
    for first in range(0, num_places, group):
        parts = _try_places(
            draft, target, answers, start_B, noise_BAV, first, min(group, num_places - first),
            block_length,
        )  # fmt: skip
        taken.append(parts[0])
        confidence.append(parts[1])
    return Trial(
        torch.cat(taken, dim=1).cpu(),
        torch.cat(confidence, dim=1).cpu(),
        (answers.end_B - start_B).cpu(),
        torch.from_numpy(batch.family_B),
    )


def _try_places(
    draft: Draft, target: FrozenTarget, answers: Answers, start_B: Tensor,
    noise_BAV: Tensor | None, first: int, count: int, block_length: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`is_taken_BAK` and `confidence_BAK` of some places. Drafts outside the row are arbitrary."""
    ids_BT = answers.ids_BT
    last = ids_BT.shape[1] - 1
    place_W = first + torch.arange(count, device=ids_BT.device)
    anchor_BW = (start_B[:, None] + place_W).clamp_max(last)
    hidden_BWKH = draft(
        answers.output.taps_BTC, anchor_BW, ids_BT.gather(1, anchor_BW), target.embedding_VH,
        block_length,
    )  # fmt: skip
    offset_K = torch.arange(block_length, device=ids_BT.device)
    position_BQ = (anchor_BW[..., None] + offset_K).flatten(1)
    previous_M = ids_BT.gather(1, position_BQ.clamp_max(last)).flatten()
    next_M = ids_BT.gather(1, (position_BQ + 1).clamp_max(last)).flatten()
    row_M = torch.arange(len(ids_BT), device=ids_BT.device).repeat_interleave(position_BQ.shape[1])
    place_M = (position_BQ + 1 - start_B[:, None]).flatten()
    weights = heads(draft, target.head_VH)
    taken, confidence = [], []
    for chunk in torch.arange(len(previous_M), device=ids_BT.device).split(CHUNK):
        logits, confidence_logit = draft_logits(
            hidden_BWKH.flatten(0, 2)[chunk], previous_M[chunk], weights
        )
        if noise_BAV is not None:
            place = place_M[chunk].clamp_max(noise_BAV.shape[1] - 1)
            logits = logits + noise_BAV[row_M[chunk], place]
        taken.append(logits.argmax(-1) == next_M[chunk])
        confidence.append(confidence_logit)
    shape = (len(ids_BT), count, block_length)
    return torch.cat(taken).view(shape), torch.cat(confidence).view(shape)


def rounds(trial: Trial) -> Iterator[Round]:
    """The rounds that decoding would make."""
    for row, num_tokens in enumerate(trial.num_tokens_B.tolist()):
        family = ALL_FAMILIES[int(trial.family_B[row])]
        place = 0
        while place < num_tokens - 1:
            remaining = num_tokens - 1 - place
            is_taken = trial.is_taken_BAK[row, place, :remaining].tolist()
            num_accepted = [*is_taken, False].index(False)
            num_tried = min(num_accepted + 1, len(is_taken))
            num_returned = min(num_accepted + 1, remaining)
            confidence = trial.confidence_BAK[row, place, :num_tried].tolist()
            yield Round(family, num_returned, is_taken[:num_tried], confidence)
            place += num_returned
