"""The vocabulary as llguidance reads it: which bytes each token gives, which tokens are none.

A special token has no bytes there: text never becomes one, only a grammar that names it. So has
an id that the head of the model gives a logit but the tokenizer gives no token: it is never
allowed.
"""

from collections.abc import Sequence

import llguidance

from stagecoach.text.tokenizer import Tokenizer


class _Wrapper:
    """The attributes that LLTokenizer looks for."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, eos_token_id: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_token_id
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
        self.tokens += [b""] * (vocab_size - tokenizer.vocab_size)
        self.special_token_ids = [tokenizer.special_id(name) for name in tokenizer.special_names]

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)


def make_vocabulary(
    tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: Sequence[int]
) -> llguidance.LLTokenizer:
    """The vocabulary of a model.

    Args:
        tokenizer: of the checkpoint.
        vocab_size: the width of the head's logits; at least the tokenizer's.
        eos_token_ids: the tokens that end an output; at least one.
    """
    assert vocab_size >= tokenizer.vocab_size, "the head must have a logit for each token"
    wrapper = _Wrapper(tokenizer, vocab_size=vocab_size, eos_token_id=eos_token_ids[0])
    # The library's class and its stub disagree: any object with these attributes will do.
    plain = llguidance.LLTokenizer(wrapper, eos_token=list(eos_token_ids), slices=[])  # type: ignore[arg-type]
    # Each step keeps the interpreter's lock, for 0.4 s at 164k tokens; between them others get it.
    return plain.with_slices(llguidance.LLTokenizer.general_slices())
