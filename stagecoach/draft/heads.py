"""The last steps of a draft: the Markov bias between neighbours, and the confidence.

Owns their weights; only the rank that chooses tokens has them. Formulas: DSpark, as the
published drafts for Kimi-K3 store it. All sums are at least float32.

Dimensions: N blocks, K tokens of a block, H hidden size, V vocabulary, M Markov rank.
"""

import torch
from torch import Tensor
from torch.nn import functional

from stagecoach.config.draft import DraftConfig
from stagecoach.kernels.markov_bias import add_markov_bias
from stagecoach.kernels.precision import accumulate_dtype
from stagecoach.model.weight_slots import WeightKind, WeightScope


class MarkovHead:
    """What a token says of the next one: W1[token] W2^T, added to the logits."""

    def __init__(self, config: DraftConfig, weights: WeightScope) -> None:
        kind = WeightKind.DRAFT_HEAD
        shape = (config.vocab_size, config.markov_rank)
        self._first_VM = weights.parameter(*shape)
        # An accelerator's product has float32 sums whatever its factors are; half the bytes.
        is_wide = torch.device(weights.device).type != "cuda"
        self._second_VM = weights.matrix(*shape, kind=kind) if is_wide else weights.matrix(*shape)
        self._wide_dtype = accumulate_dtype(weights.dtype)
        weights.bind("markov_w1.weight", self._first_VM)
        weights.bind("markov_w2.weight", self._second_VM, kind)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Ids [...] -> [..., M], at least float32."""
        return functional.embedding(token_ids, self._first_VM).to(self._wide_dtype)

    def add_bias(self, logits_NV: Tensor, token_ids_N: Tensor) -> Tensor:
        """Logits of what follows the tokens, the bias added: [N, V], at least float32."""
        return add_markov_bias(logits_NV, token_ids_N, self._first_VM, self._second_VM)


class ConfidenceHead:
    """How likely a draft is accepted if all before it are: sigmoid(w · [h ; W1[prev]] + b)."""

    def __init__(self, config: DraftConfig, weights: WeightScope) -> None:
        kind = WeightKind.DRAFT_HEAD
        self._reads_markov = config.confidence_reads_markov
        width = config.hidden_size + (config.markov_rank if self._reads_markov else 0)
        self._weight_1E = weights.parameter(1, width, kind=kind)
        self._bias_1 = weights.parameter(1, kind=kind)
        weights.bind("proj.weight", self._weight_1E, kind)
        weights.bind("proj.bias", self._bias_1, kind)

    def __call__(self, hidden_NKH: Tensor, markov_NKM: Tensor) -> Tensor:
        """[N, K] in 0..1, uncalibrated.

        Args:
            hidden_NKH: after the final norm.
            markov_NKM: W1 of the token before each.
        """
        x_NKE = hidden_NKH.to(self._weight_1E.dtype)
        if self._reads_markov:
            x_NKE = torch.cat((x_NKE, markov_NKM), dim=-1)
        return functional.linear(x_NKE, self._weight_1E, self._bias_1).squeeze(-1).sigmoid()
