"""The choice of tokens from logits, its noise, and which drafts a window keeps."""

from stagecoach.kernels.sampling.door import choose_tokens, count_accepted
from stagecoach.kernels.sampling.reference import Accepted, Choices, SamplingRows

__all__ = ["Accepted", "Choices", "SamplingRows", "choose_tokens", "count_accepted"]
