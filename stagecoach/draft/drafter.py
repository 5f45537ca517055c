"""The drafter: context rows behind every step, and blocks of drafts behind what was sampled.

Owns how a block is laid out and how its tokens are chosen one after the other. It runs on every
rank of the last stage. The embedding and the head are the target's; how a token is chosen from
logits is the caller's.

    position   start        start + 1 ... start + K - 1
    token      the anchor   mask          mask
    predicts   start + 1    start + 2 ... start + K

Dimensions: T tokens, B taps, H hidden size, Y draft layers, R cache rows, D row width on this
rank, N blocks, K tokens of a block, J tokens chosen so far, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from stagecoach.draft.context_rows import ContextRows
from stagecoach.draft.model import DraftModel
from stagecoach.kernels.block_attention import BlockPlaces, block_places
from stagecoach.kernels.cache_rows import store_rows
from stagecoach.kernels.ragged import BlockInputs, PackedBlocks, SegmentGroup, StepTensors

# (place in the block, logits [N, V], tokens chosen before [N, J]) -> token ids [N]
Choose = Callable[[int, Tensor, Tensor], Tensor]


class Proposal(NamedTuple):
    """Drafts of one block a request."""

    token_ids_NK: Tensor  # int64; int32 where the blocks are packed
    # Estimates that a draft is accepted if all before it are, uncalibrated; None: no such head.
    confidences_NK: Tensor | None


class Drafter(Protocol):
    """What the last stage asks of a drafter, on every rank; see DSparkDrafter for each call."""

    @property
    def has_confidences(self) -> bool:
        """Whether proposals come with confidences."""

    def write_context(
        self, taps_TBH: Tensor, step: StepTensors, draft_rows_YRD: Tensor
    ) -> None: ...

    def finish_context(self) -> None: ...

    def drop_context(self) -> None: ...

    def propose(
        self, block: BlockInputs | PackedBlocks, draft_rows_YRD: Tensor, choose: Choose | None
    ) -> Proposal | None: ...


class DSparkDrafter:
    """Proposes `num_draft_tokens` tokens at a time.

    Args:
        embedding: int64 [...] ids -> [..., H], the target's.
        head: [rows, H] -> [rows, V] logits, the target's.
        num_draft_tokens: K.
    """

    def __init__(
        self,
        model: DraftModel,
        embedding: Callable[[Tensor], Tensor],
        head: Callable[[Tensor], Tensor],
        num_draft_tokens: int,
    ) -> None:
        self._model = model
        self._embedding = embedding
        self._head = head
        self._num_tokens = num_draft_tokens
        self.context = ContextRows(model)

    @property
    def num_parameter_bytes(self) -> int:
        return self._model.num_parameter_bytes

    @property
    def has_confidences(self) -> bool:
        return self._model.config.has_confidence_head

    def write_context(self, taps_TBH: Tensor, step: StepTensors, draft_rows_YRD: Tensor) -> None:
        """Have the context rows of all tokens of a step stored, in place, before any is read.

        A row depends on its token's taps and position alone. Those of drafts that turn out
        rejected lie behind every context that is read, and are overwritten in time.

        Args:
            taps_TBH: in ascending order of the taps' ids; tokens as in the step.
            step: names the row of each token.
            draft_rows_YRD: the cache.
        """
        if not step.num_tokens:
            return
        if step.positions_T is None:
            self.context.add(taps_TBH, _positions(step), step.cache_rows_T, draft_rows_YRD)
        else:
            # Nothing waits on an accelerator: a captured step is the same whatever comes next.
            rows_TYD = self._model.context_rows(taps_TBH, step.positions_T)
            store_rows(rows_TYD, draft_rows_YRD, step.cache_rows_T)

    def finish_context(self) -> None:
        """Store all context rows that are due; the cache is about to be read or moved."""
        self.context.write()

    def drop_context(self) -> None:
        """Forget the context rows that are due; the cache is gone."""
        self.context.drop()

    def propose(
        self, block: BlockInputs | PackedBlocks, draft_rows_YRD: Tensor, choose: Choose | None
    ) -> Proposal | None:
        """One block pass, and K tokens from it; the same call on every rank.

        Token j is chosen from U_j + W1[token before] W2^T, with U the target's head on the
        block's hidden states (DSpark).

        Args:
            block: the anchors; `write_context` was called for all tokens of [0, start).
            draft_rows_YRD: the cache, only read.
            choose: picks tokens on rank 0; None on the others, which get None.
        """
        self.finish_context()
        hidden_NKH = self._block_pass(block, draft_rows_YRD)
        logits_NKV = self._head(hidden_NKH.flatten(0, 1)).unflatten(0, hidden_NKH.shape[:2])
        if choose is None:
            return None
        return self._choose_tokens(hidden_NKH, logits_NKV, block.anchor_ids_N, choose)

    def _block_pass(self, block: BlockInputs | PackedBlocks, draft_rows_YRD: Tensor) -> Tensor:
        config = self._model.config
        offsets_K = torch.arange(self._num_tokens, device=block.starts_N.device)
        token_ids_NK = torch.where(
            offsets_K == 0, block.anchor_ids_N.unsqueeze(1), config.mask_token_id
        )
        places: Sequence[BlockPlaces] | PackedBlocks = (
            block._replace(is_causal=config.is_causal)
            if isinstance(block, PackedBlocks)
            else block_places(block, self._num_tokens, is_causal=config.is_causal)
        )
        return self._model.block(
            self._embedding(token_ids_NK.flatten()).unflatten(0, token_ids_NK.shape),
            block.starts_N.unsqueeze(1) + offsets_K,
            draft_rows_YRD,
            places,
        )

    def _choose_tokens(
        self, hidden_NKH: Tensor, logits_NKV: Tensor, anchor_ids_N: Tensor, choose: Choose
    ) -> Proposal:
        markov = self._model.markov_head
        assert markov is not None, "only rank 0 chooses"
        # The anchor, then the drafts: before[:, j] is the token before draft j.
        tokens_NK1 = torch.empty(
            len(anchor_ids_N),
            self._num_tokens + 1,
            dtype=anchor_ids_N.dtype,
            device=anchor_ids_N.device,
        )
        tokens_NK1[:, 0] = anchor_ids_N
        for place in range(self._num_tokens):
            logits_NV = markov.add_bias(logits_NKV[:, place], tokens_NK1[:, place])
            tokens_NK1[:, place + 1] = choose(place, logits_NV, tokens_NK1[:, 1 : place + 1])
        confidences_NK = None
        if self._model.confidence_head is not None:
            before_NKM = markov.embed(tokens_NK1[:, :-1])
            confidences_NK = self._model.confidence_head(hidden_NKH, before_NKM)
        return Proposal(tokens_NK1[:, 1:], confidences_NK)


def _positions(step: StepTensors) -> Tensor:
    """int64 [T]: place of each token within its request."""
    parts = []
    for _, group, _ in step.spans():
        assert isinstance(group, SegmentGroup), "a packed step has its positions"
        offsets_W = torch.arange(group.max_length, device=group.starts_B.device)
        parts.append(group.flat(group.starts_B.unsqueeze(1) + offsets_W))
    return parts[0] if len(parts) == 1 else torch.cat(parts)
