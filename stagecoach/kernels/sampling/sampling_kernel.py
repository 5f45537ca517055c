"""The choice of tokens in Triton: two passes over the logits, and a reduction over their blocks.

The first pass finds the greatest value of each block of columns; the second, of rows with a
temperature only, adds noise to what the first left behind. Noise is float64, its words those of
`noise.py` bit for bit. It is made for few tokens: float32 says which ones could be the choice,
and nearly always that is one.

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
def _noise_words(seed, position, groups):
    """Random words, uint32: one of the four to each of the tokens 4 * group + i."""
    groups = groups.to(tl.uint32)
    zeros = groups * 0
    low = zeros + (position & 0xFFFFFFFF).to(tl.uint32)
    high = zeros + ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    # The fourth word is the stream: that of the target's choice is 0.
    return tl.philox(seed, groups, low, high, zeros)


@triton.jit
def gumbel_noise(seed, position, columns):
    """Noise of tokens, float64."""
    word_0, word_1, word_2, word_3 = _noise_words(seed, position, columns // 4)
    place = columns % 4
    low, high = tl.where(place == 0, word_0, word_1), tl.where(place == 2, word_2, word_3)
    uniform = (tl.where(place < 2, low, high).to(tl.float64) + 0.5) * 2.3283064365386963e-10
    return -tl.log(-tl.log(uniform))


@triton.jit
def _rough_log(x):
    """Natural logarithm of normal float32 numbers above 0, at most 1e-4 off."""
    bits = x.to(tl.int32, bitcast=True)
    # Exponent and fraction read as one number are the logarithm but for a bow between powers of 2.
    straight = bits.to(tl.float32) * 1.1920928955078125e-07 - 127.0
    f = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0
    bow = f * (1.0 - f) * (0.4387255 + f * (-0.23905711 + f * 0.08212962))
    return 0.6931471805599453 * (straight + bow)


@triton.jit
def rough_gumbel_noise(words):
    """Noise of random words in float32, at most 2.5e-4 off."""
    is_low = words < 0x80000000
    # u below a half, else 1 - u: float32 has no room for both.
    x = tl.where(is_low, words, words ^ 0xFFFFFFFF)
    x = (x.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    # -log(1 - x), at most 4.5e-5 of itself off up to x = 1/2.
    series = 0.39579911 + x * (-0.05780924 + x * 0.74518336)
    series = x * (1.00004436 + x * (0.49578182 + x * series))
    return -_rough_log(tl.where(is_low, -_rough_log(x), series))


@triton.jit
def _least_that_could_win(greatest_rough):
    """Below it no rough value is that of the choice: two may be off by half of what is taken off,
    noise, product and sum together."""
    return greatest_rough - (6e-4 + 1e-6 * tl.abs(greatest_rough))


@triton.jit
def _draw_exactly(
    logits,
    addends,
    row,
    columns,
    greatest,
    temperature,
    seed,
    position,
    num_columns,
    logits_stride,
    addends_stride,
    HAS_ADDEND: tl.constexpr,
):
    """Values / temperature + noise, float64; minus infinity for what is no number or no column."""
    values = _values(
        logits, addends, row, columns, num_columns, logits_stride, addends_stride, HAS_ADDEND
    )
    # The division of the reference: correctly rounded.
    scaled = tl.div_rn(values - greatest, values * 0.0 + temperature)
    drawn = gumbel_noise(seed, position, columns) + scaled.to(tl.float64)
    return tl.where((columns < num_columns) & (drawn == drawn), drawn, float("-inf"))


@triton.jit
def _best_of_block(
    logits,
    addends,
    row,
    first_column,
    greatest,
    temperature,
    seed,
    position,
    num_columns,
    logits_stride,
    addends_stride,
    HAS_ADDEND: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PART_V: tl.constexpr,
):
    """The lowest column of a block that has its greatest value, all in float64."""
    best = tl.full([PART_V], float("-inf"), tl.float64)
    best_ids = first_column + tl.arange(0, PART_V)
    # Unrolled, the logarithms would be more code than an instruction cache holds.
    for part in range(BLOCK_V // PART_V):
        columns = first_column + part * PART_V + tl.arange(0, PART_V)
        drawn = _draw_exactly(
            logits, addends, row, columns, greatest, temperature, seed, position, num_columns,
            logits_stride, addends_stride, HAS_ADDEND,
        )  # fmt: skip
        best_ids = tl.where(drawn > best, columns, best_ids)
        best = tl.maximum(best, drawn)
    return tl.min(tl.where(best == tl.max(best, axis=0), best_ids, _NO_ID), axis=0)


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
    block_drawn,  # float32 [T, blocks], roughly the value with noise
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
    temperature = tl.maximum(temperature.to(tl.float32), _TINY)
    blocks = tl.arange(0, MOST_BLOCKS)
    all_best = tl.load(
        block_best + row * num_blocks + blocks, mask=blocks < num_blocks, other=float("-inf")
    )
    greatest = tl.max(all_best, axis=0)
    factor = 1.0 / temperature
    seed = tl.load(seeds + table_row)
    position = tl.load(positions + row).to(tl.int64) + position_offset
    best = tl.full([PART_V // 4], float("-inf"), tl.float32)
    second = tl.full([PART_V // 4], float("-inf"), tl.float32)
    best_ids = tl.zeros([PART_V // 4], tl.int32)
    for part in range(BLOCK_V // PART_V):
        first = block * BLOCK_V + part * PART_V
        words = _noise_words(seed, position, first // 4 + tl.arange(0, PART_V // 4))
        for place in tl.static_range(4):
            columns = first + 4 * tl.arange(0, PART_V // 4) + place
            values = _values(
                logits, addends, row, columns, num_columns, logits_stride, addends_stride,
                HAS_ADDEND,
            )  # fmt: skip
            rough = (values - greatest) * factor + rough_gumbel_noise(words[place])
            rough = tl.where((columns < num_columns) & (rough == rough), rough, float("-inf"))
            second = tl.maximum(second, tl.minimum(best, rough))
            best_ids = tl.where(rough > best, columns, best_ids)
            best = tl.maximum(best, rough)
    greatest_rough = tl.max(best, axis=0)
    least = _least_that_could_win(greatest_rough)
    could_win = (best >= least).to(tl.int32) + (second >= least).to(tl.int32)
    best_id = tl.max(tl.where(best >= least, best_ids, 0), axis=0)
    if tl.sum(could_win, axis=0) != 1:
        best_id = _best_of_block(
            logits, addends, row, block * BLOCK_V, greatest, temperature, seed, position,
            num_columns, logits_stride, addends_stride, HAS_ADDEND, BLOCK_V, PART_V,
        )  # fmt: skip
    place = row * num_blocks + block
    tl.store(block_drawn + place, greatest_rough)
    tl.store(block_ids + place, best_id)


@triton.jit(
    do_not_specialize=["position_offset"],
    do_not_specialize_on_alignment=[
        "segments",
        "sampling_rows",
        "positions",
        "token_ids",
        "is_finite",
    ],
)
def reduce_kernel(
    logits,
    addends,
    segments,
    sampling_rows,
    positions,
    temperatures,
    seeds,
    block_best,
    block_ids,
    block_drawn,
    block_finite,
    token_ids,
    is_finite,
    num_columns,
    logits_stride,
    addends_stride,
    temperatures_stride,
    token_ids_stride,
    position_offset,
    num_blocks,
    HAS_ADDEND: tl.constexpr,
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
        values = tl.load(block_best + places, mask=is_block, other=float("-inf"))
        ids = tl.load(block_ids + places, mask=is_block, other=_NO_ID)
        greatest = tl.max(values, axis=0)
        is_best = values == greatest
        if temperature > 0.0:
            rough = tl.load(block_drawn + places, mask=is_block, other=float("-inf"))
            is_best = is_block & (rough >= _least_that_could_win(tl.max(rough, axis=0)))
            if tl.sum(is_best.to(tl.int32), axis=0) != 1:
                drawn = _draw_exactly(
                    logits, addends, row, ids, greatest,
                    tl.maximum(temperature.to(tl.float32), _TINY), tl.load(seeds + table_row),
                    tl.load(positions + row).to(tl.int64) + position_offset, num_columns,
                    logits_stride, addends_stride, HAS_ADDEND,
                )  # fmt: skip
                is_best = is_block & (drawn == tl.max(drawn, axis=0))
        token_id = tl.min(tl.where(is_best, ids, _NO_ID), axis=0)
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
