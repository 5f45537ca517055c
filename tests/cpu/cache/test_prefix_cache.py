"""What is found, shared, filed, evicted and counted, case by case."""

import pytest

from stagecoach.cache.memory_moves import PageCopy
from stagecoach.cache.prefix_cache import Adopted, Claim, Hit, PrefixCache
from tests.cpu.cache.cache_bench import BLOCK_SIZE, PROMPT, Bench, chain, found

# -- what is found


@pytest.mark.parametrize(
    ("limit", "position"), [(0, 0), (1, 0), (2, 2), (7, 2), (8, 8), (9, 8), (10, 10), (11, 10)]
)
def test_a_hit_is_the_deepest_checkpoint_within_the_limit(limit: int, position: int) -> None:
    """A hit ends at a checkpoint (I59), and the caller's limit keeps a token to compute."""
    bench = Bench()
    bench.serve(PROMPT, [2, 8, 10])
    hit = bench.find(PROMPT, limit)
    assert hit.position == position
    assert hit.num_found_tokens == max(position, limit // BLOCK_SIZE * BLOCK_SIZE)


def test_pages_without_a_checkpoint_are_no_hit() -> None:
    """One count for two caches would claim a state that is not there."""
    bench = Bench()
    bench.serve(PROMPT)
    hit = bench.find(PROMPT)
    assert (hit.position, hit.num_found_tokens, hit.checkpoint) == (0, 8, None)
    assert bench.adopt(hit)[0] == Adopted([], 0, 0)


def test_short_prompts_are_found_too() -> None:
    """A prompt of less than one page has a checkpoint under the root."""
    bench = Bench()
    bench.serve([7, 8, 9], [1, 2])
    assert bench.find([7, 8, 1, 2]).position == 2
    assert bench.find([7, 1, 1, 2]).position == 1
    assert bench.find([8, 7, 1, 2]).position == 0


def test_tails_are_compared_token_by_token() -> None:
    bench = Bench()
    bench.serve([*PROMPT[:8], 1, 2, 3], [10])
    bench.serve([*PROMPT[:8], 1, 5, 3], [10])
    for third in (2, 5):
        hit = bench.find([*PROMPT[:8], 1, third, 9])
        assert (hit.position, found(hit).tail) == (10, (1, third))
    assert bench.find([*PROMPT[:8], 1, 4, 9]).position == 0


def test_salts_do_not_see_each_other() -> None:
    bench = Bench()
    bench.serve(PROMPT, [10], salt="a")
    assert bench.find(PROMPT).num_found_tokens == 0
    assert bench.find(PROMPT, salt="b").num_found_tokens == 0
    assert bench.find(PROMPT, salt="a").position == 10


def test_a_save_may_be_read_by_the_next_plan_and_not_by_its_own() -> None:
    """Filed when the plan is made (I82); nobody reads a slot that the same plan writes."""
    bench = Bench()
    cache, names = bench.cache, chain(PROMPT)
    bench.begin()
    slot, pages = cache.take_slot(), cache.take_pages(3)
    cache.publish(names, pages, 11, owner=1)
    cache.save(names, pages, 10, Claim.ANY, owner=1)
    assert cache.find(chain(PROMPT), 10).position == 0
    bench.end(is_committed=False)
    hit = bench.find(PROMPT)
    assert hit.position == 10 and hit.num_taken_pages == 1  # the writer holds the rest
    cache.release_slot(slot)
    cache.release_pages(pages)


def test_nothing_is_kept_where_caching_is_off() -> None:
    cache = PrefixCache(num_pages=9, num_slots=3, block_size=BLOCK_SIZE, is_enabled=False)
    names = chain(PROMPT)
    cache.begin_plan(0)
    slot, pages = cache.take_slot(), cache.take_pages(3)
    cache.publish(names, pages, 11, owner=1)
    assert cache.save(names, pages, 10, Claim.ANY, owner=1) is None
    cache.take_moves()
    cache.donate(names, pages, 11, slot, 0, owner=1)
    cache.release_pages(pages)
    cache.begin_plan(1)
    assert cache.find(names, 10) == Hit(0, 0, 0, None)
    assert cache.stats().num_cached_pages == cache.stats().num_unfiled == 0
    cache.check_integrity([], [])


# -- what a hit brings


def test_full_pages_are_shared_and_the_partly_filled_one_is_copied() -> None:
    bench = Bench()
    [slot] = bench.serve(PROMPT, [10])
    free = bench.cache.num_free_pages
    hit = bench.find(PROMPT)
    assert hit.num_taken_pages == 4  # two shared, one fresh, and the source while the plan is made
    adopted, own_slot, moves = bench.adopt(hit)
    assert (adopted.read_slot, adopted.replay) == (slot, 0)
    assert moves.copies == (PageCopy(found(hit).tail_page.page_id, adopted.page_ids[2], 2),)  # type: ignore[union-attr, arg-type]
    assert bench.cache.num_free_pages == free - 3
    bench.release(adopted, own_slot)


def test_a_donated_slot_keeps_its_record_and_costs_nothing() -> None:
    """Multi-turn conversations go on from the end of the answer."""
    bench = Bench()
    cache, names = bench.cache, chain(PROMPT)
    bench.begin()
    slot, pages = cache.take_slot(), cache.take_pages(3)
    bench.end()
    cache.publish(names, pages, 10, owner=1)
    cache.donate(names, pages, 10, slot, 2, owner=1)
    cache.release_pages(pages)
    adopted, own_slot, moves = bench.adopt(bench.find([*PROMPT[:10], 1, 2, 3]))
    assert (adopted.read_slot, adopted.replay) == (slot, 2)
    assert own_slot != slot and not moves.store_slots and len(moves.copies) == 1
    bench.release(adopted, own_slot)


def test_equal_pages_of_a_running_request_take_the_place_of_those_that_nobody_holds() -> None:
    bench = Bench(num_pages=8)
    bench.serve(PROMPT, [2])
    cache, names = bench.cache, chain(PROMPT)
    adopted, slot, _ = bench.adopt(bench.find(PROMPT))
    bench.begin()
    pages = [*adopted.page_ids, *cache.take_pages(2)]
    cache.publish(names, pages, 11, owner=9)
    bench.end()
    cache.check_integrity([pages], [slot])
    assert cache.stats().num_cached_pages == 2
    assert cache.num_free_pages == cache.num_pages - 3
    cache.release_pages(pages)
    cache.release_slot(slot)
    assert bench.find(PROMPT).position == 2


def test_a_page_released_in_the_plan_that_published_it_takes_nobodys_place() -> None:
    bench = Bench()
    bench.serve(PROMPT, [8])
    bench.begin()
    slot, pages = bench.cache.take_slot(), bench.cache.take_pages(3)
    bench.cache.publish(chain(PROMPT), pages, 11, owner=9)
    bench.cache.release_pages(pages)
    bench.cache.release_slot(slot)
    bench.end()
    bench.check()
    adopted, slot, _ = bench.adopt(bench.find(PROMPT))
    assert adopted.page_ids == [1, 2] and not {1, 2} & set(pages)
    bench.release(adopted, slot)


def test_what_is_filed_already_is_not_filed_again() -> None:
    bench = Bench()
    assert bench.serve(PROMPT, [8, 10, 8]) == [2, 3, None]
    assert bench.serve(PROMPT, [8, 10], is_donated=True) == [None, None]
    assert bench.serve(PROMPT, is_donated=True) == []
    stats = bench.cache.stats()
    assert (stats.num_filed, stats.num_unfiled, stats.num_checkpoints) == (3, 0, 3)


def test_a_request_may_take_over_the_only_slot_that_its_hit_is_in() -> None:
    bench = Bench(num_slots=2)
    assert bench.serve(PROMPT, [10]) == [None]
    bench.serve(PROMPT[:10], is_donated=True)
    hit = bench.find(PROMPT)
    adopted = bench.cache.adopt(hit, None, is_query=True, num_prompt_tokens=11)
    assert adopted.read_slot == 1 and not found(hit).is_indexed
    bench.end()
    bench.held.append((adopted.page_ids, 1))
    bench.check()
    assert bench.find(PROMPT).position == 0
    bench.release(adopted, 1)


# -- what is evicted


def test_claims_take_vacant_slots_then_probation_then_any() -> None:
    bench = Bench(num_slots=4)
    bench.serve([1, 2, 3], [1, 2])
    bench.release(*bench.adopt(bench.find([1, 2, 3]))[:2])
    # Position 2 was hit and is protected; position 1 is in probation; one slot is vacant,
    # which the request itself takes while it runs.
    assert bench.serve([5, 6, 7], [1], claim=Claim.VACANT) == [None]
    assert len([slot for slot in bench.serve([5, 6, 7], [1]) if slot]) == 1
    assert bench.find([1, 2, 3]).position == 2
    assert len([slot for slot in bench.serve([5, 6, 8], [2], claim=Claim.ANY) if slot]) == 1
    assert bench.find([1, 2, 3]).position == 2
    assert bench.evictions() == {"room": 2}
    assert bench.cache.stats().num_unfiled == 1


def test_one_off_prompts_do_not_flush_what_was_hit() -> None:
    """Snapshots of every prompt must not drive out the shared prefix."""
    bench = Bench(num_pages=12, num_slots=4)
    bench.serve(PROMPT, [8])
    bench.release(*bench.adopt(bench.find(PROMPT))[:2])
    for start in range(0, 500, 10):
        bench.serve(range(start + 1000, start + 1008), [5, 7])
    assert bench.find(PROMPT).position == 8
    assert bench.evictions()["room"] > 50


def test_the_tail_of_a_chain_goes_before_its_head() -> None:
    bench = Bench(num_pages=6)
    bench.serve(range(16), [3, 7, 11, 15])
    bench.begin()
    for num_left in (3, 2, 1):
        assert bench.cache.take_pages(2 if num_left == 3 else 1)
        assert bench.find(range(17)).position == 4 * num_left - 1
    assert bench.evictions() == {"room": 3, "page": 3}


def test_a_checkpoint_goes_with_a_page_that_it_needs() -> None:
    """Evicting a page removes the checkpoint filed behind it (I73)."""
    bench = Bench(num_pages=4)
    bench.serve(PROMPT, [8, 10])
    bench.begin()
    bench.cache.take_pages(1)
    # The tail of position 10 went first.
    assert bench.find(PROMPT).position == 8
    bench.cache.take_pages(1)
    assert bench.find(PROMPT) == Hit(0, 4, 0, None)
    assert bench.evictions() == {"room": 2, "page": 2}


def test_what_a_plan_adopts_is_not_evicted_in_the_same_plan() -> None:
    """Nobody's memory is freed under its reader."""
    bench = Bench(num_pages=6, num_slots=3)
    bench.serve(PROMPT, [10])
    cache = bench.cache
    hit = bench.find(PROMPT)
    slot = cache.take_slot()
    adopted = cache.adopt(hit, slot, is_query=True, num_prompt_tokens=11)
    assert cache.num_free_pages == 1 and not cache.can_take_slot()
    with pytest.raises(AssertionError, match="no page is free"):
        cache.take_pages(2)
    bench.end()
    assert cache.can_take_slot()
    cache.release_slot(slot)
    cache.release_pages(adopted.page_ids)


def test_a_checkpoint_is_not_evicted_before_its_step_is_committed() -> None:
    bench = Bench(num_slots=3)
    cache, names = bench.cache, chain(PROMPT)
    bench.begin()
    slot, pages = cache.take_slot(), cache.take_pages(3)
    cache.publish(names, pages, 11, owner=1)
    assert cache.save(names, pages, 8, Claim.VACANT, owner=1) is not None
    bench.end(is_committed=False)
    assert not cache.can_take_slot()  # back-pressure, not an assertion
    cache.note_committed(0)
    assert cache.can_take_slot()
    cache.release_slot(slot)
    cache.release_pages(pages)


def test_a_slot_that_a_plan_saves_to_is_not_handed_out_again_by_it() -> None:
    """Not even where the checkpoint is lost in the same plan, with a page of somebody else."""
    bench = Bench(num_pages=8, num_slots=3)
    bench.serve(PROMPT)
    cache, names = bench.cache, chain(PROMPT)
    bench.begin()
    slot, pages = cache.take_slot(), cache.take_pages(3)
    cache.publish(names, pages, 11, owner=9)
    assert cache.save(names, pages, 8, Claim.ANY, owner=9) is not None
    pages += cache.take_pages(4)
    assert bench.evictions()["page"] > 0
    assert not cache.can_take_slot()
    bench.end()
    assert cache.can_take_slot()
    bench.held.append((pages, slot))
    bench.check()


def test_reserved_slots_are_left_free() -> None:
    bench = Bench(num_slots=4)
    cache, names = bench.cache, chain(PROMPT)
    bench.begin()
    slot, pages = cache.take_slot(), cache.take_pages(3)
    cache.publish(names, pages, 11, owner=1)
    assert cache.save(names, pages, 8, Claim.ANY, 1, num_reserved_slots=2) is None
    assert cache.save(names, pages, 8, Claim.ANY, 1, num_reserved_slots=1) is not None
    assert cache.num_free_slots == 1
    cache.release_slot(slot)
    cache.release_pages(pages)


def test_shared_pages_become_free_with_their_last_holder() -> None:
    bench = Bench()
    bench.serve(PROMPT, [8])
    first, slot, _ = bench.adopt(bench.find(PROMPT))
    second, other_slot, _ = bench.adopt(bench.find(PROMPT))
    assert first.page_ids == second.page_ids
    assert bench.cache.num_exclusive_pages(first.page_ids) == 0
    assert bench.cache.num_exclusive_pages([*first.page_ids, *second.page_ids]) == 2
    bench.release(first, slot)
    assert bench.cache.num_exclusive_pages(second.page_ids) == 2
    bench.release(second, other_slot)


# -- counts


def test_the_counts_of_a_short_history() -> None:
    """A cache that saves nothing says so."""
    bench = Bench()
    bench.release(*bench.adopt(bench.find(PROMPT))[:2])
    bench.serve(PROMPT, [2])
    adopted, slot, _ = bench.adopt(bench.find(PROMPT))
    stats = bench.cache.stats()
    assert (stats.num_queries, stats.num_hits) == (2, 1)
    assert (stats.num_query_tokens, stats.num_hit_tokens) == (40, 2)
    assert stats.num_lost_tokens == 6  # pages of eight tokens, the state of two
    assert stats.num_filed == 1 and stats.num_resumed_tokens == 0
    bench.begin()
    other_slot = bench.cache.take_slot()
    again = bench.cache.adopt(bench.find(PROMPT), other_slot, is_query=False, num_prompt_tokens=20)
    stats = bench.cache.stats()
    assert (stats.num_queries, stats.num_resumed_tokens) == (2, 2)
    bench.cache.release_pages(again.page_ids)
    bench.cache.release_pages(adopted.page_ids)
    assert slot != other_slot


# -- the proof itself


def test_check_integrity_sees_a_page_a_slot_and_a_hold_that_are_lost() -> None:
    bench = Bench()
    bench.serve(PROMPT, [10])
    adopted, slot, _ = bench.adopt(bench.find(PROMPT))
    cache = bench.cache
    cache.check_integrity([adopted.page_ids], [slot])
    for held_pages, held_slots, message in (
        ([], [slot], "holders of page"),
        ([adopted.page_ids, adopted.page_ids], [slot], "holders of page"),
        ([adopted.page_ids], [], "lost"),
        ([adopted.page_ids], [slot, adopted.read_slot], "owned twice"),
    ):
        with pytest.raises(AssertionError, match=message):
            cache.check_integrity(held_pages, held_slots)
