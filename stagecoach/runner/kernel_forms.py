"""Small steps that between them launch every form that a kernel is compiled in.

A kernel has forms for few and many tokens or segments, with and without saves and replay, and for
numbers that begin within 16 bytes where windows come before a chunk. The rehearsal runs one step
of each kind, so that no request waits for a compiler.
"""

from collections.abc import Iterator
from itertools import product

from stagecoach.cache.page_pool import NUM_RESERVED_PAGES
from stagecoach.cache.state_slots import NUM_RESERVED_SLOTS, ZERO_SLOT
from stagecoach.config.engine import ResolvedConfig
from stagecoach.request import SamplingParams
from stagecoach.schedule.step_plan import SamplingEntry, Save, Segment, StepPlan, pack_page_table

# No plan of an engine has this number.
_STEP = -3
# Tokens from which on kernels that save or replay have one form.
_LONG = 64


def powers_of_two(first: int, last: int) -> tuple[int, ...]:
    """From `first`, which is one, up to `last`, and `last` itself."""
    powers = []
    while first < last:
        powers.append(first)
        first *= 2
    return (*powers, last) if last >= 1 else ()


def chunk_lengths(config: ResolvedConfig) -> tuple[int, ...]:
    """Of chunks, the longest at the end."""
    longest = min(config.engine.max_num_batched_tokens, config.max_model_len - 1)
    return powers_of_two(2, longest)


def form_plans(config: ResolvedConfig, *, has_graphs: bool) -> Iterator[StepPlan]:
    """Steps to be run as if their tokens were nobody's; they need one page and no slots.

    Args:
        has_graphs: windows alone are captured, whatever their number and width.
    """
    replays = (0, 1) if config.num_draft_tokens else (0,)
    for has_saves, replay in product((False, True), replays):
        form = _Form(config, has_saves=has_saves, replay=replay)
        is_plain = not (has_saves or replay)
        for widths, lengths in _shapes_with_chunks(config, None if is_plain else _LONG):
            yield form.plan(widths, lengths)
    if not has_graphs:
        form = _Form(config, has_saves=False, replay=0)
        for widths in _shapes_of_windows(config):
            yield form.plan(widths, [])


def _shapes_with_chunks(
    config: ResolvedConfig, most: int | None
) -> list[tuple[list[int], list[int]]]:
    """Widths of windows, lengths of chunks: sizes up to `most`, any numbers, behind windows too."""
    engine, longest = config.engine, config.max_model_len - 1
    shapes: list[tuple[list[int], list[int]]] = [([width], [2]) for width in _widths(config)]
    for windows in ([], [1]):
        most_chunks = engine.max_num_seqs - len(windows)
        most_tokens = min(engine.max_num_batched_tokens - len(windows), most_chunks * longest)
        numbers = powers_of_two(1, min(most_chunks, most_tokens // 2))
        sizes = powers_of_two(2, min(most_tokens, most or most_tokens))
        shapes += [(windows, _cut(size, longest)) for size in sizes]
        shapes += [(windows, [2] * number) for number in numbers]
    if most is None:
        # Before a chunk windows run without a graph, in forms for numbers that no graph may have.
        numbers = powers_of_two(2, engine.max_num_seqs - 1)
        widths = powers_of_two(1, 1 + config.num_draft_tokens)
        shapes += [([width] * number, [2]) for width in widths for number in numbers]
    return [shape for shape in shapes if _has_room(config, *shape)]


def _cut(num_tokens: int, longest: int) -> list[int]:
    """As few chunks as hold so many tokens, of alike lengths."""
    count = -(-num_tokens // longest)
    return [(num_tokens + place) // count for place in range(count)]


def _shapes_of_windows(config: ResolvedConfig) -> list[list[int]]:
    numbers = powers_of_two(1, config.engine.max_num_seqs)
    shapes = [[width] * number for width in _widths(config) for number in numbers]
    return [widths for widths in shapes if _has_room(config, widths, [])]


def _widths(config: ResolvedConfig) -> range:
    return range(1, 2 + config.num_draft_tokens)


def _has_room(config: ResolvedConfig, widths: list[int], lengths: list[int]) -> bool:
    engine = config.engine
    both = (*widths, *lengths)
    return (
        len(both) <= engine.max_num_seqs
        and sum(both) <= engine.max_num_batched_tokens
        and max(both) < config.max_model_len
        and all(length >= 2 for length in lengths)
    )


class _Form:
    """Plans whose segments are alike but for their lengths."""

    def __init__(self, config: ResolvedConfig, *, has_saves: bool, replay: int) -> None:
        self._config = config
        self._has_saves = has_saves
        self._replay = replay

    def plan(self, widths: list[int], lengths: list[int]) -> StepPlan:
        """Windows, then chunks, of so many tokens each; all of them sample."""
        num_segments = len(widths) + len(lengths)
        segments = [
            self._segment(number, num_segments, length, is_window=number < len(widths))
            for number, length in enumerate((*widths, *lengths))
        ]
        admissions = [
            SamplingEntry(
                row=number,
                # Nobody's, so that no count that a rule keeps goes on for a client's.
                request_id=-1 - number,
                params=SamplingParams(temperature=1.0),
                seed=number,
                stop_token_ids=(),
                num_prompt_tokens=1,
            )
            for number in range(num_segments)
        ]
        return StepPlan(step=_STEP, segments=tuple(segments), admissions=tuple(admissions))

    def _segment(self, number: int, num_segments: int, length: int, *, is_window: bool) -> Segment:
        config = self._config
        start = min(1, config.max_model_len - 1 - length)
        read_slot = NUM_RESERVED_SLOTS
        write_slot = read_slot + 1 + number
        num_pages = -(-(start + length) // config.engine.block_size)
        saves = (Save(start + 1, write_slot + num_segments),) if self._has_saves else ()
        return Segment(
            request_id=number,
            epoch=0,
            start=start,
            token_ids=(0,) * length,
            num_draft_tokens=length - 1 if is_window else 0,
            read_slot=read_slot if start else ZERO_SLOT,
            write_slot=write_slot,
            replay=self._replay if start else 0,
            page_table=pack_page_table([NUM_RESERVED_PAGES] * num_pages),
            saves=saves,
            sampling_row=number,
            proposes=bool(config.num_draft_tokens),
        )
