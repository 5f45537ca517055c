"""The exchange of the smallest messages: every word carries the number of its message.

A store of 8 bytes arrives in one piece, so a reader that finds the number finds the word, and
nobody waits for a flag that a fence holds back. That doubles the bytes and saves a way over the
link; `peer_kernel.py` does the same for larger messages, and its counters are explained there.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from stagecoach.kernels.dependent_launch import let_next_start, wait_for_earlier


@triton.jit
def mark(word, count):
    """int32 words and the number of their message as int64."""
    return word.to(tl.uint32, bitcast=True).to(tl.int64) | (count.to(tl.int64) << 32)


@triton.jit
def give_words(
    x_ptr,
    counts_ptr,
    marked_ptr,
    distances_ptr,
    num_words,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    MAX_WORDS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Lay this program's words into the region of every other rank: [2 halves, SIZE, MAX_WORDS].

    A peer's region lies `distances_ptr[peer]` bytes behind this rank's.
    """
    program = tl.program_id(0)
    count = tl.load(counts_ptr + program) + 1
    words = program * TILE + tl.arange(0, TILE)
    is_real = words < num_words
    marked = mark(tl.load(x_ptr + words, mask=is_real, other=0), count)
    into = marked_ptr + ((count & 1) * SIZE + RANK) * MAX_WORDS
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            distance = tl.multiple_of(tl.load(distances_ptr + peer) // 8, 16)
            tl.store(into + distance + words, marked, mask=is_real)


@triton.jit
def take_words(
    x_ptr,
    out_ptr,
    counts_ptr,
    marked_ptr,
    num_words,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    MAX_WORDS: tl.constexpr,
    TILE: tl.constexpr,
    SUMMED_BYTES: tl.constexpr,
):
    """Wait for the words of every rank; add them up in rank order, or lay them in a row.

    SUMMED_BYTES: 0: in a row; 4: words are float32; 2: words are two bfloat16, summed in float32.
    """
    program = tl.program_id(0)
    count = tl.load(counts_ptr + program) + 1
    words = program * TILE + tl.arange(0, TILE)
    is_real = words < num_words
    own = tl.load(x_ptr + words, mask=is_real, other=0)
    low = tl.zeros([TILE], tl.float32)
    high = tl.zeros([TILE], tl.float32)
    for peer in tl.static_range(SIZE):
        part = own
        if peer != RANK:
            source = marked_ptr + ((count & 1) * SIZE + peer) * MAX_WORDS + words
            marked = tl.load(source, mask=is_real, other=0, volatile=True)
            while tl.max((is_real & ((marked >> 32).to(tl.int32) != count)).to(tl.int32), 0) > 0:
                marked = tl.load(source, mask=is_real, other=0, volatile=True)
            part = marked.to(tl.int32)
        if SUMMED_BYTES == 0:
            tl.store(out_ptr + peer * num_words + words, part, mask=is_real)
        elif SUMMED_BYTES == 4:
            low += part.to(tl.float32, bitcast=True)
        else:
            low += (part << 16).to(tl.float32, bitcast=True)
            high += (part & -65536).to(tl.float32, bitcast=True)
    if SUMMED_BYTES == 4:
        tl.store(out_ptr + words, low.to(tl.int32, bitcast=True), mask=is_real)
    if SUMMED_BYTES == 2:
        low_bits = low.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint32)
        high_bits = high.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint32)
        both = low_bits | (high_bits << 16)
        tl.store(out_ptr + words, both.to(tl.int32, bitcast=True), mask=is_real)
    # Every thread has read the counter before it moves on.
    tl.debug_barrier()
    tl.store(counts_ptr + program, count)


@triton.jit
def exchange_words_kernel(
    x_ptr,
    out_ptr,
    counts_ptr,
    marked_ptr,
    distances_ptr,
    num_words,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    MAX_WORDS: tl.constexpr,
    TILE: tl.constexpr,
    SUMMED_BYTES: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """One message of int32 words of every rank of the stage to every other."""
    let_next_start(IS_DEPENDENT)
    wait_for_earlier(IS_DEPENDENT)
    give_words(x_ptr, counts_ptr, marked_ptr, distances_ptr, num_words, RANK, SIZE, MAX_WORDS, TILE)
    take_words(
        x_ptr, out_ptr, counts_ptr, marked_ptr, num_words, RANK, SIZE, MAX_WORDS, TILE, SUMMED_BYTES
    )
