"""The choice of tokens in Triton: two passes over the logits, and a reduction over their blocks.

The first pass finds the greatest value of each block of columns; the second, of rows with a
temperature only, adds noise to what the first left behind. The float64 noise is that of
`noise.py`: its words are the same bit for bit.

Dimensions: T rows, V columns, in blocks of BLOCK_V.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

_TINY = tl.constexpr(1.1754943508222875e-38)  # the least normal float32
_NO_ID = tl.constexpr(2147483647)


@triton.jit
def _table_row(row, segments, sampling_rows, HAS_SEGMENTS: tl.constexpr):
    """Row of the sampling table, -1 where nothing is chosen."""
    segment = row
    if HAS_SEGMENTS:
        segment = tl.load(segments + row)
    return tl.load(sampling_rows + segment, mask=segment >= 0, other=-1)


@triton.jit
def _values(
    logits,
    addends,
    row,
    columns,
    num_columns,
    logits_stride,
    addends_stride,
    HAS_ADDEND: tl.constexpr,
):
    """Logits of one row, float32; 0 beyond the last column."""
    is_real = columns < num_columns
    start = tl.cast(row, tl.int64)
    values = tl.load(logits + start * logits_stride + columns, mask=is_real, other=0.0)
    values = values.to(tl.float32)
    if HAS_ADDEND:
        addend = tl.load(addends + start * addends_stride + columns, mask=is_real, other=0.0)
        values += addend.to(tl.float32)
    return values


@triton.jit(do_not_specialize_on_alignment=["segments", "sampling_rows"])
def scan_kernel(
    logits,
    addends,
    segments,
    sampling_rows,
    block_best,  # float32 [T, blocks]
    block_ids,  # int32 [T, blocks]
    block_finite,  # int32 [T, blocks]
    num_columns,
    logits_stride,
    addends_stride,
    num_blocks,
    HAS_ADDEND: tl.constexpr,
    HAS_SEGMENTS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """The greatest value of each block, the lowest id that has it, and whether all are finite."""
    block, row = tl.program_id(0), tl.program_id(1)
    if _table_row(row, segments, sampling_rows, HAS_SEGMENTS) < 0:
        return
    columns = block * BLOCK_V + tl.arange(0, BLOCK_V)
    values = _values(
        logits, addends, row, columns, num_columns, logits_stride, addends_stride, HAS_ADDEND
    )
    is_real = columns < num_columns
    is_finite = tl.abs(values) < float("inf")
    # What is compared holds no NaN, so that an id always comes out.
    values = tl.where(is_real & (values == values), values, float("-inf"))
    best = tl.max(values, axis=0)
    best_id = tl.min(tl.where(is_real & (values == best), columns, _NO_ID), axis=0)
    place = row * num_blocks + block
    tl.store(block_best + place, best)
    tl.store(block_ids + place, best_id)
    tl.store(block_finite + place, tl.min(is_finite.to(tl.int32), axis=0))


@triton.jit
def gumbel_noise(seed, position, first_group, NUM_GROUPS: tl.constexpr):
    """Noise of 4 * NUM_GROUPS neighbouring tokens from 4 * first_group on, float64."""
    groups = (first_group + tl.arange(0, NUM_GROUPS)).to(tl.uint32)
    zeros = tl.zeros([NUM_GROUPS], tl.uint32)
    low = zeros + (position & 0xFFFFFFFF).to(tl.uint32)
    high = zeros + ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    # The fourth word is the stream: that of the target's choice is 0.
    word_0, word_1, word_2, word_3 = tl.philox(seed, groups, low, high, zeros)
    pairs = tl.join(tl.join(word_0, word_2), tl.join(word_1, word_3))
    words = tl.reshape(pairs, (4 * NUM_GROUPS,))
    uniform = (words.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    return -tl.log(-tl.log(uniform))


@triton.jit(
    do_not_specialize=["position_offset"],
    do_not_specialize_on_alignment=["segments", "sampling_rows", "positions"],
)
def draw_kernel(
    logits,
    addends,
    segments,
    sampling_rows,
    positions,
    temperatures,
    seeds,
    block_best,
    block_ids,  # in: of the greatest value; out: of the greatest value with noise
    block_drawn,  # float64 [T, blocks], the value with noise
    num_columns,
    logits_stride,
    addends_stride,
    temperatures_stride,
    position_offset,
    num_blocks,
    HAS_ADDEND: tl.constexpr,
    HAS_SEGMENTS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PART_V: tl.constexpr,
    MOST_BLOCKS: tl.constexpr,
):
    """The greatest of values / temperature + noise of each block, for rows with a temperature."""
    block, row = tl.program_id(0), tl.program_id(1)
    table_row = _table_row(row, segments, sampling_rows, HAS_SEGMENTS)
    if table_row < 0:
        return
    # Compared in its own type: what float32 cannot tell from 0 is still a temperature.
    temperature = tl.load(temperatures + table_row * temperatures_stride)
    if temperature <= 0.0:
        return
    blocks = tl.arange(0, MOST_BLOCKS)
    all_best = tl.load(
        block_best + row * num_blocks + blocks, mask=blocks < num_blocks, other=float("-inf")
    )
    greatest = tl.max(all_best, axis=0)
    # The division of the reference: correctly rounded.
    divisor = tl.zeros([PART_V], tl.float32) + tl.maximum(temperature.to(tl.float32), _TINY)
    seed = tl.load(seeds + table_row)
    position = tl.load(positions + row).to(tl.int64) + position_offset
    best = tl.full([PART_V], float("-inf"), tl.float64)
    best_ids = tl.full([PART_V], _NO_ID, tl.int32)
    # Unrolled, the logarithms would be more code than an instruction cache holds.
    for part in range(BLOCK_V // PART_V):
        first = block * BLOCK_V + part * PART_V
        columns = first + tl.arange(0, PART_V)
        values = _values(
            logits, addends, row, columns, num_columns, logits_stride, addends_stride, HAS_ADDEND
        )
        scaled = tl.div_rn(values - greatest, divisor)
        drawn = gumbel_noise(seed, position, first // 4, PART_V // 4) + scaled.to(tl.float64)
        # A NaN is never better; of equal values the first stays.
        is_better = (drawn > best) | ((best_ids == _NO_ID) & (drawn == drawn))
        is_better &= columns < num_columns
        best = tl.where(is_better, drawn, best)
        best_ids = tl.where(is_better, columns, best_ids)
    greatest_drawn = tl.max(best, axis=0)
    best_id = tl.min(tl.where(best == greatest_drawn, best_ids, _NO_ID), axis=0)
    # Where all is NaN, any id of the block will do.
    best_id = tl.where(best_id == _NO_ID, block * BLOCK_V, best_id)
    place = row * num_blocks + block
    tl.store(block_drawn + place, greatest_drawn)
    tl.store(block_ids + place, best_id)


@triton.jit(do_not_specialize_on_alignment=["segments", "sampling_rows", "token_ids", "is_finite"])
def reduce_kernel(
    segments,
    sampling_rows,
    temperatures,
    block_best,
    block_ids,
    block_drawn,
    block_finite,
    token_ids,
    is_finite,
    temperatures_stride,
    token_ids_stride,
    num_blocks,
    HAS_SEGMENTS: tl.constexpr,
    MOST_BLOCKS: tl.constexpr,
):
    """The token of each row from what its blocks found."""
    row = tl.program_id(0)
    table_row = _table_row(row, segments, sampling_rows, HAS_SEGMENTS)
    token_id = 0
    finite = 1
    if table_row >= 0:
        temperature = tl.load(temperatures + table_row * temperatures_stride)
        blocks = tl.arange(0, MOST_BLOCKS)
        is_block = blocks < num_blocks
        places = row * num_blocks + blocks
        values = tl.load(block_best + places, mask=is_block, other=float("-inf")).to(tl.float64)
        if temperature > 0.0:
            values = tl.load(block_drawn + places, mask=is_block, other=float("-inf"))
        ids = tl.load(block_ids + places, mask=is_block, other=_NO_ID)
        token_id = tl.min(tl.where(values == tl.max(values, axis=0), ids, _NO_ID), axis=0)
        finite = tl.min(tl.load(block_finite + places, mask=is_block, other=1), axis=0)
    tl.store(token_ids + row * token_ids_stride, token_id)
    tl.store(is_finite + row, finite)


@triton.jit(
    do_not_specialize_on_alignment=[
        "chosen_ids",
        "is_finite",
        "token_ids",
        "sampling_rows",
        "forced_accepts",
        "num_accepted",
        "is_segment_finite",
        "newest_ids",
        "newest_positions",
    ],
)
def count_accepted_kernel(
    chosen_ids,
    is_finite,
    token_ids,
    offsets,
    starts,
    num_drafts,
    sampling_rows,
    forced_accepts,
    num_accepted,
    is_segment_finite,
    newest_ids,
    newest_positions,
    MOST_TOKENS: tl.constexpr,
):
    """One window: its accepted drafts and its newest token."""
    segment = tl.program_id(0)
    count = 0
    finite = 1
    newest_id = 0
    newest_position = 0
    if tl.load(sampling_rows + segment) >= 0:
        first = tl.load(offsets + segment)
        drafts = tl.load(num_drafts + segment)
        places = tl.arange(0, MOST_TOKENS)
        chosen = tl.load(chosen_ids + first + places, mask=places <= drafts, other=0)
        draft = tl.load(token_ids + first + 1 + places, mask=places < drafts, other=-1)
        # Behind the last draft stands -1, which ends every prefix.
        count = tl.min(tl.where(chosen != draft, places, MOST_TOKENS), axis=0)
        forced = tl.load(forced_accepts + segment)
        count = tl.where(forced >= 0, tl.minimum(forced, drafts), count)
        tl.store(chosen_ids + first + places, draft, mask=places < count)
        flags = tl.load(is_finite + first + places, mask=places <= count, other=1)
        finite = tl.min(flags, axis=0)
        newest_id = tl.sum(tl.where(places == count, chosen, 0), axis=0)
        newest_position = tl.load(starts + segment) + 1 + count
    tl.store(num_accepted + segment, count)
    tl.store(is_segment_finite + segment, finite)
    tl.store(newest_ids + segment, newest_id)
    tl.store(newest_positions + segment, newest_position)
