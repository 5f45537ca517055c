"""Whatever happens in whatever order, everybody reads its own prefix only, and nothing leaks."""

from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from stagecoach.cache.prefix_cache import PrefixCache
from tests.cpu.cache.simulation import Simulation

BLOCK_SIZE = 4
SEEDS = st.integers(0, 2**32 - 1)


class Traffic(RuleBasedStateMachine):
    """Requests that share prefixes, over pools that are too small for them."""

    @initialize(
        num_pages=st.integers(3, 24),
        num_slots=st.integers(2, 7),
        num_host=st.sampled_from([(0, 0), (1, 1), (2, 1), (6, 3)]),
        max_running=st.integers(1, 4),
        num_stages=st.integers(1, 3),
        debug_poison=st.booleans(),
    )
    def start(
        self,
        num_pages: int,
        num_slots: int,
        num_host: tuple[int, int],
        max_running: int,
        num_stages: int,
        debug_poison: bool,
    ) -> None:
        cache = PrefixCache(
            num_pages=num_pages,
            num_slots=num_slots,
            block_size=BLOCK_SIZE,
            num_host_pages=num_host[0],
            num_host_slots=num_host[1],
            debug_poison=debug_poison,
        )
        self.simulation = Simulation(
            cache, BLOCK_SIZE, max_running=max_running, num_stages=num_stages
        )
        self.history: list[list[int]] = [[0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1]]

    @rule(seed=SEEDS, num_outputs=st.integers(1, 8), salt=st.sampled_from([None, None, "a"]))
    def arrive(self, seed: int, num_outputs: int, salt: str | None) -> None:
        """A turn of a conversation: a prefix of what was there, and some tokens behind it."""
        rng = Random(seed)
        old = rng.choice(self.history)
        prompt = old[: rng.randint(0, len(old))] + rng.choices(range(3), k=rng.randint(1, 9))
        prompt = prompt[: self.simulation.cache.num_pages * BLOCK_SIZE - 1]
        asker = self.simulation.add(prompt, num_outputs, salt)
        self.history.append(asker.tokens)

    @rule(seed=SEEDS)
    def plan(self, seed: int) -> None:
        self.simulation.plan(Random(seed))

    @rule(seed=SEEDS)
    def plan_and_commit(self, seed: int) -> None:
        rng = Random(seed)
        self.simulation.plan(rng)
        self.simulation.commit(rng)

    @rule(seed=SEEDS)
    def plan_what_is_not_finite(self, seed: int) -> None:
        self.simulation.plan(Random(seed), poison=True)

    @rule(seed=SEEDS)
    def commit(self, seed: int) -> None:
        self.simulation.commit(Random(seed))

    @rule(seed=SEEDS)
    def abort(self, seed: int) -> None:
        everybody = self.simulation.running + self.simulation.waiting
        if everybody:
            self.simulation.abort(Random(seed).choice(everybody))

    @rule(seed=SEEDS)
    def preempt(self, seed: int) -> None:
        victims = [asker for asker in self.simulation.running if not asker.is_sampling]
        if victims:
            self.simulation.preempt(Random(seed).choice(victims))

    @rule()
    def reset(self) -> None:
        self.simulation.cache.reset()
        self.simulation.check()
        stats = self.simulation.cache.stats()
        assert stats.num_cached_pages == stats.num_checkpoints == stats.num_host_pages == 0

    @rule(seed=SEEDS)
    def pin_or_unpin(self, seed: int) -> None:
        simulation, rng = self.simulation, Random(seed)
        if simulation.pinned:
            simulation.cache.unpin(simulation.pinned.pop())
        else:
            checkpoint = simulation.any_checkpoint(rng)
            if checkpoint is not None:
                simulation.cache.pin(checkpoint)
                simulation.pinned.append(checkpoint)
        simulation.check()

    @rule(seed=SEEDS)
    def quarantine(self, seed: int) -> None:
        checkpoint = self.simulation.any_checkpoint(Random(seed))
        if checkpoint is not None:
            self.simulation.cache.quarantine(checkpoint)
            assert not checkpoint.is_indexed
            self.simulation.check()

    def teardown(self) -> None:
        if hasattr(self, "simulation"):
            self.simulation.drain(Random(0))


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(
    max_examples=80,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


@pytest.mark.parametrize(
    ("num_pages", "num_slots"), [(3, 2), (4, 3), (30, 8)], ids=["tiny", "small", "ample"]
)
@pytest.mark.parametrize("num_host", [(0, 0), (1, 1), (40, 20)], ids=["no host", "tiny", "ample"])
def test_everybody_finishes_and_nothing_leaks(
    num_pages: int, num_slots: int, num_host: tuple[int, int]
) -> None:
    """A pool of two pages and one slot serves conversations one by one."""
    rng = Random(num_pages)
    cache = PrefixCache(
        num_pages=num_pages,
        num_slots=num_slots,
        block_size=BLOCK_SIZE,
        num_host_pages=num_host[0],
        num_host_slots=num_host[1],
    )
    # More than one at a time would need preemption to finish.
    simulation = Simulation(cache, BLOCK_SIZE, max_running=1 if num_pages < 10 else 3)
    for _ in range(12):
        prompt = rng.choices(range(2), k=rng.randint(1, 6))
        first = simulation.add(prompt, 2)
        simulation.run_to_end(rng)
        room = cache.num_pages * BLOCK_SIZE - 1
        simulation.add([*first.tokens, 0][:room], 2)
        simulation.add(prompt, 1)
        simulation.run_to_end(rng)
    assert simulation.num_hits or num_slots == 2
    simulation.drain(rng)
