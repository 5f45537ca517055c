"""What a draft's token says of the next one, added to its logits."""

from stagecoach.kernels.markov_bias.door import add_markov_bias

__all__ = ["add_markov_bias"]
