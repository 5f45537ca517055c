"""What moves between the tiers, and what must not be read again."""

from stagecoach.cache.memory_moves import Transfer
from stagecoach.cache.prefix_cache import Claim, Hit
from tests.cpu.cache.cache_bench import PROMPT, Bench, chain, found

# -- the host tier


def test_what_is_evicted_moves_to_the_host_and_comes_back() -> None:
    bench = Bench(num_pages=4, num_slots=3, host=(8, 4))
    bench.serve(PROMPT, [10])
    bench.begin()
    bench.cache.take_pages(3)
    slots = [bench.cache.take_slot(), bench.cache.take_slot()]
    moves = bench.end()
    assert len(moves.store_pages) == 3 and len(moves.store_slots) == 1
    bench.cache.release_pages([1, 2, 3])
    for slot in slots:
        bench.cache.release_slot(slot)
    stats = bench.cache.stats()
    assert (stats.num_host_pages, stats.num_host_checkpoints, stats.num_cached_pages) == (3, 1, 0)
    hit = bench.find(PROMPT)
    assert (hit.position, hit.num_taken_pages) == (10, 3)
    adopted, slot, moves = bench.adopt(hit)
    assert adopted.read_slot == slot and moves.load_slots == (Transfer(slot, 0),)
    assert [item.device for item in moves.load_pages] == adopted.page_ids
    assert not moves.copies and not moves.store_pages
    bench.release(adopted, slot)
    assert bench.evictions() == {}
    # Full pages came back; the tail and the state were copied.
    stats = bench.cache.stats()
    assert (stats.num_host_pages, stats.num_host_checkpoints, stats.num_cached_pages) == (1, 1, 2)
    assert (stats.num_stored, stats.num_loaded) == (4, 4)


def test_a_host_number_is_not_stored_to_in_the_plan_that_loads_it() -> None:
    """Loads come after stores, so the number that is loaded must stay as it is until then."""
    bench = Bench(num_pages=5, num_slots=4, host=(1, 1))
    bench.serve(PROMPT[:9], [8])
    bench.serve(range(12), [7])
    assert bench.cache.stats().num_host_pages == 1
    hit = bench.find(PROMPT[:9])
    slot = bench.cache.take_slot()
    adopted = bench.cache.adopt(hit, slot, is_query=True, num_prompt_tokens=9)
    # Evicts, and finds no room on the host.
    more = bench.cache.take_pages(1)
    moves = bench.end()
    assert [item.host for item in moves.load_pages] == [0] and not moves.store_pages
    bench.held.append(([*adopted.page_ids, *more], slot))
    bench.check()


def test_a_host_number_is_stored_to_once_a_plan() -> None:
    bench = Bench(num_pages=4, num_slots=3, host=(1, 1))
    bench.serve(PROMPT, [8, 10])
    bench.begin()
    bench.cache.take_pages(3)
    bench.cache.take_slot()
    bench.cache.take_slot()
    moves = bench.end()
    assert len(moves.store_pages) == 1 and len(moves.store_slots) <= 1


def test_what_a_plan_stores_is_found_from_the_next_plan_on() -> None:
    bench = Bench(num_pages=4, num_slots=4, host=(8, 4))
    bench.serve(PROMPT, [8, 10])
    bench.begin()
    pages = bench.cache.take_pages(3)
    assert bench.cache.find(chain(PROMPT), 10) == Hit(0, 0, 0, None)
    bench.end()
    bench.cache.release_pages(pages)
    assert bench.find(PROMPT).position == 10


def test_a_tail_of_a_page_that_the_same_plan_loads_is_loaded_too() -> None:
    """A copy would read a page that the plan fills."""
    bench = Bench(num_pages=6, num_slots=6, host=(8, 1))
    tokens = [*PROMPT, 111, 112]
    bench.serve(tokens[:12], [10, 12])
    bench.begin()
    pages = bench.cache.take_pages(5)
    bench.end()
    bench.cache.release_pages(pages)
    hit = bench.find(tokens)
    assert hit.position == 12
    slots = [bench.cache.take_slot(), bench.cache.take_slot()]
    whole = bench.cache.adopt(hit, slots[0], is_query=True, num_prompt_tokens=13)
    hit = bench.cache.find(chain(tokens), 11)
    assert hit.position == 10
    tail = bench.cache.adopt(hit, slots[1], is_query=True, num_prompt_tokens=13)
    moves = bench.end()
    assert not moves.copies and len(moves.load_pages) == 4
    assert whole.page_ids[:2] == tail.page_ids[:2] and whole.page_ids[2] != tail.page_ids[2]
    bench.held.extend([(whole.page_ids, slots[0]), (tail.page_ids, slots[1])])
    bench.check()


