"""What training minimises, and how much of a draft the target would take.

The objective of the DSpark paper (arXiv 2607.05147), as NVIDIA's Megatron-Bridge and
lightseekorg/TorchSpec document it: 0.1 cross-entropy of the row's own tokens + 0.9 L1 distance of
the draft's distribution to the target's + binary cross-entropy of the confidence against
1 - L1 / 2, each place of a block weighted by exp(-place / gamma).

Shapes: M block tokens, H hidden, R Markov rank, V vocabulary.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from training.draft.model import Draft
from training.target.operations import linear

CROSS_ENTROPY_SHARE, L1_SHARE, CONFIDENCE_SHARE = 0.1, 0.9, 1.0
# Block tokens whose logits are in memory at once; every batch of blocks holds a multiple.
CHUNK = 3584


class DraftTokens(NamedTuple):
    """Block tokens of some blocks, flat."""

    hidden_MH: Tensor  # the draft's
    previous_M: Tensor  # the token before the predicted one
    next_M: Tensor  # the predicted one, as the row has it
    target_hidden_MH: Tensor  # what the target's head reads there
    weight_M: Tensor


class Heads(NamedTuple):
    """Weights of all heads."""

    head_VH: Tensor
    markov_w1_VR: Tensor
    markov_w2_VR: Tensor
    confidence_1X: Tensor
    confidence_bias_1: Tensor


class Losses(NamedTuple):
    """Weighted sums over block tokens."""

    cross_entropy: Tensor
    l1: Tensor
    confidence: Tensor

    def total(self) -> Tensor:
        """The objective."""
        return (
            CROSS_ENTROPY_SHARE * self.cross_entropy
            + L1_SHARE * self.l1
            + CONFIDENCE_SHARE * self.confidence
        )


def heads(draft: Draft, head_VH: Tensor) -> Heads:
    """The draft's own heads beside the target's."""
    return Heads(
        head_VH,
        draft.markov_head.markov_w1.weight,
        draft.markov_head.markov_w2.weight,
        draft.confidence_head.proj.weight,
        draft.confidence_head.proj.bias,
    )


def place_weights(block_length: int, gamma: float, device: torch.device) -> Tensor:
    """exp(-place / gamma) of each place."""
    return torch.exp(-torch.arange(block_length, device=device) / gamma)


def draft_logits(hidden_MH: Tensor, previous_M: Tensor, weights: Heads) -> tuple[Tensor, Tensor]:
    """float32 logits `[M, V]`, and the confidence's logit `[M]`."""
    markov_MR = F.embedding(previous_M, weights.markov_w1_VR.to(hidden_MH.dtype))
    logits = linear(hidden_MH, weights.head_VH).float()
    logits = logits + linear(markov_MR, weights.markov_w2_VR).float()
    confidence_input = torch.cat((hidden_MH, markov_MR), dim=-1).float()
    confidence = F.linear(confidence_input, weights.confidence_1X, weights.confidence_bias_1)
    return logits, confidence.squeeze(-1)


def losses(tokens: DraftTokens, weights: Heads) -> Losses:
    """The three losses of one chunk."""
    logits, confidence = draft_logits(tokens.hidden_MH, tokens.previous_M, weights)
    log_p_draft = torch.log_softmax(logits, dim=-1)
    p_target = torch.softmax(linear(tokens.target_hidden_MH, weights.head_VH).float(), dim=-1)
    cross_entropy = -log_p_draft.gather(1, tokens.next_M[:, None]).squeeze(1)
    l1 = (log_p_draft.exp() - p_target).abs().sum(-1)
    acceptance = (1 - 0.5 * l1.detach()).clamp(0, 1)
    bce = F.binary_cross_entropy_with_logits(confidence, acceptance, reduction="none")
    weight = tokens.weight_M
    return Losses((cross_entropy * weight).sum(), (l1 * weight).sum(), (bce * weight).sum())
