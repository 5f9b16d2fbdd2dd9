"""Anything in any order: every plan is checked against a simulated KV cache, and in the end everything finishes.

`tests.scheduling.Simulation` holds the invariants: blocks, references, pins and promises add up; the budget is kept; decodes come
first, and only what a step may take beside realtime holds them up; no shared block is written; at most one partial block a
sequence; and each query attends to exactly its own request's tokens, through prefix hits, forks, preemption, swaps and failed steps.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from producer.keys import Tier
from tests.scheduling import CHEAP_SWAP, Simulation, make_request
from worker.engine.config import EngineConfig
from worker.engine.prefix_index import PrefixIndex
from worker.engine.request import Request

TIERS: list[Tier] = ["realtime", "batch"]
NUM_STEMS = 3
MAX_LIVE = 24
ALLOWANCE = 2  # what may wait beside a full batch of these sizes


class World:
    """A simulation of random make, and requests whose prompts share beginnings."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        batch_size, block_size = rng.choice([1, 2, 3, 6]), rng.choice([1, 2, 4])
        config = EngineConfig(
            max_batch_size=batch_size,
            max_batch_tokens=batch_size + rng.choice([0, 1, 4, 16]),
            block_size=block_size,
            enable_prefix_caching=rng.random() < 0.7,
            realtime_reserved=rng.choice([0.0, 0.3, 0.5, 1.0]),
            batch_floor=rng.choice([0.0, 0.1, 0.5]),
            batch_overcommit=rng.choice([1.0, 1.5, 3.0]),
            realtime_step_ms=rng.choice([1.0, 5.0, 20.0]),
        )
        num_blocks = rng.choice([4, 8, 16, 40])
        self.capacity = num_blocks * block_size
        self.stems = [[rng.randrange(2) for _ in range(self.capacity)] for _ in range(NUM_STEMS)]
        self.sim = Simulation(
            config,
            num_blocks,
            num_cpu_blocks=rng.choice([0, 0, 4, 16]),
            sample=lambda _: None if rng.random() < 0.05 else rng.randrange(2),
            costs=rng.choice([None, CHEAP_SWAP]),
            index=self._colliding_index(block_size) if config.enable_prefix_caching and rng.random() < 0.2 else None,
            step_s=rng.choice([None, lambda num_tokens: 1e-3 * rng.uniform(1.0, 1.0 + num_tokens)]),
        )

    @staticmethod
    def _colliding_index(block_size: int) -> PrefixIndex:
        return PrefixIndex(block_size, b"", hash_function=lambda data: bytes([sum(data) % 3]))

    def request(self, tier: Tier, *, resumed: bool = False, large: bool = False) -> Request:
        rng, capacity = self.rng, self.capacity
        length = rng.randint(1, max(1, capacity - 2 if large else capacity // 4))
        prompt = self.stems[rng.randrange(NUM_STEMS)][:length]
        if rng.random() < 0.5:
            prompt[-1] = rng.randrange(2)
        max_tokens = rng.randint(1, max(1, min(capacity - length + 1, 12)))
        output = [rng.randrange(2) for _ in range(rng.randint(0, max_tokens - 1))] if resumed else []
        deadline_at_s = rng.choice([None, None, float(rng.randrange(5))])
        return make_request(prompt, max_tokens, tier=tier, source=rng.choice("abc"), output=output, deadline_at_s=deadline_at_s)

    def add(self, tier: Tier, *, resumed: bool = False, large: bool = False) -> None:
        self.sim.add(self.request(tier, resumed=resumed, large=large))

    def cancel(self) -> None:
        self.sim.finish(self.rng.choice(self.sim.live))

    def fork(self) -> None:
        parent = self.rng.choice(self.sim.live)
        self.sim.fork(parent, make_request(parent.prompt_token_ids, parent.max_tokens, tier=parent.tier))

    def step(self) -> None:
        assert self.sim.step().chunks or not self.sim.scheduler.has_work(), "work, but no progress"

    def check_room(self, tier: Tier) -> None:
        """At most what fills the slots and the few that may wait; at least one if no request is there."""
        num_there = sum(request.tier == tier for request in self.sim.live)
        room = self.sim.scheduler.room(tier)
        assert 0 <= room <= max(0, self.sim.config.max_batch_size + ALLOWANCE - num_there)
        assert room >= 1 or self.sim.live

    def drain(self) -> None:
        """With no more arrivals, all finishes within a bounded number of steps."""
        self.sim.run(50 + 3 * sum(r.max_kv_tokens for r in self.sim.live))
        for tier in TIERS:
            self.check_room(tier)
        stats = self.sim.scheduler.stats()
        assert stats.free_blocks + stats.cached_blocks == stats.total_blocks
        assert stats.used_cpu_blocks == 0


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 2**32))
    def make(self, seed: int) -> None:
        self.world = World(random.Random(seed))

    @precondition(lambda self: len(self.world.sim.live) < MAX_LIVE)
    @rule(tier=st.sampled_from(TIERS), resumed=st.booleans(), large=st.booleans())
    def add(self, tier: Tier, resumed: bool, large: bool) -> None:
        self.world.add(tier, resumed=resumed, large=large)

    @rule(steps=st.integers(1, 5))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.world.step()

    @rule(culprit=st.booleans())
    def fail(self, culprit: bool) -> None:
        self.world.sim.failed_step(culprit)

    @precondition(lambda self: self.world.sim.live)
    @rule()
    def cancel(self) -> None:
        self.world.cancel()

    @precondition(lambda self: 0 < len(self.world.sim.live) < MAX_LIVE)
    @rule()
    def fork(self) -> None:
        self.world.fork()

    @rule(tier=st.sampled_from(TIERS))
    def ask_for_room(self, tier: Tier) -> None:
        self.world.check_room(tier)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("seed", range(60))
def test_long_random_runs(seed: int) -> None:
    world = World(random.Random(seed))
    rng, load = world.rng, world.rng.choice([0.2, 0.4, 0.6])
    for _ in range(300):
        while rng.random() < load and len(world.sim.live) < MAX_LIVE:
            world.add(rng.choice(TIERS), resumed=rng.random() < 0.2, large=rng.random() < 0.3)
        event = rng.random()
        if event < 0.05 and world.sim.live:
            world.cancel()
        elif event < 0.1 and world.sim.live:
            world.fork()
        elif event < 0.13:
            world.sim.failed_step(culprit=rng.random() < 0.5)
        else:
            world.step()
    world.drain()
