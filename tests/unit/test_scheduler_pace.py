"""Batch work beside realtime: held to what a step may take, as learnt from the steps before; never starved, never unfair."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.scheduling import Simulation, make_request
from worker.engine.config import EngineConfig
from worker.engine.pace import MAX_SLOWDOWN, Pace
from worker.engine.request import Request, RequestStatus

CONFIG = EngineConfig(max_batch_size=64, max_batch_tokens=256, block_size=4, realtime_step_ms=50.0)
BASE_S, TOKEN_S = 0.02, 0.002


def batch(prompt: int, max_tokens: int) -> Request:
    return make_request(prompt, max_tokens, tier="batch")


def simulation(config: EngineConfig = CONFIG, base_s: float = BASE_S, token_s: float = TOKEN_S) -> Simulation:
    return Simulation(config, num_blocks=4_000, step_s=lambda num_tokens: base_s + token_s * num_tokens)


def steps(sim: Simulation, count: int) -> list[int]:
    """The tokens of so many steps."""
    return [sim.step().num_tokens for _ in range(count)]


def learnt(*sizes: int, base_s: float = BASE_S, token_s: float = TOKEN_S, goal_ms: float = 50.0, floor: float = 0.0) -> Pace:
    config = replace(CONFIG, realtime_step_ms=goal_ms, batch_floor=floor)
    pace = Pace(config, keeps_floor=True, clock=lambda: 0.0)
    for size in sizes:
        pace.cost.observe(size, base_s + token_s * size)
    return pace


VARIED = range(1, 200, 7)

# What a step takes


def test_nothing_is_bound_before_anything_is_known_or_without_a_goal() -> None:
    assert not learnt().is_bound(realtime_is_quiet=False)
    assert not learnt(10, goal_ms=0.0).is_bound(realtime_is_quiet=False)
    assert learnt(10).is_bound(realtime_is_quiet=False)


def test_cost_of_steps_of_varied_size_is_learnt() -> None:
    cost = learnt(*VARIED).cost
    assert cost.base_s == pytest.approx(BASE_S, rel=0.05)
    assert cost.s_per_token == pytest.approx(TOKEN_S, rel=0.05)


def test_cost_of_a_token_stays_known_when_sizes_no_longer_vary() -> None:
    cost = learnt(*VARIED, *[40] * 1_000).cost
    assert cost.base_s == pytest.approx(BASE_S, rel=0.05)
    assert cost.s_per_token == pytest.approx(TOKEN_S, rel=0.05)


def test_steps_of_one_size_count_as_proportional_and_lead_to_the_goal() -> None:
    pace, size = learnt(48, 48, 48), 48
    for _ in range(60):
        size = 4 + pace.batch_tokens(4)
        pace.cost.observe(size, BASE_S + TOKEN_S * size)
    assert BASE_S + TOKEN_S * size == pytest.approx(0.05, rel=0.1)


@pytest.mark.parametrize("seed", range(20))
def test_noise_does_not_lead_far_from_the_goal(seed: int) -> None:
    rng = random.Random(seed)
    pace, taken = learnt(48, 200, 10), []
    for _ in range(400):
        size = min(4 + pace.batch_tokens(4), 512)
        taken.append(BASE_S + TOKEN_S * size)
        pace.cost.observe(size, taken[-1] * rng.lognormvariate(0.0, 0.2))
    assert sum(taken) / len(taken) == pytest.approx(0.05, rel=0.2)
    assert sum(seconds > 0.1 for seconds in taken) <= 4


def test_where_realtime_alone_takes_longer_batch_may_lengthen_the_step_by_half() -> None:
    pace = learnt(*VARIED, base_s=0.2)
    assert 0.2 + TOKEN_S * (10 + pace.batch_tokens(10)) == pytest.approx(MAX_SLOWDOWN * (0.2 + TOKEN_S * 10), rel=0.05)


def test_tokens_that_cost_nothing_are_bound_ever_less() -> None:
    pace, size = learnt(*VARIED, base_s=0.2, token_s=0.0), 0
    for _ in range(20):
        size = min(10 + pace.batch_tokens(10), 8192)
        pace.cost.observe(size, 0.2)
    assert size == 8192


def test_at_least_one_token_may_be_computed_however_slow_they_are() -> None:
    assert learnt(1, 2, 3, base_s=0.0, token_s=10.0).batch_tokens(0) == 1
    assert learnt(1, 2, 3, base_s=0.0, token_s=10.0, floor=0.1).batch_tokens(4) >= 1


# What is planned


def test_batch_decodes_are_held_to_the_goal_while_realtime_runs_and_take_turns() -> None:
    sim = simulation()
    requests = [batch(4, 200) for _ in range(40)]
    sim.add(*requests)
    assert steps(sim, 5)[-1] == 40
    sim.add(make_request(4, 100))
    sizes = steps(sim, 60)
    assert all(BASE_S + TOKEN_S * size <= 0.05 * 1.1 for size in sizes[3:])
    lengths = [len(request.output_token_ids) for request in requests]
    assert max(lengths) - min(lengths) <= 1
    sim.run()


@pytest.mark.parametrize("output_tokens", [1, 200], ids=["prefills", "decodes"])
def test_realtime_newcomers_count_in_the_step_that_they_enter(output_tokens: int) -> None:
    sim = simulation()
    sim.add(*(batch(4 if output_tokens > 1 else 300, output_tokens) for _ in range(40)))
    steps(sim, 5)
    sizes = []
    for _ in range(60):
        sim.add(make_request(12, 1))
        sizes.append(sim.step().num_tokens)
    assert all(BASE_S + TOKEN_S * size <= MAX_SLOWDOWN * (BASE_S + TOKEN_S * 12) * 1.05 for size in sizes[5:])
    sim.run()


def test_batch_prefills_are_held_to_the_goal_while_realtime_runs() -> None:
    sim = simulation()
    sim.add(batch(2_000, 1))
    steps(sim, 2)
    sim.add(make_request(4, 100), batch(2_000, 1))
    assert all(BASE_S + TOKEN_S * size <= 0.05 * 1.1 for size in steps(sim, 60)[5:])


def test_batch_takes_everything_again_when_realtime_has_been_quiet_for_a_moment() -> None:
    sim = simulation()
    sim.add(*(batch(4, 300) for _ in range(40)))
    steps(sim, 5)
    sim.add(make_request(4, 10))
    while sim.scheduler.stats().running_realtime or sim.scheduler.stats().waiting_realtime:
        sim.step()
    quiet_s = sim.now_s
    while sim.step().num_tokens < 40:
        assert sim.now_s < quiet_s + 1.1
    assert sim.now_s >= quiet_s + 0.9


def test_prompt_of_realtime_has_the_step_and_batch_keeps_its_floor() -> None:
    sim = simulation(replace(CONFIG, batch_floor=0.2))
    sim.add(*(batch(4, 1_000) for _ in range(40)))
    steps(sim, 5)
    sim.add(make_request(3_000, 1))
    sim.step()
    plans = [sim.step() for _ in range(8)]
    for plan in plans:
        of_batch = sum(chunk.num_tokens for chunk in plan.chunks if chunk.request.tier == "batch")
        assert 0 < of_batch < 40


@pytest.mark.parametrize("batch_floor", [0.1, 0.5])
def test_batch_ends_behind_endless_realtime_however_slow_steps_are(batch_floor: float) -> None:
    sim = simulation(replace(CONFIG, batch_floor=batch_floor), base_s=0.1, token_s=0.05)
    requests = [batch(20, 5) for _ in range(10)]
    sim.add(*requests)
    for _ in range(3_000):
        while sim.scheduler.stats().running_realtime + sim.scheduler.stats().waiting_realtime < 8:
            sim.add(make_request(4, 20))
        sim.step()
    assert all(request.status is RequestStatus.FINISHED for request in requests)


@pytest.mark.parametrize("seed", range(40))
def test_every_step_progresses_however_few_the_blocks_are(seed: int) -> None:
    rng = random.Random(seed)
    config = replace(CONFIG, max_batch_size=8, max_batch_tokens=16, block_size=2, batch_overcommit=3.0, batch_floor=rng.choice([0.0, 0.1]))
    sim = Simulation(config, rng.choice([12, 16, 24]), step_s=lambda num_tokens: 0.03 * (1 + num_tokens))
    for _ in range(400):
        if rng.random() < 0.3 and len(sim.live) < 16:
            sim.add(
                make_request(rng.randint(1, 4), rng.randint(1, 4)) if rng.random() < 0.3 else batch(rng.randint(1, 8), rng.randint(1, 12))
            )
        assert sim.step().chunks or not sim.scheduler.has_work(), "work, but no progress"
    sim.run()


def test_static_batches_are_not_held_back() -> None:
    sim = simulation(replace(CONFIG, policy="static"))
    sim.now_s = 1.0
    sim.add(*(batch(4, 20) for _ in range(60)), *(make_request(4, 20) for _ in range(4)))
    assert steps(sim, 10)[-1] == 64
