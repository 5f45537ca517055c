"""The vocabulary of a grammar: text never gives a special token, nor an id without a token."""

from pathlib import Path
from random import Random

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from stagecoach.request import StructuredOutputsParams
from stagecoach.text.tokenizer import Tokenizer, load_tokenizer
from tests.cpu.grammar.walks import XTML, allowed_ids, compiler_of, small_tokenizer

DEMO = Path(__file__).parents[3] / "stagecoach" / "demo" / "checkpoint"


def tokenizer_json(folder: Path) -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["[EOS]", "<|close|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["<|close|> the [EOS]"] * 5, trainer)
    backend.save(str(folder / "tokenizer.json"))
    # Padded as heads are: the last ids have no token.
    return load_tokenizer(folder, model_vocab_size=320)


@pytest.fixture(params=["tiktoken", "tokenizer.json", "made"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    if request.param == "tiktoken":
        return load_tokenizer(DEMO)
    return tokenizer_json(tmp_path) if request.param != "made" else small_tokenizer(XTML)


def test_text_never_becomes_a_special_token(tokenizer: Tokenizer) -> None:
    special = {tokenizer.special_id(name) for name in tokenizer.special_names}
    constraint = compiler_of(tokenizer).compile(StructuredOutputsParams(json={"type": "string"}))
    text = '"a <|close|> in [EOS] text"'
    for token_id in tokenizer.encode(text):
        allowed = allowed_ids(constraint, tokenizer)
        assert not special & set(allowed)
        assert all(tokenizer.token_bytes(item) for item in allowed if item < tokenizer.vocab_size)
        assert token_id in allowed
        constraint.advance((token_id,))
    assert allowed_ids(constraint, tokenizer) == list(tokenizer.eos_token_ids)


def test_a_grammar_reaches_special_tokens_by_name_and_by_id(tokenizer: Tokenizer) -> None:
    close = tokenizer.special_id("<|close|>")
    for name in ("<|close|>", f"<[{close}]>"):
        constraint = compiler_of(tokenizer).compile(
            StructuredOutputsParams(grammar=f'start: /(?s:.*)/ {name} "a"')
        )
        # The same characters as ordinary tokens are text.
        for token_id in tokenizer.encode("<|close|>a"):
            allowed = allowed_ids(constraint, tokenizer)
            assert token_id in allowed and close in allowed
            constraint.advance((token_id,))
        constraint.advance((close,))
        constraint.advance(tuple(tokenizer.encode("a")))
        assert allowed_ids(constraint, tokenizer) == list(tokenizer.eos_token_ids)


def test_ids_without_a_token_are_never_allowed() -> None:
    tokenizer = small_tokenizer(XTML)
    constraint = compiler_of(tokenizer).compile(StructuredOutputsParams(grammar="start: /(?s:.*)/"))
    random = Random(0)
    for _ in range(10):
        allowed = allowed_ids(constraint, tokenizer)
        assert max(allowed) < tokenizer.vocab_size
        constraint.advance((random.choice(allowed[:-2]),))


def test_each_end_token_ends_a_text() -> None:
    tokenizer = small_tokenizer(XTML)
    compiler = compiler_of(tokenizer)
    for end in tokenizer.eos_token_ids:
        constraint = compiler.compile(StructuredOutputsParams(choice=("ab",)))
        assert end not in allowed_ids(constraint, tokenizer)
        constraint.advance(tuple(tokenizer.encode("ab")))
        assert not constraint.is_finished
        constraint.advance((end,))
        assert constraint.is_finished and constraint.error is None
