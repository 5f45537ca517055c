"""The step plan: what every rank does in one forward step.

The scheduler builds it, the constructor checks it, and from then on it is only read.
Positions are token indices within a request; spans are half-open. A plan crosses processes
as msgpack; its text form has one line a segment and reads back.

    request   0 ....... start ............. end - drafts ..... end
              | state   | certain tokens    | drafts            |
              | in      |                   |                   |
              read_slot + replay            -> write_slot: the state here, the drafts as record
"""

import hashlib
import re
from array import array

import msgspec

from stagecoach.cache.memory_moves import NO_MOVES, MemoryMoves
from stagecoach.cache.state_slots import ZERO_SLOT
from stagecoach.request import SamplingParams, TokenLogprobs


class Save(msgspec.Struct, frozen=True, array_like=True):
    """File the state after `position` tokens in checkpoint slot `slot`."""

    position: int
    slot: int


class Comparison(msgspec.Struct, frozen=True, array_like=True):
    """Two states that must be equal, compared after the moves and before anything is computed."""

    slot: int
    replay: int
    other_slot: int
    other_replay: int = 0

    def __str__(self) -> str:
        return f"compare {self.slot}+{self.replay} {self.other_slot}+{self.other_replay}"


class Segment(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One request's tokens in a step."""

    request_id: int
    epoch: int  # admission it belongs to; a result of an older one is dropped
    start: int
    token_ids: tuple[int, ...]  # tokens [start, end)
    num_draft_tokens: int = 0  # the tail of token_ids that is still unverified
    read_slot: int
    replay: int = 0  # recorded rows of read_slot to fold in before `start`
    write_slot: int
    saves: tuple[Save, ...] = ()  # states filed by this plan
    # int32 page ids of tokens [0, end), little-endian; pages for later tokens may follow.
    page_table: bytes
    sampling_row: int | None = None  # row of the sampling table; None: samples nothing
    proposes: bool = False  # the drafter proposes a block behind what this segment samples
    # Tokens are chosen under a grammar: a mask for each row that samples comes behind the plan.
    is_constrained: bool = False
    # The token that follows each of the first rows, where prompt logprobs are wanted.
    prompt_logprob_targets: tuple[int, ...] = ()
    num_prompt_logprobs: int = 0  # alternatives beside each target
    reports_logits: bool = False  # the largest logits behind its first sample come back
    # Debug mode only: `prefix_digest` of tokens [0, start), which the worker works out as well.
    read_digest: bytes = b""

    def __post_init__(self) -> None:
        assert self.start >= 0 and self.token_ids, f"empty segment: {self}"
        # A window opens with its anchor, so drafts never fill it.
        assert 0 <= self.num_draft_tokens < self.num_tokens, f"bad window: {self}"
        assert self.is_window or not self.num_draft_tokens, f"a chunk with drafts: {self}"
        is_sampled = self.sampling_row is not None
        assert is_sampled or not (self.proposes or self.num_draft_tokens), f"not sampled: {self}"
        assert self.write_slot != ZERO_SLOT, f"the zero slot is never written: {self}"
        has_history = self.read_slot != ZERO_SLOT
        assert has_history == (self.start > 0), f"state and start disagree: {self}"
        assert self.replay >= 0 and (has_history or not self.replay), f"bad replay: {self}"
        # A window folds its replayed rows one by one; a chunk reads them as one.
        first = self.start - self.replay if self.is_window else self.start
        for save in self.saves:
            assert first < save.position <= self.certain_end, f"bad save: {self}"
        assert is_sampled or not self.is_constrained, f"not sampled: {self}"
        assert is_sampled or not self.reports_logits, f"not sampled: {self}"
        assert len(self.prompt_logprob_targets) <= self.num_tokens, f"bad targets: {self}"

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)

    @property
    def certain_end(self) -> int:
        """Where the drafts begin: the state left in `write_slot` is that after these tokens."""
        return self.end - self.num_draft_tokens

    @property
    def is_window(self) -> bool:
        """An anchor and its drafts: the recurrent kernels run it; all else is a chunk."""
        return self.num_tokens == 1 + self.num_draft_tokens

    @property
    def page_ids(self) -> tuple[int, ...]:
        return unpack_page_table(self.page_table)

    def __str__(self) -> str:
        saves = ",".join(f"{save.position}:{save.slot}" for save in self.saves)
        fields = [
            f"request {self.request_id}.{self.epoch}",
            f"span [{self.start},{self.end})",
            f"drafts {self.num_draft_tokens}",
            f"state {self.read_slot}+{self.replay}->{self.write_slot}",
            f"saves {saves or '-'}",
            f"pages {_join(self.page_ids)}",
            f"sample {'-' if self.sampling_row is None else self.sampling_row}",
            f"masks {'yes' if self.is_constrained else '-'}",
            f"propose {'yes' if self.proposes else '-'}",
            f"targets {_join(self.prompt_logprob_targets)} top {self.num_prompt_logprobs}",
            f"tokens {_join(self.token_ids)}",
        ]
        return "  ".join(fields)


