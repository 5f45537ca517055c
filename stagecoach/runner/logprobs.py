"""Log-probabilities from unprocessed logits: of the sampled token, and of a prompt's tokens.

Owns the log-softmax, ranks, the best N, and their one transfer to the host. Knows no sampling
parameter beyond how many alternatives a row wants.

Ties are ordered by token id everywhere, so the token that greedy decoding picks has rank 1.

Dimensions: R rows, V vocabulary, K best tokens of a row, F packed numbers of a row.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stagecoach.request import TokenLogprobs
from stagecoach.runner.transfer import upload

# Log-probabilities of a prompt chunk are computed this many at a time.
_MAX_ELEMENTS = 2**24
_ID_MASK = 0xFFFFFFFF


class TopTokens(NamedTuple):
    """The K greatest of each row, descending, equal ones by ascending id."""

    values_RK: Tensor
    token_ids_RK: Tensor  # int64


def top_tokens(values_RV: Tensor, k: int) -> TopTokens:
    """The `k` greatest values of each row, the same whatever `k` or the other rows are.

    Among several values of -inf the order is not defined. A row with NaN gives valid ids in an
    undefined order and does not disturb the others.
    """
    vocab_size = values_RV.shape[-1]
    if values_RV.is_cuda and values_RV.dtype == torch.float32:
        return top_tokens_by_key(values_RV, min(k, vocab_size))
    # Beyond this share of the vocabulary a partial selection costs as much as sorting.
    if 4 * k >= vocab_size:
        return _sorted_tokens(values_RV, k)
    best_values, best_ids = torch.topk(values_RV, k + 1)
    # topk does not say which of several equal values it takes, or in what order.
    last, next_one = best_values[:, k - 1], best_values[:, k]
    if bool(((last == next_one) & (last > -torch.inf)).any()):
        return _sorted_tokens(values_RV, k)
    token_ids_RK = best_ids[:, :k].sort(-1).values
    values_RK, order = values_RV.gather(-1, token_ids_RK).sort(dim=-1, descending=True, stable=True)
    return TopTokens(values_RK, token_ids_RK.gather(-1, order))


def top_tokens_by_key(values_RV: Tensor, k: int) -> TopTokens:
    """`top_tokens` of float32 values without a look at them: no two keys are equal.

    A key is the value, as an integer of the same order, before the complement of the id.
    """
    bits_RV = (values_RV + 0.0).view(torch.int32)  # -0.0 is 0.0
    order_RV = (bits_RV ^ ((bits_RV >> 31) & 0x7FFFFFFF)).to(torch.int64)
    complement_V = _ID_MASK - torch.arange(values_RV.shape[-1], device=values_RV.device)
    keys_RK = ((order_RV << 32) | complement_V).topk(k).values
    token_ids_RK = _ID_MASK - (keys_RK & _ID_MASK)
    return TopTokens(values_RV.gather(-1, token_ids_RK), token_ids_RK)


class LogprobRows(NamedTuple):
    """Log-probabilities still on the device, packed so that one transfer brings them over."""

    num_top: list[int]  # alternatives that each row asked for
    # Token id, logprob, rank, then K ids and K logprobs: float64 holds ids and ranks exactly.
    packed_RF: Tensor

    def to_host(self) -> list[TokenLogprobs]:
        return self.unpack(self.packed_RF.flatten().tolist())

    def unpack(self, numbers: Sequence[float]) -> list[TokenLogprobs]:
        """Read `packed_RF`, flattened, that came over beside other numbers."""
        num_columns = self.packed_RF.shape[-1]
        width = (num_columns - 3) // 2
        rows = [
            numbers[start : start + num_columns] for start in range(0, len(numbers), num_columns)
        ]
        return [
            TokenLogprobs(
                token_id=int(row[0]),
                logprob=row[1],
                rank=int(row[2]),
                top_ids=tuple(map(int, row[3 : 3 + num_top])),
                top_logprobs=tuple(row[3 + width : 3 + width + num_top]),
            )
            for row, num_top in zip(rows, self.num_top, strict=True)
        ]


class RequestedLogprobs(NamedTuple):
    """Those of the rows that asked."""

    indices: list[int]  # which rows those are, ascending
    rows: LogprobRows


def token_logprobs(logits_RV: Tensor, token_ids_R: Tensor, num_top: Sequence[int]) -> LogprobRows:
    """Log-probability and rank of one token a row, with the row's `num_top` best.

    Args:
        logits_RV: float32 or float64, unprocessed.
        token_ids_R: int64.
        num_top: at least 0 for each row; a row beyond V gets V.
    """
    vocab_size = logits_RV.shape[-1]
    num_top = [min(count, vocab_size) for count in num_top]
    logprobs_RV = logits_RV.log_softmax(-1)
    ids_R1 = token_ids_R.unsqueeze(-1)
    chosen_R1 = logprobs_RV.gather(-1, ids_R1)
    is_before_RV = torch.arange(vocab_size, device=logits_RV.device) < ids_R1
    is_better_RV = (logprobs_RV > chosen_R1) | ((logprobs_RV == chosen_R1) & is_before_RV)
    rank_R1 = 1 + is_better_RV.sum(-1, keepdim=True)
    columns = [ids_R1, chosen_R1, rank_R1]
    if max(num_top, default=0) > 0:
        best = top_tokens(logprobs_RV, max(num_top))
        columns += [best.token_ids_RK, best.values_RK]
    return LogprobRows(num_top, torch.cat([column.to(torch.float64) for column in columns], -1))


def requested_logprobs(
    logits_RV: Tensor, token_ids_R: Tensor, num_top: Sequence[int | None]
) -> RequestedLogprobs | None:
    """`token_logprobs` of the rows that want any; None if no row does.

    Args:
        logits_RV: any floating type, unprocessed.
        num_top: alternatives that each row wants beside its token; None: not even that.
    """
    indices = [index for index, count in enumerate(num_top) if count is not None]
    if not indices:
        return None
    if len(indices) < len(num_top):
        indices_R = upload(indices, torch.int64, logits_RV.device)
        logits_RV, token_ids_R = logits_RV[indices_R], token_ids_R[indices_R]
    counts = [count for count in num_top if count is not None]
    return RequestedLogprobs(indices, token_logprobs(as_float(logits_RV), token_ids_R, counts))


def prompt_logprobs(logits_RV: Tensor, target_ids_R: Tensor, num_top: int) -> list[TokenLogprobs]:
    """Log-probabilities of given next tokens, in one transfer to the host.

    Args:
        logits_RV: logits after R prompt tokens.
        target_ids_R: int64, the token that follows each.
        num_top: alternatives beside the target.
    """
    num_rows, vocab_size = logits_RV.shape
    if num_rows == 0:
        return []
    step = max(1, _MAX_ELEMENTS // vocab_size)
    parts = [
        token_logprobs(
            as_float(logits_RV[start : start + step]),
            target_ids_R[start : start + step],
            [num_top] * min(step, num_rows - start),
        )
        for start in range(0, num_rows, step)
    ]
    counts = [count for part in parts for count in part.num_top]
    return LogprobRows(counts, torch.cat([part.packed_RF for part in parts])).to_host()


def as_float(logits_RV: Tensor) -> Tensor:
    """Logits in the type that sampling computes in: float64 stays, all else becomes float32."""
    return logits_RV if logits_RV.dtype == torch.float64 else logits_RV.to(torch.float32)


def _sorted_tokens(values_RV: Tensor, k: int) -> TopTokens:
    values, token_ids = values_RV.sort(dim=-1, descending=True, stable=True)
    return TopTokens(values[:, :k], token_ids[:, :k])
