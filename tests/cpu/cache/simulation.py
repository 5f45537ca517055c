"""A device and a scheduler in small, to run the prefix cache against.

The device keeps in every row and slot the very tokens that its content was computed from, and
does what plans say in their order. So a segment that reads anything but its own prefix fails,
whoever made the mistake. The scheduler decides by the roll of a die.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from stagecoach.cache.memory_moves import MemoryMoves
from stagecoach.cache.prefix_cache import Checkpoint, Claim, PrefixCache
from stagecoach.cache.prefix_hash import BlockChain, salted_root
from stagecoach.cache.state_slots import ZERO_SLOT

Tokens = tuple[int, ...]


class NotFinite(NamedTuple):
    """What a step left where it computed NaN."""

    step: int


class State(NamedTuple):
    """What a slot holds."""

    tokens: Tokens | NotFinite
    drafts: Tokens = ()

    def folded(self, replay: int) -> Tokens | NotFinite:
        if isinstance(self.tokens, NotFinite):
            return self.tokens
        assert replay <= len(self.drafts), f"replays {replay} rows of {self.drafts}"
        return self.tokens + self.drafts[:replay]


Row = tuple[str | None, Tokens] | NotFinite | None  # the tenant, and all tokens up to the row's


@dataclass(eq=False)
class Asker:
    """A request."""

    owner: int
    salt: str | None
    tokens: list[int]
    num_prompt: int
    end: int  # tokens at which it ends
    chain: BlockChain
    pages: list[int] = field(default_factory=list)
    slot: int | None = None
    computed: int = 0
    replay: int = 0
    first_read: tuple[int, int] | None = None
    in_flight: int = 0
    is_sampling: bool = False
    was_admitted: bool = False


class Piece(NamedTuple):
    """A segment."""

    asker: Asker
    owner: int
    start: int
    tokens: Tokens  # [0, end), the drafts with it
    num_drafts: int
    read_slot: int
    replay: int
    write_slot: int
    saves: tuple[tuple[int, int], ...]
    pages: Tokens
    is_sampled: bool


class Device:
    """Memory by number, and the order in which a plan touches it."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.rows: dict[int, list[Row]] = {}
        self.slots: dict[int, State] = {ZERO_SLOT: State(())}
        self.host_rows: dict[int, list[Row]] = {}
        self.host_slots: dict[int, State] = {}
        self.committed_step = -1
        self.tainted: set[int] = set()  # admissions that computed what is not finite

    def move(self, moves: MemoryMoves, step: int) -> None:
        """As `MemoryMoves` says: in the order of its fields."""

        def moved(rows: list[Row]) -> list[Row]:
            # From here on it is the plan that made them not finite, for who reads them next.
            return [NotFinite(step) if isinstance(row, NotFinite) else row for row in rows]

        for move in moves.store_pages:
            self.host_rows[move.host] = list(self.rows[move.device])
        for move in moves.store_slots:
            self.host_slots[move.host] = self.slots[move.device]
        for page in moves.scrub_pages:
            self.rows[page] = [None] * self.block_size
        for slot in moves.scrub_slots:
            self.slots.pop(slot, None)
        for move in moves.load_pages:
            self.rows[move.device] = moved(self.host_rows[move.host])
        for move in moves.load_slots:
            self.slots[move.device] = self.host_slots[move.host]
        for copy in moves.copies:
            rows = moved(self.rows[copy.source][: copy.num_tokens])
            self.rows[copy.target] = rows + [None] * (self.block_size - copy.num_tokens)

    def run(self, step: int, pieces: Sequence[Piece], poisoned: set[int]) -> list[bool]:
        """Compute the segments; which of them are finite."""
        # All reads come first: nobody may count on another's write in the same plan.
        finite = [self._read(piece) and piece.owner not in poisoned for piece in pieces]
        for piece, is_finite in zip(pieces, finite, strict=True):
            self._write(step, piece, is_finite)
            if not is_finite:
                self.tainted.add(piece.owner)
        return finite

    def _read(self, piece: Piece) -> bool:
        assert piece.read_slot in self.slots, f"slot {piece.read_slot} holds nothing"
        state = self.slots[piece.read_slot].folded(piece.replay)
        is_finite = self._is_finite(state, piece.owner)
        want = piece.tokens[: piece.start]
        assert not is_finite or state == want, f"reads the state after {state}, not {want}"
        for position in range(piece.start):
            page = piece.pages[position // self.block_size]
            row = self.rows[page][position % self.block_size]
            if self._is_finite(row, piece.owner):
                expected = (piece.asker.salt, piece.tokens[: position + 1])
                assert row == expected, f"row {position} in page {page}: {row}, not {expected}"
            else:
                is_finite = False
        return is_finite

    def _is_finite(self, content: object, owner: int) -> bool:
        if not isinstance(content, NotFinite):
            return True
        is_news = content.step > self.committed_step or owner in self.tainted
        assert is_news, "what is known as not finite was found"
        return False

    def _write(self, step: int, piece: Piece, is_finite: bool) -> None:
        for position in range(piece.start, len(piece.tokens)):
            page = piece.pages[position // self.block_size]
            rows = self.rows.setdefault(page, [None] * self.block_size)
            row: Row = (piece.asker.salt, piece.tokens[: position + 1])
            rows[position % self.block_size] = row if is_finite else NotFinite(step)
        certain = len(piece.tokens) - piece.num_drafts
        for position, slot in ((certain, piece.write_slot), *piece.saves):
            state: Tokens | NotFinite = piece.tokens[:position]
            self.slots[slot] = State(state if is_finite else NotFinite(step))
        if is_finite:
            left = State(piece.tokens[:certain], piece.tokens[certain:])
            self.slots[piece.write_slot] = left


class Simulation:
    """Askers, the cache and the device."""

    def __init__(
        self,
        cache: PrefixCache,
        block_size: int,
        *,
        max_running: int,
        num_stages: int = 2,
    ) -> None:
        self.cache = cache
        self.device = Device(block_size)
        self.block_size = block_size
        self.max_running = max_running
        self.num_stages = num_stages
        self.waiting: list[Asker] = []
        self.running: list[Asker] = []
        self.in_flight: deque[tuple[int, list[Piece], list[bool]]] = deque()
        self.step = 0
        self.num_owners = 0
        self.num_hits = 0
        self.pinned: list[Checkpoint] = []

    def add(self, prompt: Sequence[int], num_outputs: int, salt: str | None = None) -> Asker:
        tokens = list(prompt)
        chain = BlockChain(
            salted_root(b"root", salt), self.block_size, lambda a, b: tuple(tokens[a:b])
        )
        end = min(len(tokens) + num_outputs, self.cache.num_pages * self.block_size)
        asker = Asker(self._new_owner(), salt, tokens, len(tokens), end, chain)
        self.waiting.append(asker)
        return asker

    def plan(self, rng: Random, *, poison: bool = False, chunk: int | None = None) -> bool:
        """Make and run a plan, unless the pipeline is full; whether there was one."""
        if len(self.in_flight) == self.num_stages:
            return False
        cache = self.cache
        cache.begin_plan(self.step)
        pieces: list[Piece] = []
        for asker in list(self.running):
            if asker in self.running and not asker.is_sampling:
                self._extend(asker, rng, pieces, chunk)
        for asker in list(self.waiting):
            self._admit(asker, rng, pieces, chunk)
        if not pieces:
            return False
        self.check()
        moves = cache.take_moves()
        self.device.move(moves, self.step)
        poisoned = {rng.choice(pieces).owner} if poison else set()
        finite = self.device.run(self.step, pieces, poisoned)
        self.in_flight.append((self.step, pieces, finite))
        self.step += 1
        self.check()
        return True

    def commit(self, rng: Random) -> None:
        """Take in the result of the oldest plan."""
        if not self.in_flight:
            return
        step, pieces, finite = self.in_flight.popleft()
        self.device.committed_step = step
        self.cache.note_committed(step)
        for piece, is_finite in zip(pieces, finite, strict=True):
            asker = piece.asker
            if not is_finite:
                self.cache.withdraw(piece.owner)
            if asker.owner != piece.owner:
                continue
            asker.in_flight -= 1
            if not is_finite:
                self._end_not_finite(asker)
            elif piece.is_sampled:
                self._sampled(asker, piece, rng)
        self.check()

    def preempt(self, asker: Asker) -> None:
        self._release(asker, donates=not asker.is_sampling)
        asker.owner = self._new_owner()
        self.waiting.append(asker)

    def abort(self, asker: Asker) -> None:
        if asker in self.waiting:
            self.waiting.remove(asker)
            return
        self._release(asker, donates=not asker.is_sampling)
        asker.owner = self._new_owner()

    def any_checkpoint(self, rng: Random) -> Checkpoint | None:
        """One that a request with the tokens of somebody here would find."""
        everybody = self.running + self.waiting
        if not everybody:
            return None
        asker = rng.choice(everybody)
        return self.cache.find(asker.chain, len(asker.tokens) - 1).checkpoint

    def drain(self, rng: Random) -> None:
        """Let all that is in flight come in and abort the rest."""
        while self.in_flight:
            self.commit(rng)
        for asker in (*self.waiting, *self.running):
            self.abort(asker)
        for checkpoint in self.pinned:
            self.cache.unpin(checkpoint)
        self.pinned.clear()
        self.check()
        assert self.cache.num_free_pages == self.cache.num_pages, "pages are lost"
        assert self.cache.num_free_slots == self.cache.num_slots, "slots are lost"

    def check(self) -> None:
        self.cache.check_integrity(
            [asker.pages for asker in self.running],
            [asker.slot for asker in self.running if asker.slot is not None],
        )

    def run_to_end(self, rng: Random, *, chunk: int | None = None) -> None:
        """Plan and commit in turns until nobody is left."""
        for _ in range(10_000):
            if not self.running and not self.waiting:
                break
            self.plan(rng, chunk=chunk)
            if len(self.in_flight) == self.num_stages or rng.random() < 0.5:
                self.commit(rng)
        else:
            raise AssertionError("no progress")
        while self.in_flight:
            self.commit(rng)

    def _admit(self, asker: Asker, rng: Random, pieces: list[Piece], chunk: int | None) -> None:
        cache = self.cache
        if len(self.running) == self.max_running:
            return
        hit = cache.find(asker.chain, len(asker.tokens) - 1)
        num_pages = -(-(len(asker.tokens) + 1) // self.block_size)
        num_more = min(num_pages, cache.num_pages) - -(-hit.position // self.block_size)
        if hit.num_taken_pages + num_more > cache.num_free_pages:
            hit = hit._replace(position=0, num_taken_pages=0, checkpoint=None)
            if min(num_pages, cache.num_pages) > cache.num_free_pages:
                return
        if hit.checkpoint is not None:
            cache.pin(hit.checkpoint)
        if not cache.can_take_slot():
            if hit.checkpoint is None:
                return
            cache.unpin(hit.checkpoint)
            hit = hit._replace(position=0, num_taken_pages=0, checkpoint=None)
            if not cache.can_take_slot() or min(num_pages, cache.num_pages) > cache.num_free_pages:
                return
        asker.slot = cache.take_slot()
        num_free = cache.num_free_pages
        adopted = cache.adopt(
            hit, asker.slot, is_query=not asker.was_admitted, num_prompt_tokens=asker.num_prompt
        )
        # A cascade may free more than was needed.
        assert cache.num_free_pages >= num_free - hit.num_taken_pages
        if hit.checkpoint is not None:
            cache.unpin(hit.checkpoint)
            self.num_hits += 1
        asker.pages = adopted.page_ids
        asker.computed = hit.position
        asker.first_read = (adopted.read_slot, adopted.replay)
        asker.was_admitted = True
        self.waiting.remove(asker)
        self.running.append(asker)
        assert self._extend(asker, rng, pieces, chunk), "admitted for nothing"

    def _extend(self, asker: Asker, rng: Random, pieces: list[Piece], chunk: int | None) -> bool:
        cache, start = self.cache, asker.computed
        num_left = len(asker.tokens) - start
        drafts: Tokens = ()
        if num_left == 1 and start:
            num_pages = len(asker.pages) + cache.num_free_pages
            room = max(0, num_pages * self.block_size - len(asker.tokens))
            drafts = tuple(rng.choices(range(3), k=min(rng.randrange(3), room)))
            num_tokens = 1
        else:
            num_tokens = min(chunk, num_left) if chunk else rng.randint(1, num_left)
        certain = start + num_tokens
        end = certain + len(drafts)
        num_missing = max(0, -(-end // self.block_size) - len(asker.pages))
        if num_missing > cache.num_free_pages:
            return False
        asker.pages += cache.take_pages(num_missing)
        cache.publish(asker.chain, asker.pages, certain, asker.owner)
        is_window = num_tokens == 1
        read_slot, replay = asker.first_read or (asker.slot, asker.replay)
        first = start - replay if is_window else start
        saves = []
        for position in {rng.randint(first + 1, certain) for _ in range(rng.randrange(3))}:
            claim = rng.choice(list(Claim))
            slot = cache.save(
                asker.chain,
                asker.pages,
                position,
                claim,
                asker.owner,
                num_reserved_slots=rng.randrange(2),
            )
            if slot is not None:
                saves.append((position, slot))
        assert asker.slot is not None
        is_sampled = certain == len(asker.tokens)
        pieces.append(
            Piece(
                asker,
                asker.owner,
                start,
                (*asker.tokens[:certain], *drafts),
                len(drafts),
                read_slot if start else ZERO_SLOT,
                replay,
                asker.slot,
                tuple(saves),
                tuple(asker.pages),
                is_sampled,
            )
        )
        asker.first_read = None
        asker.computed, asker.replay = end, 0
        asker.in_flight += 1
        asker.is_sampling = is_sampled
        return True

    def _sampled(self, asker: Asker, piece: Piece, rng: Random) -> None:
        certain = len(piece.tokens) - piece.num_drafts
        num_accepted = rng.randint(0, piece.num_drafts)
        asker.tokens += [*piece.tokens[certain : certain + num_accepted], rng.randrange(3)]
        asker.computed, asker.replay = certain + num_accepted, num_accepted
        asker.is_sampling = False
        if len(asker.tokens) >= asker.end:
            if len(asker.tokens) > asker.end:
                # A row is cut where the request ends.
                del asker.tokens[asker.end :]
            self._release(asker, donates=True)

    def _end_not_finite(self, asker: Asker) -> None:
        self.cache.scrub(asker.pages, asker.slot)
        self._release(asker, donates=False)
        asker.owner = self._new_owner()

    def _release(self, asker: Asker, *, donates: bool) -> None:
        cache = self.cache
        assert asker.slot is not None
        if donates:
            position = min(asker.computed, len(asker.tokens))
            replay = asker.replay - (asker.computed - position)
            cache.publish(asker.chain, asker.pages, position, asker.owner)
            assert replay >= 0 and asker.first_read is None
            cache.donate(
                asker.chain,
                asker.pages,
                position,
                asker.slot,
                replay,
                asker.owner,
                is_ready=not asker.in_flight,
            )
        else:
            cache.release_slot(asker.slot)
        num_free, num_exclusive = cache.num_free_pages, cache.num_exclusive_pages(asker.pages)
        cache.release_pages(asker.pages)
        assert cache.num_free_pages == num_free + num_exclusive
        asker.pages, asker.slot, asker.replay, asker.computed = [], None, 0, 0
        asker.is_sampling = False
        asker.in_flight = 0
        self.running.remove(asker)

    def _new_owner(self) -> int:
        self.num_owners += 1
        return self.num_owners
