"""A prefix cache with requests that compute a whole prompt in one plan each."""

from collections.abc import Sequence

from stagecoach.cache.memory_moves import MemoryMoves
from stagecoach.cache.prefix_cache import Adopted, Checkpoint, Claim, Hit, PrefixCache
from stagecoach.cache.prefix_hash import BlockChain, salted_root

BLOCK_SIZE = 4
PROMPT = tuple(range(100, 111))  # two full blocks, and three tokens


def chain(tokens: Sequence[int], salt: str | None = None) -> BlockChain:
    return BlockChain(
        salted_root(b"root", salt), BLOCK_SIZE, lambda start, end: tuple(tokens[start:end])
    )


class Bench:
    """A cache, and requests that compute whole prompts one plan each."""

    def __init__(
        self,
        num_pages: int = 17,
        num_slots: int = 6,
        host: tuple[int, int] = (0, 0),
        *,
        debug_poison: bool = False,
    ) -> None:
        self.cache = PrefixCache(
            num_pages=num_pages,
            num_slots=num_slots,
            block_size=BLOCK_SIZE,
            num_host_pages=host[0],
            num_host_slots=host[1],
            debug_poison=debug_poison,
        )
        self.step = 0
        self.num_owners = 0
        self.held: list[tuple[Sequence[int], int]] = []  # pages and slot of running requests

    def begin(self) -> None:
        self.cache.begin_plan(self.step)

    def end(self, *, is_committed: bool = True) -> MemoryMoves:
        moves = self.cache.take_moves()
        if is_committed:
            self.cache.note_committed(self.step)
        self.step += 1
        return moves

    def find(self, tokens: Sequence[int], limit: int | None = None, salt: str | None = None) -> Hit:
        self.begin()
        return self.cache.find(chain(tokens, salt), len(tokens) - 1 if limit is None else limit)

    def serve(
        self,
        tokens: Sequence[int],
        saves: Sequence[int] = (),
        *,
        salt: str | None = None,
        claim: Claim = Claim.PROBATION,
        is_donated: bool = False,
    ) -> list[int | None]:
        """Compute a prompt from scratch in one plan and end; the slots of its saves."""
        cache, names = self.cache, chain(tokens, salt)
        self.num_owners += 1
        self.begin()
        slot = cache.take_slot()
        pages = cache.take_pages(-(-len(tokens) // BLOCK_SIZE))
        cache.publish(names, pages, len(tokens), self.num_owners)
        slots = [cache.save(names, pages, at, claim, self.num_owners) for at in saves]
        self.held.append((pages, slot))
        self.check()
        self.end()
        if is_donated:
            cache.donate(names, pages, len(tokens), slot, 0, self.num_owners)
        else:
            cache.release_slot(slot)
        cache.release_pages(pages)
        self.held.remove((pages, slot))
        self.check()
        return slots

    def adopt(self, hit: Hit) -> tuple[Adopted, int, MemoryMoves]:
        """In the plan that is being made, which ends with it."""
        slot = self.cache.take_slot()
        adopted = self.cache.adopt(hit, slot, is_query=True, num_prompt_tokens=20)
        self.held.append((adopted.page_ids, slot))
        self.check()
        moves = self.end()
        self.check()
        return adopted, slot, moves

    def release(self, adopted: Adopted, slot: int) -> None:
        self.held.remove((adopted.page_ids, slot))
        self.cache.release_pages(adopted.page_ids)
        self.cache.release_slot(slot)
        self.check()
        if not self.held:
            assert self.cache.num_free_pages == self.cache.num_pages
            assert self.cache.num_free_slots == self.cache.num_slots

    def check(self) -> None:
        self.cache.check_integrity(
            [pages for pages, _ in self.held], [slot for _, slot in self.held]
        )

    def evictions(self) -> dict[str, int]:
        return {cause: n for cause, n in self.cache.stats().evictions.items() if n}


def found(hit: Hit) -> Checkpoint:
    assert hit.checkpoint is not None, f"nothing found: {hit}"
    return hit.checkpoint
