"""Batch work beside realtime: bounded by a step's time, as learnt from earlier steps; never starved, never unfair."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.scheduling import Simulation, make_request
from worker.engine.config import EngineConfig
from worker.engine.pace import MAX_SLOWDOWN, QUIET_BASES, QUIET_GOALS, QUIET_TOKENS, STALE_STEPS, Pace
from worker.engine.request import Request, RequestStatus
from worker.engine.step import ScheduledChunk, StepPlan

CONFIG = EngineConfig(max_batch_size=64, max_batch_tokens=256, block_size=4, realtime_step_ms=50.0)
BASE_S, TOKEN_S = 0.02, 0.002


def batch(prompt: int, max_tokens: int) -> Request:
    return make_request(prompt, max_tokens, tier="batch")


def simulation(config: EngineConfig = CONFIG, base_s: float = BASE_S, token_s: float = TOKEN_S) -> Simulation:
    return Simulation(config, num_blocks=4_000, step_s=lambda num_tokens: base_s + token_s * num_tokens)


def steps(sim: Simulation, count: int) -> list[int]:
    """The tokens of this many steps."""
    return [sim.step().num_tokens for _ in range(count)]


def step_s(num_tokens: float) -> float:
    return BASE_S + TOKEN_S * num_tokens


def batch_tokens(plan: StepPlan) -> int:
    return sum(chunk.num_tokens for chunk in plan.chunks if chunk.request.tier == "batch")


def unlearnt(goal_ms: float = 50.0, floor: float = 0.0) -> Pace:
    config = replace(CONFIG, max_batch_tokens=8192, realtime_step_ms=goal_ms, batch_floor=floor)
    return Pace(config, keeps_floor=True, clock=lambda: 0.0)


def learnt(
    *sizes: int, base_s: float = BASE_S, token_s: float = TOKEN_S, goal_ms: float = 50.0, floor: float = 0.0, quiet: bool = False
) -> Pace:
    pace = unlearnt(goal_ms, floor)
    for size in sizes:
        pace.cost.observe(size, base_s + token_s * size)
    assert pace.begin_step(realtime_is_quiet=quiet)
    return pace


VARIED = range(1, 200, 7)

# What a step takes


def test_nothing_is_bound_before_anything_is_known_or_without_a_goal() -> None:
    pace, without_goal = unlearnt(), unlearnt(goal_ms=0.0)
    assert not pace.begin_step(realtime_is_quiet=False)
    for each in (pace, without_goal):
        each.cost.observe(10, 0.1)
    assert pace.begin_step(realtime_is_quiet=False)
    assert pace.begin_step(realtime_is_quiet=True)
    assert not without_goal.begin_step(realtime_is_quiet=False)


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


def test_where_realtime_decodes_alone_take_longer_batch_may_lengthen_the_step_by_a_quarter() -> None:
    pace = learnt(*VARIED, base_s=0.2)
    assert MAX_SLOWDOWN == 1.25
    assert 0.2 + TOKEN_S * (10 + pace.batch_tokens(10)) == pytest.approx(MAX_SLOWDOWN * (0.2 + TOKEN_S * 10), rel=0.05)


@pytest.mark.parametrize("base_s", [BASE_S, 0.2])
def test_tokens_of_realtime_prefills_come_off_what_batch_may_compute(base_s: float) -> None:
    pace = learnt(*VARIED, base_s=base_s)
    alone = pace.batch_tokens(4)
    assert alone > 3
    assert [pace.batch_tokens(4, num_tokens) for num_tokens in (1, 3, alone - 1, alone, 1_000)] == [alone - 1, alone - 3, 1, 1, 1]


@pytest.mark.parametrize("floor", [0.1, 0.5, 1.0])
def test_prefill_that_takes_longer_than_the_goal_leaves_batch_its_floor(floor: float) -> None:
    pace = learnt(*VARIED, floor=floor)
    whole = 4 + learnt(*VARIED).batch_tokens(4)
    assert pace.batch_tokens(4, 1_000) == pace.floor_tokens(4) == pytest.approx(floor * whole, abs=1)


@pytest.mark.parametrize(("base_s", "goal_ms"), [(0.005, 50.0), (0.02, 5.0)], ids=["by the goal", "by the base"])
def test_step_without_realtime_is_bounded_by_the_goal_or_by_what_every_step_costs(base_s: float, goal_ms: float) -> None:
    pace = learnt(*VARIED, base_s=base_s, goal_ms=goal_ms, quiet=True)
    most_s = max(QUIET_GOALS * goal_ms / 1000.0, QUIET_BASES * base_s)
    assert base_s + TOKEN_S * pace.batch_tokens(0) == pytest.approx(most_s, rel=0.05)


def test_what_realtime_alone_would_take_is_not_learnt_from_steps_beside_a_batch() -> None:
    pace = unlearnt(goal_ms=5.0)
    decodes = [ScheduledChunk(make_request(4, 100), 4, 1, True) for _ in range(4)]
    for num_decodes in [1, 2, 3, 4] * 10:
        pace.observe(StepPlan(decodes[:num_decodes]), step_s(num_decodes))
    for num_tokens in [7, 9, 12, 8, 10] * 10:  # a full batch costs time of its own
        beside = [ScheduledChunk(batch(4, 100), 4, 1, True) for _ in range(num_tokens - 4)]
        pace.observe(StepPlan(decodes + beside), 0.034 + 0.0005 * num_tokens)
    assert pace.begin_step(realtime_is_quiet=False)
    assert pace.batch_tokens(4) <= 2


@pytest.mark.parametrize("frozen_s", [0.0, 30.0], ids=["", "after a frozen step"])
@pytest.mark.parametrize(("before", "now"), [(1, 10), (10, 1), (4, 4)])
def test_what_realtime_alone_would_take_is_learnt_as_long_as_a_batch_is_there(before: int, now: int, frozen_s: float) -> None:
    pace = unlearnt(goal_ms=5.0)
    decodes = [ScheduledChunk(make_request(4, 100), 4, 1, True) for _ in range(10)]
    beside = [ScheduledChunk(batch(4, 100), 4, 1, True) for _ in range(1000)]
    for _ in range(50):
        pace.observe(StepPlan(decodes[:before]), step_s(before))
    pace.observe(StepPlan(decodes[:before]), step_s(before) + frozen_s)
    assert pace.begin_step(realtime_is_quiet=False)
    taken = []
    for _ in range(300):
        num_beside = min(pace.batch_tokens(now), len(beside))
        taken.append(step_s(now + num_beside))
        pace.observe(StepPlan(decodes[:now] + beside[:num_beside]), taken[-1])
    assert taken[-1] <= 1.15 * MAX_SLOWDOWN * step_s(now)
    if not frozen_s:
        assert taken[-1] >= step_s(now) + 0.5 * (MAX_SLOWDOWN - 1) * step_s(now), "and batch gets a good part of what it may have"


def test_what_realtime_took_alone_long_ago_does_not_hold_batch_back() -> None:
    pace = unlearnt(goal_ms=5.0)
    decodes = [ScheduledChunk(make_request(4, 100), 4, 1, True) for _ in range(4)]
    for num_decodes in [1, 2, 3, 4] * 10:
        pace.observe(StepPlan(decodes[:num_decodes]), 0.01)
    for num_beside in [1, 2, 3, 2] * (STALE_STEPS // 4 + 1):  # contexts have grown
        beside = [ScheduledChunk(batch(4, 100), 4, 1, True) for _ in range(num_beside)]
        assert pace.begin_step(realtime_is_quiet=False)
        pace.observe(StepPlan(decodes + beside), 0.1 + 0.001 * num_beside)
    assert pace.batch_tokens(4) > 10


def test_one_slow_step_holds_batch_back_for_a_few_seconds_at_most() -> None:
    pace, passed_s = learnt(512, quiet=True), 0.0
    pace.cost.observe(512, 30.0)  # the host was frozen
    while (size := pace.batch_tokens(0)) < 150:
        pace.cost.observe(size, step_s(size))
        passed_s += step_s(size)
    assert passed_s < 10.0


def test_tokens_that_cost_nothing_are_bound_ever_less() -> None:
    pace, size = learnt(*VARIED, base_s=0.2, token_s=0.0), 0
    for _ in range(20):
        size = 10 + pace.batch_tokens(10)
        pace.cost.observe(size, 0.2)
    assert size == 8192


@pytest.mark.parametrize("quiet", [False, True])
@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_at_least_one_token_may_be_computed_however_slow_they_are(floor: float, quiet: bool) -> None:
    pace = learnt(1, 2, 3, base_s=0.0, token_s=10.0, floor=floor, quiet=quiet)
    assert [pace.batch_tokens(0), pace.batch_tokens(1), pace.batch_tokens(4, 40)] == [QUIET_TOKENS if quiet else 1, 1, 1]


@pytest.mark.parametrize("slow", [[(1, 0.3)], [*((size, 0.3 + 0.01 * size) for size in VARIED), (100, 60.0)]], ids=["first", "frozen"])
def test_steps_of_one_token_do_not_hold_batch_back_for_ever(slow: list[tuple[int, float]]) -> None:
    pace, sizes = unlearnt(), []
    for num_tokens, seconds in slow:
        pace.cost.observe(num_tokens, seconds)
    for _ in range(400):
        sizes.append(min(pace.batch_tokens(0), 20))  # decodes are all there is
        pace.cost.observe(sizes[-1], 0.3 + 0.01 * sizes[-1])
    assert sizes[-1] >= 10, "what a token costs is learnt again, if roughly: sizes vary little"


# What is planned


def test_batch_decodes_are_held_to_the_goal_while_realtime_runs_and_take_turns() -> None:
    sim = simulation()
    requests = [batch(4, 200) for _ in range(40)]
    sim.add(*requests)
    assert steps(sim, 5)[-1] == 40
    sim.add(make_request(4, 100))
    sizes = steps(sim, 60)
    assert all(step_s(size) <= 0.05 * 1.1 for size in sizes[3:])
    lengths = [len(request.output_token_ids) for request in requests]
    assert max(lengths) - min(lengths) <= 1
    sim.run()


@pytest.mark.parametrize("output_tokens", [1, 200], ids=["prefills", "decodes"])
@pytest.mark.parametrize("prompt_tokens", [12, 40, 200], ids="prompts of {}".format)
def test_realtime_newcomers_count_in_the_step_that_they_enter(prompt_tokens: int, output_tokens: int) -> None:
    sim = simulation()
    sim.add(*(batch(4 if output_tokens > 1 else 300, output_tokens) for _ in range(40)))
    steps(sim, 5)
    floor = 2  # a tenth of the tokens that the goal has room for
    plans = []
    for _ in range(60):
        sim.add(make_request(prompt_tokens, 1))
        plans.append(sim.step())
    assert all(step_s(plan.num_tokens) <= max(0.05, step_s(prompt_tokens + floor)) * 1.05 for plan in plans[5:])
    assert all(batch_tokens(plan) for plan in plans)
    sim.run()


def test_batch_prefills_are_held_to_the_goal_while_realtime_runs() -> None:
    sim = simulation()
    sim.add(batch(2_000, 1))
    steps(sim, 2)
    sim.add(make_request(4, 100), batch(2_000, 1))
    assert all(step_s(size) <= 0.05 * 1.1 for size in steps(sim, 60)[5:])


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
    assert all(0 < batch_tokens(plan) <= 4 for plan in plans)  # a fifth of the 15 or so that the goal has room for
    assert all(plan.num_tokens == CONFIG.max_batch_tokens for plan in plans)


@pytest.mark.parametrize("prompts", [(1, 60), (250, 2_000)], ids=["short", "long"])
@pytest.mark.parametrize("batch_floor", [0.0, 0.1])
@pytest.mark.parametrize("seed", range(5))
def test_batch_that_runs_ends_beside_prompts_of_realtime_in_every_step(seed: int, batch_floor: float, prompts: tuple[int, int]) -> None:
    rng = random.Random(seed)
    sim = simulation(replace(CONFIG, batch_floor=batch_floor))
    requests = [batch(rng.randint(1, 20), rng.randint(1, 8)) for _ in range(10)]
    sim.add(*requests)
    steps(sim, 2)
    for _ in range(100):
        while sim.scheduler.stats().running_realtime + sim.scheduler.stats().waiting_realtime < 3:
            sim.add(make_request(rng.randint(*prompts), 1))
        sim.step()
    assert all(request.status is RequestStatus.FINISHED for request in requests)


def test_arrival_waits_no_longer_than_a_step_without_realtime_may_take() -> None:
    sim = simulation(replace(CONFIG, max_batch_tokens=1_000))
    sim.add(batch(6_000, 1), *(batch(20, 20) for _ in range(40)))
    steps(sim, 2)
    assert all(step_s(size) <= QUIET_BASES * BASE_S * 1.05 for size in steps(sim, 25)[5:])


@pytest.mark.parametrize(("prompt_tokens", "output_tokens"), [(4, 20), (100, 2)], ids=["decodes", "prefills"])
def test_bound_without_realtime_costs_little_throughput(prompt_tokens: int, output_tokens: int) -> None:
    taken_s = []
    for goal_ms in (0.0, 5.0):
        sim = simulation(replace(CONFIG, realtime_step_ms=goal_ms), base_s=0.002)
        sim.add(*(batch(prompt_tokens, output_tokens) for _ in range(100)))
        sim.run()
        taken_s.append(sim.now_s)
    assert taken_s[1] <= taken_s[0] * (1.0 + 1.0 / QUIET_BASES)


@pytest.mark.parametrize("batch_floor", [0.1, 0.5])
def test_batch_ends_behind_endless_realtime_however_slow_steps_are(batch_floor: float) -> None:
    sim = simulation(replace(CONFIG, batch_floor=batch_floor), base_s=0.1, token_s=0.05)
    requests = [batch(20, 5) for _ in range(10)]
    sim.add(*requests)
    while not all(request.status is RequestStatus.FINISHED for request in requests):
        assert sim.num_steps < 3_000
        while sim.scheduler.stats().running_realtime + sim.scheduler.stats().waiting_realtime < 8:
            sim.add(make_request(4, 20))
        sim.step()


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
