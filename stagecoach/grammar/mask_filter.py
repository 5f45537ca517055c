"""Takes out of masks what no token is: ids that the head of a model has beyond its tokenizer's.

The library takes a range of ids in a grammar at its word. Knows no queue.
"""

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_WORD_BITS = 32
# Ids in a grammar; also where they are part of a text, whose masks are then filtered for nothing.
_IDS = re.compile(r"<\[([^\[\]]*)\]>")
_MAX_DIGITS = 10


class MaskFilter:
    """For all grammars of one model.

    Args:
        num_tokens: of the tokenizer.
        vocab_size: width of the head's logits.
    """

    def __init__(self, *, num_tokens: int, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._num_tokens = num_tokens
        num_words = -(-vocab_size // _WORD_BITS)
        self._known_W = _words((*range(num_tokens), *eos_token_ids), num_words)
        self._ends_W = _words(eos_token_ids, num_words)

    def is_needed(self, grammar: str) -> bool:
        """Whether the grammar names ids that may have no token."""
        return not all(map(self._is_one_token, _IDS.findall(grammar)))

    def apply(self, masks_RW: npt.NDArray[np.int32]) -> None:
        """Take them out, in place; a row with nothing left allows the end tokens."""
        masks_RW &= self._known_W
        masks_RW[~masks_RW.any(axis=1)] = self._ends_W

    def _is_one_token(self, ids: str) -> bool:
        return len(ids) < _MAX_DIGITS and ids.isdecimal() and int(ids) < self._num_tokens


def _words(token_ids: Sequence[int], num_words: int) -> npt.NDArray[np.int32]:
    """A mask of these tokens."""
    is_in_V = np.zeros(num_words * _WORD_BITS, dtype=bool)
    is_in_V[list(token_ids)] = True
    return np.packbits(is_in_V, bitorder="little").view(np.int32)