class SamplingEntry(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What the sampling table learns of a request when it is (re)admitted."""

    row: int
    request_id: int
    params: SamplingParams
    seed: int
    stop_token_ids: tuple[int, ...]  # masked until min_tokens outputs exist
    num_prompt_tokens: int
    # Committed tokens, prompt first; empty unless penalties count them.
    token_ids: tuple[int, ...] = ()


class StepPlan(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """All segments of one step, in the order the device sees them: windows, then chunks."""

    step: int
    segments: tuple[Segment, ...]
    admissions: tuple[SamplingEntry, ...] = ()
    moves: MemoryMoves = NO_MOVES
    comparisons: tuple[Comparison, ...] = ()

    def __post_init__(self) -> None:
        writer = {segment.write_slot: segment for segment in self.segments}
        assert len(writer) == len(self.segments), f"slot written twice:\n{self}"
        saved = [save.slot for segment in self.segments for save in segment.saves]
        assert len({*saved, *writer}) == len(saved) + len(writer), f"slot saved twice:\n{self}"
        loaded = {transfer.device for transfer in self.moves.load_slots}
        assert not loaded.intersection(saved), f"loads what it saves over:\n{self}"
        empty = {slot for slot in self.moves.scrub_slots if slot not in loaded}
        # Many may read one checkpoint, but nobody reads what another writes.
        for segment in self.segments:
            assert writer.get(segment.read_slot, segment) is segment, (
                f"slot race:\n{self.marked(segment)}"
            )
            assert segment.read_slot not in saved, f"slot race:\n{self.marked(segment)}"
            assert segment.read_slot not in empty, f"reads nothing:\n{self.marked(segment)}"
        kinds = [segment.is_window for segment in self.segments]
        assert kinds == sorted(kinds, reverse=True), f"windows come first:\n{self}"

    @property
    def num_tokens(self) -> int:
        return sum(segment.num_tokens for segment in self.segments)

    @property
    def num_samples(self) -> int:
        return sum(segment.sampling_row is not None for segment in self.segments)

    def encode(self) -> bytes:
        return _ENCODER.encode(self)

    @staticmethod
    def decode(data: bytes) -> "StepPlan":
        return _DECODER.decode(data)

    def digest(self) -> bytes:
        """Eight bytes that every worker echoes with its result."""
        return plan_digest(self.encode())

    def marked(self, bad: Segment) -> str:
        """The plan with an arrow at one line, for error messages."""
        lines = str(self).splitlines()
        index = self.segments.index(bad) - len(self.segments)
        lines[index] = "> " + lines[index].removeprefix("  ")
        return "\n".join(lines)

    def __str__(self) -> str:
        head = f"step {self.step}: {len(self.segments)} segments, {self.num_tokens} tokens"
        moves = [f"moves  {self.moves}"] if self.moves != NO_MOVES else []
        return "\n  ".join([head, *moves, *map(str, self.comparisons), *map(str, self.segments)])

    @staticmethod
    def parse(text: str) -> "StepPlan":
        """Read back what `str(plan)` printed.

        Admissions, digests of prefixes and the wish for logits are not in the text.

        Raises:
            ValueError: a line that is not of that form.
        """
        head, *lines = text.strip().splitlines()
        match = re.match(r"step (\d+):", head)
        if match is None:
            raise ValueError(f"not a step plan: {head!r}")
        lines = [line.removeprefix("> ").strip() for line in lines]
        moves = [line for line in lines if line.startswith("moves ")]
        comparisons = [line for line in lines if line.startswith("compare ")]
        return StepPlan(
            step=int(match[1]),
            segments=tuple(map(_parse_segment, lines[len(moves) + len(comparisons) :])),
            moves=MemoryMoves.parse(moves[0].removeprefix("moves").strip()) if moves else NO_MOVES,
            comparisons=tuple(map(_parse_comparison, comparisons)),
        )


class RowResult(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What one segment returned."""

    request_id: int
    epoch: int
    token_ids: tuple[int, ...]  # the row of m tokens; empty after a middle chunk
    draft_token_ids: tuple[int, ...] = ()  # what the drafter proposes to follow them
    # One a draft: the estimate that it is accepted if all before it are; uncalibrated. Empty
    # where the draft model has no confidence head.
    confidences: tuple[float, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()  # one a token of the row, where asked for
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # one a target of the segment
    is_finite: bool = True  # False: NaN or infinity in what the segment computed; no tokens then
    # Where asked for, the largest logits behind the first sample, by falling value.
    logit_ids: tuple[int, ...] = ()
    logits: tuple[float, ...] = ()


class StepResult(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The last stage's answer to a plan: one row a segment, in the plan's order."""

    step: int
    digest: bytes
    rows: tuple[RowResult, ...]
    forward_seconds: float = 0.0  # inside the last stage's layers
    step_seconds: float = 0.0  # from the plan's arrival at the last stage to this result
    busy_seconds: float = 0.0  # of it, not waiting for the stage before
    arrived: float = 0.0  # monotonic seconds when the last stage began with the plan
    hop_seconds: float = 0.0  # since then, waiting for the stage before
    # One a comparison of the plan: the largest relative difference of any layer's state here.
    differences: tuple[float, ...] = ()


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(StepPlan)


def plan_digest(encoded_plan: bytes) -> bytes:
    return hashlib.blake2b(encoded_plan, digest_size=8).digest()


def pack_page_table(page_ids: list[int] | tuple[int, ...]) -> bytes:
    """Page ids as the int32 bytes that a Segment carries."""
    return array("i", page_ids).tobytes()


def unpack_page_table(page_table: bytes) -> tuple[int, ...]:
    return tuple(array("i", page_table))


_NUMBER = re.compile(r"\d+")
_SEGMENT_LINE = re.compile(
    r"request (?P<request>\d+)\.(?P<epoch>\d+)  span \[(?P<start>\d+),\d+\)  drafts (?P<drafts>\d+)"
    r"  state (?P<read>\d+)\+(?P<replay>\d+)->(?P<write>\d+)  saves (?P<saves>\S+)"
    r"  pages (?P<pages>\S+)  sample (?P<sample>\S+)  masks (?P<masks>\S+)"
    r"  propose (?P<propose>\S+)  targets (?P<targets>\S+) top (?P<top>\d+)  tokens (?P<tokens>\S+)"
)


def _parse_comparison(line: str) -> Comparison:
    match = re.fullmatch(r"compare (\d+)\+(\d+) (\d+)\+(\d+)", line)
    if match is None:
        raise ValueError(f"not a comparison: {line!r}")
    return Comparison(*map(int, match.groups()))


def _parse_segment(line: str) -> Segment:
    match = _SEGMENT_LINE.search(line)
    if match is None:
        raise ValueError(f"not a segment: {line!r}")
    saves = () if match["saves"] == "-" else match["saves"].split(",")
    return Segment(
        request_id=int(match["request"]),
        epoch=int(match["epoch"]),
        start=int(match["start"]),
        token_ids=_split(match["tokens"]),
        num_draft_tokens=int(match["drafts"]),
        read_slot=int(match["read"]),
        replay=int(match["replay"]),
        write_slot=int(match["write"]),
        saves=tuple(Save(*map(int, save.split(":"))) for save in saves),
        page_table=pack_page_table(_split(match["pages"])),
        sampling_row=None if match["sample"] == "-" else int(match["sample"]),
        proposes=match["propose"] == "yes",
        is_constrained=match["masks"] == "yes",
        prompt_logprob_targets=_split(match["targets"]),
        num_prompt_logprobs=int(match["top"]),
    )


def _join(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers)) or "-"


def _split(text: str) -> tuple[int, ...]:
    return () if text == "-" else tuple(map(int, text.split(",")))