def test_the_host_tier_evicts_too() -> None:
    bench = Bench(num_pages=4, num_slots=2, host=(4, 1))
    for start in range(0, 60, 10):
        bench.serve(range(start, start + 11), is_donated=True)
    stats = bench.cache.stats()
    assert (stats.num_host_pages, stats.num_host_checkpoints) == (4, 1)
    assert bench.evictions()["host_room"] > 0


# -- what must not be read again


def test_what_is_not_finite_goes_with_all_that_was_built_on_it() -> None:
    bench = Bench()
    cache = bench.cache
    bench.serve(PROMPT, [4])
    cache.begin_plan(bench.step)
    first = chain(PROMPT)
    hit = cache.find(first, 10)
    slot = cache.take_slot()
    adopted = cache.adopt(hit, slot, is_query=True, num_prompt_tokens=11)
    pages = [*adopted.page_ids, *cache.take_pages(3)]
    longer = chain([*PROMPT[:4], *range(12)])
    longer.num_published = 1
    cache.publish(longer, pages, 16, owner=77)
    saved = cache.save(longer, pages, 13, Claim.ANY, owner=77)
    bench.end()
    cache.withdraw(77)
    cache.scrub(pages, slot)
    cache.release_slot(slot)
    cache.release_pages(pages)
    cache.check_integrity([], [])
    assert bench.evictions() == {"not_finite": 4}
    # What others had computed is there, and is not cleared.
    assert bench.find(PROMPT).position == 4
    moves = bench.end()
    assert moves.scrub_pages == tuple(sorted(pages[1:]))
    assert moves.scrub_slots == tuple(sorted([slot, saved]))  # type: ignore[type-var]


def test_a_quarantined_prefix_is_never_found_again_nor_published_by_its_holders() -> None:
    bench = Bench()
    bench.serve(PROMPT, [8, 10])
    bench.serve([*PROMPT[:4], 1, 1, 1, 1], [6])
    names = chain([*PROMPT, 1, 2, 3, 4, 5])
    bench.begin()
    hit = bench.cache.find(names, 15)
    adopted, slot, _ = bench.adopt(hit)
    bench.cache.quarantine(found(hit))
    assert bench.find(PROMPT).num_found_tokens == 0
    assert bench.find([*PROMPT[:4], 1, 1, 1, 1]).num_found_tokens == 0
    bench.cache.publish(names, adopted.page_ids, 11, owner=5)
    bench.cache.donate(names, adopted.page_ids, 10, slot, 0, owner=5)
    assert bench.find(PROMPT).num_found_tokens == 0
    bench.cache.release_pages(adopted.page_ids)
    bench.held.clear()
    bench.check()
    # Computed anew it is cached as ever.
    bench.serve(PROMPT, [8])
    assert bench.find(PROMPT).position == 8


def test_a_reset_forgets_everything_and_takes_nothing_from_holders() -> None:
    bench = Bench()
    bench.serve(PROMPT, [8, 10])
    hit = bench.find(PROMPT)
    adopted, slot, _ = bench.adopt(hit)
    bench.cache.pin(found(hit))
    bench.cache.reset()
    bench.cache.check_integrity([adopted.page_ids], [slot])
    assert bench.find(PROMPT) == Hit(0, 0, 0, None)
    assert bench.cache.num_free_slots == bench.cache.num_slots - 2
    bench.cache.unpin(found(hit))
    bench.release(adopted, slot)


def test_debug_mode_clears_all_that_becomes_vacant_and_nothing_that_is_cached() -> None:
    bench = Bench(debug_poison=True)
    bench.serve(PROMPT, [8])
    bench.begin()
    moves = bench.end()
    assert moves.scrub_pages == (3,)  # the page of the tail, which no checkpoint needs
    assert moves.scrub_slots == (1,)
