"""Random outputs under the masks of a grammar, over a vocabulary that is quick to make."""

from random import Random

import numpy as np
import numpy.typing as npt

from stagecoach.grammar.compiler import GrammarCompiler
from stagecoach.grammar.constraint import GrammarConstraint
from stagecoach.text.tokenizer import Tokenizer

XTML = ("[EOS]", "<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>", "<|pad|>")
MARKERS = (
    "[EOS]", "<|im_end|>", "<think>", "</think>", "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)  # fmt: skip

# Tokens across the borders of what grammars tell apart, and of characters.
_PIECES = (
    '{"', '"}', '":', '": ', '", "', '"]', "[{", "}]", "}}", ' "', ", ", "\n", "\n  ", "  ", "    ",
    "true", "false", "null", "name", "tool", "call", "city", " the", "ab", "abc", "12", "100", "0.",
    '"\n', "é", "漢字", "<|", "|>", "open", "close", "<|close|>", "<|open|>", "[EOS]", "think",
    "</t", "<t>", "x>", "message", "response", "argument", "index=", 'type="', "string", "number",
)  # fmt: skip
_NUM_UNUSED = 40  # ids that the head has beyond the tokenizer's, more than a word of masks

# What ends things, from the outermost to the innermost.
_CLOSERS = (b'"', b"]", b"}", b"</", b"<")
_LETTERS = (b"a", b"b", b"c")


def small_tokenizer(special_names: tuple[str, ...], *, num_eos: int = 2) -> Tokenizer:
    """All bytes, some pieces, and special tokens, of which the first end an output."""
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [piece.encode() for piece in _PIECES] + ["漢".encode()[:2]]
    by_bytes = {token: token_id for token_id, token in enumerate(tokens)}
    special_ids = {name: len(tokens) + number for number, name in enumerate(special_names)}
    longest = max(map(len, tokens))

    def encode(text: str) -> list[int]:
        data, ids = text.encode(), []
        while data:
            size = next(n for n in range(longest, 0, -1) if data[:n] in by_bytes)
            ids.append(by_bytes[data[:size]])
            data = data[size:]
        return ids

    return Tokenizer(
        encode_ordinary=encode,
        token_bytes=[*tokens, *(name.encode() for name in special_names)],
        special_ids=special_ids,
        eos_token_ids=[special_ids[name] for name in special_names[:num_eos]],
    )


def compiler_of(tokenizer: Tokenizer) -> GrammarCompiler:
    """Of a model whose head is wider than the vocabulary."""
    return GrammarCompiler(
        tokenizer,
        vocab_size=tokenizer.vocab_size + _NUM_UNUSED,
        eos_token_ids=tokenizer.eos_token_ids,
    )


def mask_rows(
    constraint: GrammarConstraint, tokenizer: Tokenizer, drafts: tuple[int, ...] = ()
) -> npt.NDArray[np.bool_]:
    """[1 + drafts, V]: whether each token is allowed."""
    vocab_size = tokenizer.vocab_size + _NUM_UNUSED
    words_RW = np.zeros((1 + len(drafts), -(-vocab_size // 32)), dtype=np.int32)
    constraint.fill_masks(drafts, memoryview(words_RW))
    bits = np.unpackbits(words_RW.view(np.uint8), axis=1, bitorder="little")
    return bits[:, :vocab_size].astype(bool)


def allowed_ids(constraint: GrammarConstraint, tokenizer: Tokenizer) -> list[int]:
    """What may come next, in ascending order."""
    return [int(token_id) for token_id in np.flatnonzero(mask_rows(constraint, tokenizer)[0])]


def walk(
    constraint: GrammarConstraint, tokenizer: Tokenizer, random: Random, *, max_free: int = 25
) -> list[int]:
    """A random output to its end, which is not among its tokens; the constraint goes along.

    After some tokens that are chosen freely it takes whatever ends things.
    """
    output: list[int] = []
    num_free = random.randrange(max_free + 1)
    while True:
        allowed = allowed_ids(constraint, tokenizer)
        assert allowed, f"nothing may follow {tokenizer.decode_bytes(output)!r}"
        ends = [token_id for token_id in allowed if token_id in tokenizer.eos_token_ids]
        if ends and (len(output) >= num_free or len(ends) == len(allowed) or random.random() < 0.2):
            constraint.advance((random.choice(ends),))
            assert constraint.error is None and constraint.is_finished
            return output
        choices = [token_id for token_id in allowed if token_id not in ends]
        if len(output) >= num_free:
            choices = _closing(choices, tokenizer, random)
        output.append(random.choice(choices))
        constraint.advance((output[-1],))
        assert constraint.error is None and not constraint.is_finished
        assert len(output) < 600, f"it does not end: {tokenizer.decode_bytes(output)!r}"


def _closing(choices: list[int], tokenizer: Tokenizer, random: Random) -> list[int]:
    special = [token_id for token_id in choices if tokenizer.special_name(token_id) is not None]
    if special:
        named = {tokenizer.special_name(token_id): token_id for token_id in special}
        for name in ("<|close|>", "</think>", "<|tool_calls_section_end|>", "<|tool_call_end|>"):
            # Now and then, one more of what may come again.
            if name in named and random.random() < 0.7:
                return [named[name]]
        return special
    # A pattern may want something else before its end.
    letters = [token_id for token_id in choices if tokenizer.token_bytes(token_id) in _LETTERS]
    if letters and random.random() < 0.2:
        return letters
    for closer in _CLOSERS:
        fitting = [token_id for token_id in choices if tokenizer.token_bytes(token_id) == closer]
        if fitting:
            return fitting
    return choices
