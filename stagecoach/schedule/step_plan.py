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


class Save(msgspec.Struct, frozen=True, array_like=True, gc=False):
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


class Segment(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """One request's tokens in a step."""

    request_id: int
    epoch: int  # admission it belongs to; a result of an older one is dropped
    start: int
    token_ids: tuple[int, ...]  # tokens [start, end); none where it is chained
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
    # Its one token is what its sampling row chose last: a plan before this one, whose result the
    # head does not have yet (`schedule/chaining.py`).
    is_chained: bool = False

    def __post_init__(self) -> None:
        # Runs for every segment on every rank: each field is read once.
        num_tokens, num_drafts = len(self.token_ids), self.num_draft_tokens
        if self.is_chained:
            self._check_chained()
            num_tokens = 1
        assert self.start >= 0 and num_tokens, f"empty segment: {self}"
        # A window opens with its anchor, so drafts never fill it.
        assert 0 <= num_drafts < num_tokens, f"bad window: {self}"
        is_window = num_tokens == 1 + num_drafts
        assert is_window or not num_drafts, f"a chunk with drafts: {self}"
        assert self.write_slot != ZERO_SLOT, f"the zero slot is never written: {self}"
        has_history, replay = self.read_slot != ZERO_SLOT, self.replay
        assert has_history == (self.start > 0), f"state and start disagree: {self}"
        assert replay >= 0 and (has_history or not replay), f"bad replay: {self}"
        if self.sampling_row is None:
            assert not (self.proposes or num_drafts), f"not sampled: {self}"
            assert not (self.is_constrained or self.reports_logits), f"not sampled: {self}"
        if self.saves:
            # A window folds its replayed rows one by one; a chunk reads them as one.
            first = self.start - replay if is_window else self.start
            for save in self.saves:
                assert first < save.position <= self.certain_end, f"bad save: {self}"
        assert len(self.prompt_logprob_targets) <= num_tokens, f"bad targets: {self}"

    def _check_chained(self) -> None:
        assert not self.token_ids, f"chained, and its token is known: {self}"
        assert self.sampling_row is not None and self.start, f"chained to nothing: {self}"
        # Whatever depends on the token is not known either.
        is_plain = not (self.num_draft_tokens or self.proposes or self.is_constrained)
        is_silent = not (self.saves or self.prompt_logprob_targets or self.reports_logits)
        assert is_plain and is_silent, f"chained, and more than a window of one token: {self}"

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) or int(self.is_chained)

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

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
            f"tokens {'chained' if self.is_chained else _join(self.token_ids)}",
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
        segments = self.segments
        writer = {segment.write_slot: segment for segment in segments}
        assert len(writer) == len(segments), f"slot written twice:\n{self}"
        saved = [save.slot for segment in segments if segment.saves for save in segment.saves]
        assert len({*saved, *writer}) == len(saved) + len(writer), f"slot saved twice:\n{self}"
        unreadable = {*saved}
        if self.moves is not NO_MOVES:
            loaded = {transfer.device for transfer in self.moves.load_slots}
            assert not loaded.intersection(saved), f"loads what it saves over:\n{self}"
            unreadable.update(slot for slot in self.moves.scrub_slots if slot not in loaded)
        has_chunk = False
        # Many may read one checkpoint, but nobody reads what another writes.
        for segment in segments:
            slot = segment.read_slot
            if slot in unreadable or writer.get(slot, segment) is not segment:
                fault = "reads nothing" if slot in self.moves.scrub_slots else "slot race"
                raise AssertionError(f"{fault}:\n{self.marked(segment)}")
            is_chunk = len(segment.token_ids) > 1 + segment.num_draft_tokens
            assert is_chunk or not has_chunk, f"windows come first:\n{self}"
            has_chunk = is_chunk

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


class RowResult(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
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
        token_ids=() if match["tokens"] == "chained" else _split(match["tokens"]),
        is_chained=match["tokens"] == "chained",
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
