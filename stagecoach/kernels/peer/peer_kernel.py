"""Kernels that write into the memory of neighbouring GPUs.

Owns the protocol: every program is a channel of its own, with a counter of its messages, a flag
that the other side's program of the same number waits for, and a region of memory that nobody else
writes. So a launch may have any number of programs, and a captured one can be replayed: the
number of a message stands in memory, not in an argument.

Counters run through all of int32 and wrap; only differences of them are compared.

A message is taken as one row of values, whatever its shape.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from stagecoach.kernels.dependent_launch import let_next_start, wait_for_earlier


@triton.jit
def set_flag(flag_ptr, count):
    """Let another GPU see `count`, after all that this program has read and written."""
    tl.debug_barrier()
    tl.atomic_xchg(flag_ptr, count, sem="release", scope="sys")


@triton.jit
def wait_for_flag(flag_ptr, count):
    """Return when the flag has reached `count`; what was written before it is then visible."""
    while tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys") - count < 0:
        pass


@triton.jit
def give_to_stage(
    x_ptr,
    counts_ptr,
    flags_ptr,
    data_ptr,
    distances_ptr,
    num_values,
    tiles_per_program,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    MAX_PROGRAMS: tl.constexpr,
    PROGRAM_VALUES: tl.constexpr,
    TILE: tl.constexpr,
    VALUE_BYTES: tl.constexpr,
):
    """Lay this program's part of x into the region of every other rank of the stage.

    Every rank has flags [SIZE, MAX_PROGRAMS] and data [2 halves, SIZE, MAX_PROGRAMS,
    PROGRAM_VALUES]; those of a peer lie `distances_ptr[peer]` bytes behind this rank's. Messages
    take the halves in turn: a rank that writes a half again has seen everybody's message in
    between, so nobody reads the old one.
    """
    program = tl.program_id(0)
    count = tl.load(counts_ptr + program) + 1
    place = ((count & 1) * SIZE + RANK) * MAX_PROGRAMS + program
    first = program.to(tl.int64) * tiles_per_program * TILE
    for tile in range(0, tiles_per_program):
        within = tile * TILE + tl.arange(0, TILE)
        is_real = first + within < num_values
        x = tl.load(x_ptr + first + within, mask=is_real)
        for peer in tl.static_range(SIZE):
            if peer != RANK:
                into = data_ptr + place.to(tl.int64) * PROGRAM_VALUES
                into += tl.multiple_of(tl.load(distances_ptr + peer) // VALUE_BYTES, 16)
                tl.store(into + within, x, mask=is_real)
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            flag = flags_ptr + RANK * MAX_PROGRAMS + program
            set_flag(flag + tl.load(distances_ptr + peer) // 4, count)


@triton.jit
def take_from_stage(
    x_ptr,
    out_ptr,
    counts_ptr,
    flags_ptr,
    data_ptr,
    num_values,
    tiles_per_program,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    MAX_PROGRAMS: tl.constexpr,
    PROGRAM_VALUES: tl.constexpr,
    TILE: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Wait for this program's part of every rank's message; add them up, or lay them in a row.

    The sum is taken in float32 and in rank order, so that all ranks get the same bits.
    """
    program = tl.program_id(0)
    count = tl.load(counts_ptr + program) + 1
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            wait_for_flag(flags_ptr + peer * MAX_PROGRAMS + program, count)
    first = program.to(tl.int64) * tiles_per_program * TILE
    for tile in range(0, tiles_per_program):
        within = tile * TILE + tl.arange(0, TILE)
        is_real = first + within < num_values
        own = tl.load(x_ptr + first + within, mask=is_real)
        total = tl.zeros([TILE], tl.float32)
        for peer in tl.static_range(SIZE):
            part = own
            if peer != RANK:
                place = ((count & 1) * SIZE + peer) * MAX_PROGRAMS + program
                source = data_ptr + place.to(tl.int64) * PROGRAM_VALUES
                # Volatile: past the first-level cache, which may still hold an older message.
                part = tl.load(source + within, mask=is_real, volatile=True)
            if SUMS:
                total += part.to(tl.float32)
            else:
                tl.store(out_ptr + peer * num_values + first + within, part, mask=is_real)
        if SUMS:
            tl.store(out_ptr + first + within, total.to(x_ptr.dtype.element_ty), mask=is_real)
    # Every thread has read the counter before it moves on.
    tl.debug_barrier()
    tl.store(counts_ptr + program, count)


