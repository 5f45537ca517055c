"""What a KDA layer hands to its operators.

Dimensions: T tokens, C = 2 H K + H V channels of q, k and v, W taps, H heads, K key and V value
channels, S state slots, N rows of a slot, X = 2K + V values of a recorded row.
"""

from typing import NamedTuple

from torch import Tensor


class KdaInputs(NamedTuple):
    """Projections of the tokens, all in the type of the activations."""

    channels_TC: Tensor  # before the convolution: heads of q, of k, of v
    decay_THK: Tensor  # logits of the decays
    beta_TH: Tensor  # logits of the rates
    gate_THV: Tensor  # logits of the output's gate


class KdaWeights(NamedTuple):
    """What the operators have of the layer; tensors are at least float32."""

    conv_CW: Tensor  # last tap on the current token
    a_log_H: Tensor
    dt_bias_HK: Tensor
    norm_V: Tensor
    lower_bound: float | None  # of the decays' logarithms
    eps: float  # of the output's norm


class KdaMemory(NamedTuple):
    """State slots of one KDA layer."""

    recurrent_SHVK: Tensor  # at least float32: the state after the certain tokens
    conv_rows_SNC: Tensor  # the rows before their end, oldest first, then those of the drafts
    record_SNHX: Tensor  # what re-applies each draft: exp(g), k and u; N = 0: no speculation
