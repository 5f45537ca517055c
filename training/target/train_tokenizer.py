"""Train the demo tokenizer: byte-pair merges under the K3 split pattern, as a tiktoken file.

3,840 base ranks and 256 special tokens make a vocabulary of 4,096. Digits are never merged, so a
number is one token a digit.
"""

import argparse
import base64
import json
from collections.abc import Iterator
from pathlib import Path

import tokenizers
from tokenizers import Regex, models, pre_tokenizers, trainers

from stagecoach.demo.tasks import ALL_FAMILIES, generate
from stagecoach.text.chat_format import answer_segments, render_segments
from stagecoach.text.tokenizer import (
    SPECIAL_TOKEN_OFFSETS,
    SPLIT_PATTERN,
    build_encoding,
    byte_level_alphabet,
    special_token_names,
)

NUM_BASE_TOKENS = 3840
EXAMPLES_PER_FAMILY = 3000
PLAIN_TEXT_CHARS = 3_000_000


def corpus(documents: list[str]) -> Iterator[str]:
    """What the demo model reads: the text segments of examples, and some prose."""
    for family in ALL_FAMILIES:
        for index in range(EXAMPLES_PER_FAMILY if family != "retrieval" else 1000):
            example = generate(family, 1, index, "train")
            segments = render_segments(
                example.messages, tools=example.tools, response_format=example.response_format
            )
            segments += answer_segments(example.answer_message)
            yield from (segment.text for segment in segments if not segment.is_special)
    num_chars = 0
    for document in documents:
        num_chars += len(document)
        if num_chars > PLAIN_TEXT_CHARS:
            return
        yield document


def train_ranks(documents: list[str]) -> dict[bytes, int]:
    """Train the merges. Rank 0..255 are the single bytes, the rest come in order of merging."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_BASE_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(corpus(documents), trainer)
    byte_of_char = byte_level_alphabet()
    vocab = backend.get_vocab()
    tokens = [bytes(byte_of_char[char] for char in token) for token in sorted(vocab, key=vocab.get)]
    merged = [token for token in tokens if len(token) > 1]
    return {token: rank for rank, token in enumerate([*(bytes([b]) for b in range(256)), *merged])}


def write_tokenizer(ranks: dict[bytes, int], folder: Path) -> None:
    """Write tiktoken.model and tokenizer_config.json as the published checkpoint has them."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()]
    (folder / "tiktoken.model").write_text("".join(lines), encoding="ascii")
    num_base = len(ranks)
    added = {num_base + offset: name for name, offset in SPECIAL_TOKEN_OFFSETS.items()}
    names = special_token_names(num_base, added)
    config = {
        "added_tokens_decoder": {
            str(token_id): {
                "content": name,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for name, token_id in names.items()
        },
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 8192,
        "tokenizer_class": "TikTokenTokenizer",
    }
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(f"{text}\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("documents", type=Path, help="JSON list of plain-text documents")
    parser.add_argument("out", type=Path, help="the checkpoint folder")
    arguments = parser.parse_args()
    documents = json.loads(arguments.documents.read_text(encoding="utf-8"))
    ranks = train_ranks(documents)
    assert len(ranks) == NUM_BASE_TOKENS
    write_tokenizer(ranks, arguments.out)
    encoding = build_encoding(ranks)
    sample = "".join(documents[-50:])
    num_tokens = len(encoding.encode_ordinary(sample))
    assert encoding.decode(encoding.encode_ordinary(sample)) == sample
    print(f"{len(ranks)} ranks; {len(sample) / num_tokens:.2f} characters a token on prose")


if __name__ == "__main__":
    main()