@triton.jit(do_not_specialize=["tiles_per_program"])
def exchange_kernel(
    x_ptr,
    out_ptr,
    counts_ptr,
    flags_ptr,
    data_ptr,
    distances_ptr,
    num_values,
    tiles_per_program,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    MAX_PROGRAMS: tl.constexpr,
    PROGRAM_VALUES: tl.constexpr,
    TILE: tl.constexpr,
    SUMS: tl.constexpr,
    VALUE_BYTES: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """One message of every rank of the stage to every other."""
    let_next_start(IS_DEPENDENT)
    wait_for_earlier(IS_DEPENDENT)
    give_to_stage(
        x_ptr,
        counts_ptr,
        flags_ptr,
        data_ptr,
        distances_ptr,
        num_values,
        tiles_per_program,
        RANK,
        SIZE,
        MAX_PROGRAMS,
        PROGRAM_VALUES,
        TILE,
        VALUE_BYTES,
    )
    take_from_stage(
        x_ptr,
        out_ptr,
        counts_ptr,
        flags_ptr,
        data_ptr,
        num_values,
        tiles_per_program,
        RANK,
        SIZE,
        MAX_PROGRAMS,
        PROGRAM_VALUES,
        TILE,
        SUMS,
    )


@triton.jit(do_not_specialize=["tiles_per_program"])
def send_kernel(
    x_ptr,
    counts_ptr,
    taken_ptr,
    their_flags_ptr,
    their_data_ptr,
    num_values,
    tiles_per_program,
    DEPTH: tl.constexpr,
    MAX_PROGRAMS: tl.constexpr,
    PROGRAM_VALUES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write x into the next place of the receiver's ring [DEPTH, MAX_PROGRAMS, PROGRAM_VALUES].

    Waits while the receiver has not taken the message that lay there: `taken_ptr` is this GPU's,
    written by the receiver.
    """
    program = tl.program_id(0)
    count = tl.load(counts_ptr + program) + 1
    wait_for_flag(taken_ptr + program, count - DEPTH)
    place = (count & (DEPTH - 1)) * MAX_PROGRAMS + program
    into = their_data_ptr + place.to(tl.int64) * PROGRAM_VALUES
    first = program.to(tl.int64) * tiles_per_program * TILE
    for tile in range(0, tiles_per_program):
        within = tile * TILE + tl.arange(0, TILE)
        is_real = first + within < num_values
        tl.store(into + within, tl.load(x_ptr + first + within, mask=is_real), mask=is_real)
    set_flag(their_flags_ptr + program, count)
    tl.store(counts_ptr + program, count)


@triton.jit(do_not_specialize=["tiles_per_program"])
def receive_kernel(
    out_ptr,
    data_ptr,
    counts_ptr,
    flags_ptr,
    their_taken_ptr,
    num_values,
    tiles_per_program,
    DEPTH: tl.constexpr,
    MAX_PROGRAMS: tl.constexpr,
    PROGRAM_VALUES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Wait for the next message in this GPU's ring, copy it out, and tell the sender."""
    program = tl.program_id(0)
    count = tl.load(counts_ptr + program) + 1
    wait_for_flag(flags_ptr + program, count)
    place = (count & (DEPTH - 1)) * MAX_PROGRAMS + program
    source = data_ptr + place.to(tl.int64) * PROGRAM_VALUES
    first = program.to(tl.int64) * tiles_per_program * TILE
    for tile in range(0, tiles_per_program):
        within = tile * TILE + tl.arange(0, TILE)
        is_real = first + within < num_values
        # Volatile: past the first-level cache, which may still hold an older message.
        x = tl.load(source + within, mask=is_real, volatile=True)
        tl.store(out_ptr + first + within, x, mask=is_real)
    set_flag(their_taken_ptr + program, count)
    tl.store(counts_ptr + program, count)
