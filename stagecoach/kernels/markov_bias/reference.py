"""The Markov bias of a draft in plain PyTorch: the specification and the CPU implementation.

Dimensions: N blocks, V vocabulary, M Markov rank.
"""

from torch import Tensor
from torch.nn import functional


def add_markov_bias(
    logits_NV: Tensor, token_ids_N: Tensor, first_VM: Tensor, second_VM: Tensor
) -> Tensor:
    """logits + W1[token] W2^T (DSpark): [N, V], at least float32.

    Args:
        logits_NV: of what follows the tokens, at least float32.
        token_ids_N: int32 or int64.
        first_VM: W1, any floating type.
        second_VM: W2, in the type of the sums.
    """
    embedded_NM = functional.embedding(token_ids_N, first_VM).to(second_VM.dtype)
    return logits_NV + functional.linear(embedded_NM, second_VM)
