"""The Markov bias wherever the tensors lie: the reference on CPU, Triton on a GPU."""

from torch import Tensor

from stagecoach.kernels.markov_bias import reference


def add_markov_bias(
    logits_NV: Tensor, token_ids_N: Tensor, first_VM: Tensor, second_VM: Tensor
) -> Tensor:
    """`reference.add_markov_bias`: [N, V]; on a GPU W2 may be bfloat16, sums are float32."""
    if logits_NV.is_cuda:
        from stagecoach.kernels.markov_bias import cuda

        return cuda.add_markov_bias(logits_NV, token_ids_N, first_VM, second_VM)
    return reference.add_markov_bias(logits_NV, token_ids_N, first_VM, second_VM)
