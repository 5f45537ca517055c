"""What does a grammar cost: its compilation, and the mask of a row of a window?

Makes vocabularies of 16,384 and 163,840 tokens, the size of Kimi-K3's, out of random words in
several scripts. One text goes through each grammar, token by token; then 32 windows of 8 rows
are filled in one call, as for one plan. Processor time of this process, of all its threads.

    scripts/bench grammar
"""

import argparse
import sys
import time
from collections.abc import Iterator
from random import Random
from typing import NamedTuple

import numpy as np

from bench.report import machine_line
from stagecoach.grammar.compiler import GrammarCompiler
from stagecoach.grammar.constraint import MaskRows, fill_all
from stagecoach.request import StructuredOutputsParams
from stagecoach.text.tokenizer import Tokenizer

VOCAB_SIZES = (16_384, 163_840)
NUM_SPECIAL = 256
NUM_WINDOWS = 32
NUM_ROWS = 8
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "bb", "ccc"]}},
        "note": {"type": "string", "maxLength": 200},
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string"},
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
            },
            "required": ["street", "zip"],
        },
    },
    "required": ["name", "age", "address"],
}
TEXT = (
    '{"name": "Ada Lovelace of London", "age": 36, "tags": ["a", "bb"], '
    '"note": "the first one who wrote a program", '
    '"address": {"street": "12 St James Square", "zip": "12345"}}'
)
LETTERS = "etaoinshrdlucmfwypvbgkxjqz"


class Cost(NamedTuple):
    """Milliseconds to compile and to copy, microseconds of a row's mask."""

    compile_ms: float
    copy_ms: float
    median_us: float
    p99_us: float
    in_plan_us: float


def random_words(random: Random) -> Iterator[bytes]:
    """Words, some with a leading blank, some of other scripts, and runs of signs."""
    while True:
        kind = random.random()
        if kind < 0.8:
            word = "".join(random.choices(LETTERS, k=random.randint(2, 9)))
            yield (random.choice(("", " ")) + word).encode()
        elif kind < 0.92:
            first = random.choice((0x430, 0x4E00, 0x3040))
            size = 3000 if first == 0x4E00 else 32
            chars = [chr(first + random.randrange(size)) for _ in range(random.randint(1, 5))]
            yield "".join(chars).encode()
        else:
            yield "".join(
                random.choices('{}[]":,.;()<>=+-*/_ \n\t', k=random.randint(2, 6))
            ).encode()


def make_tokenizer(vocab_size: int) -> Tokenizer:
    """Of that many tokens, the last of which are special; it encodes by the longest token."""
    tokens = {bytes([byte]): byte for byte in range(256)}
    for word in random_words(Random(0)):
        if len(tokens) == vocab_size - NUM_SPECIAL:
            break
        tokens.setdefault(word, len(tokens))
    names = {f"<|special_{number}|>": len(tokens) + number for number in range(NUM_SPECIAL)}

    def encode(text: str) -> list[int]:
        data, ids = text.encode(), []
        while data:
            size = next(size for size in range(16, 0, -1) if data[:size] in tokens)
            ids.append(tokens[data[:size]])
            data = data[size:]
        return ids

    return Tokenizer(
        encode_ordinary=encode,
        token_bytes=[*tokens, *(name.encode() for name in names)],
        special_ids=names,
        eos_token_ids=[len(tokens)],
    )


def measure(
    compiler: GrammarCompiler, params: StructuredOutputsParams, ids: list[int], vocab_size: int
) -> Cost:
    """One grammar, along the tokens of the text."""
    began = time.process_time()
    compiler.compile(params)
    compiled = time.process_time()
    constraint = compiler.compile(params)
    copied = time.process_time()
    num_words = -(-vocab_size // 32)
    masks = memoryview(np.zeros((1, num_words), dtype=np.int32))
    seconds = []
    for token_id in ids:
        start = time.process_time()
        constraint.fill_masks((), masks)
        seconds.append(time.process_time() - start)
        constraint.advance((token_id,))
        assert constraint.error is None, constraint.error
    drafts = tuple(ids[: NUM_ROWS - 1])
    windows = [
        MaskRows(compiler.compile(params), drafts, NUM_ROWS * number)
        for number in range(NUM_WINDOWS)
    ]
    masks = memoryview(np.zeros((NUM_WINDOWS * NUM_ROWS, num_words), dtype=np.int32))
    rounds = []
    for _ in range(5):
        start = time.process_time()
        fill_all(windows, masks)
        rounds.append((time.process_time() - start) / (NUM_WINDOWS * NUM_ROWS))
    median, p99 = np.percentile(seconds, (50, 99))
    return Cost(
        1e3 * (compiled - began),
        1e3 * (copied - compiled),
        1e6 * float(median),
        1e6 * float(p99),
        1e6 * min(rounds),
    )


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    print(machine_line(("llguidance", "numpy")), file=sys.stderr)
    print(
        "| vocabulary | grammar | compile ms | copy ms | mask µs, median | p99 | row of a plan µs |"
    )
    print("| ---: | --- | ---: | ---: | ---: | ---: | ---: |")
    for vocab_size in VOCAB_SIZES:
        tokenizer = make_tokenizer(vocab_size)
        compiler = GrammarCompiler(
            tokenizer, vocab_size=vocab_size, eos_token_ids=tokenizer.eos_token_ids
        )
        began = time.process_time()
        compiler.compile(StructuredOutputsParams(choice=("a",)))
        print(f"{vocab_size}: {time.process_time() - began:.2f} s to begin", file=sys.stderr)
        reasoning = f"start: /(?s:.*)/ <[{vocab_size - 1}]> %json {{}}"
        for name, params in {
            "JSON of a schema": StructuredOutputsParams(json=SCHEMA),
            "any JSON object": StructuredOutputsParams(json_object=True),
            "free text, then a marker": StructuredOutputsParams(grammar=reasoning),
        }.items():
            cost = measure(compiler, params, tokenizer.encode(TEXT), vocab_size)
            print(
                f"| {vocab_size:,} | {name} | {cost.compile_ms:.1f} | {cost.copy_ms:.2f} "
                f"| {cost.median_us:.0f} | {cost.p99_us:.0f} | {cost.in_plan_us:.1f} |"
            )


if __name__ == "__main__":
    main()
