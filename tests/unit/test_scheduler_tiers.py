"""Realtime and batch, preemption by both ways, and pools that are too small."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.scheduling import CHEAP_SWAP, Simulation, make_request
from worker.engine.admission import Shares
from worker.engine.config import EngineConfig
from worker.engine.preemption import PreemptionCosts
from worker.engine.request import Request, RequestStatus
from worker.engine.running import MAX_PREEMPTIONS

CONFIG = EngineConfig(max_batch_size=8, max_batch_tokens=64, block_size=4)
DEAR_SWAP = PreemptionCosts(recompute_s_per_token=1e-9, swap_s_per_block=1.0)


def batch(prompt: int, max_tokens: int) -> Request:
    return make_request(prompt, max_tokens, tier="batch")


def running(sim: Simulation, tier: str) -> int:
    stats = sim.scheduler.stats()
    return stats.running_realtime if tier == "realtime" else stats.running_batch


# Shares


def test_shares_of_a_configuration() -> None:
    config = replace(CONFIG, max_batch_size=10, max_batch_tokens=100, realtime_reserved=0.9, batch_floor=0.1)
    assert Shares.of(config, 50) == Shares(batch_slots=1, batch_blocks=5, batch_tokens=10, floor_slots=1, floor_tokens=10)
    assert Shares.of(replace(config, batch_floor=0.0), 50).floor_slots == 0
    assert Shares.of(replace(config, realtime_reserved=1.0), 50) == Shares(1, 5, 10, 1, 10), "the floor is one of blocks, too"
    assert Shares.of(replace(config, max_batch_size=1, realtime_reserved=0.5), 50).floor_slots == 0


def test_batch_takes_everything_while_realtime_is_quiet() -> None:
    sim = Simulation(CONFIG, num_blocks=200)
    sim.add(*(batch(4, 40) for _ in range(10)))
    sim.step()
    assert running(sim, "batch") == 8


def test_batch_leaves_the_reserved_slots_while_realtime_is_busy() -> None:
    sim = Simulation(CONFIG, num_blocks=200)
    sim.add(make_request(4, 40), *(batch(4, 40) for _ in range(10)))
    for _ in range(5):
        sim.step()
    assert (running(sim, "realtime"), running(sim, "batch")) == (1, 4)


def test_batch_leaves_the_reserved_tokens_while_realtime_is_busy() -> None:
    sim = Simulation(CONFIG, num_blocks=200)
    sim.add(make_request(4, 40), batch(200, 1))
    sim.step()
    assert sim.step().num_tokens == 1 + 32


def test_batch_leaves_the_reserved_blocks_while_realtime_is_busy() -> None:
    sim = Simulation(replace(CONFIG, batch_overcommit=1.0), num_blocks=40)
    sim.add(make_request(4, 40), *(batch(4, 37) for _ in range(10)))  # ten blocks each
    for _ in range(30):
        sim.step()
        assert running(sim, "batch") == 2


def test_realtime_behind_a_full_batch_tier_gets_its_first_token_at_once_and_batch_resumes_unchanged() -> None:
    undisturbed = Simulation(CONFIG, num_blocks=60, sample=lambda r: r.prompt_token_ids[0] + len(r.output_token_ids))
    disturbed = Simulation(CONFIG, num_blocks=60, sample=lambda r: r.prompt_token_ids[0] + len(r.output_token_ids))
    prompts = [[100 * i + j for j in range(10)] for i in range(8)]
    outputs = []
    for sim in (undisturbed, disturbed):
        requests = [make_request(prompt, 20, tier="batch") for prompt in prompts]
        sim.add(*requests)
        for _ in range(5):
            sim.step()
        if sim is disturbed:
            urgent = make_request(40, 20)
            sim.add(urgent)
            sim.step()
            assert urgent in sim.first_token_step
            assert sum(r.num_preemptions for r in requests) > 0
            assert [r.status for r in requests[:4]] == [RequestStatus.RUNNING] * 4, "the newest give way"
        sim.run()
        outputs.append([r.output_token_ids for r in requests])
    assert outputs[0] == outputs[1]


def test_a_realtime_burst_takes_all_but_the_floor() -> None:
    sim = Simulation(replace(CONFIG, batch_floor=0.25), num_blocks=400)
    sim.add(*(batch(4, 100) for _ in range(8)))
    sim.step()
    sim.add(*(make_request(4, 20) for _ in range(20)))
    sim.step()
    assert (running(sim, "realtime"), running(sim, "batch")) == (6, 2)


@pytest.mark.parametrize("prompt", [4, 30, 60, 220])
def test_a_realtime_flood_does_not_starve_batch(prompt: int) -> None:
    sim = Simulation(CONFIG, num_blocks=64)
    requests = [batch(20, 10) for _ in range(3)]
    sim.add(*requests)
    for _ in range(200):
        while sim.scheduler.room("realtime"):
            sim.add(make_request(prompt, 20))
        sim.step()
    assert all(r.status is RequestStatus.FINISHED for r in requests)
    assert sum(r.num_preemptions for r in requests) == 0


def test_a_realtime_flood_leaves_batch_prefills_their_floor() -> None:
    sim = Simulation(replace(CONFIG, max_batch_tokens=40), num_blocks=1_000)
    request = batch(80, 1)
    sim.add(make_request(3_000, 1), request)
    for _ in range(21):
        sim.step()
    assert request.status is RequestStatus.FINISHED


def test_the_largest_floor_leaves_half_of_the_budget_to_realtime_prefills() -> None:
    sim = Simulation(replace(CONFIG, batch_floor=1.0, realtime_reserved=0.0), num_blocks=1_000)
    realtime, low = make_request(320, 1), batch(3_000, 1)
    sim.add(low)
    sim.step()
    sim.add(realtime)
    for _ in range(10):
        sim.step()
    assert realtime.status is RequestStatus.FINISHED


def test_a_batch_request_too_big_for_its_tier_runs_when_realtime_is_quiet_and_holds_nobody_up() -> None:
    sim = Simulation(CONFIG, num_blocks=64)
    busy, big, small = make_request(4, 30), batch(200, 10), batch(4, 2)
    sim.add(busy, big, small)
    for _ in range(30):
        sim.step()
    assert small.status is RequestStatus.FINISHED
    assert (big.status, big.num_computed_tokens) == (RequestStatus.WAITING, 0)
    sim.run()


@pytest.mark.parametrize("floor", [0.1, 0.5])
def test_a_realtime_request_as_big_as_the_pool_gets_its_turn_among_batch_work(floor: float) -> None:
    sim = Simulation(replace(CONFIG, batch_floor=floor), num_blocks=64)
    big = make_request(250, 7)
    sim.add(*(batch(20, 10) for _ in range(5)))
    sim.step()
    sim.add(big)
    for _ in range(60):
        while sim.scheduler.room("batch"):
            sim.add(batch(20, 10))
        sim.step()
    assert big.status is RequestStatus.FINISHED


def test_batch_requests_that_wait_for_realtime_to_be_quiet_do_not_close_the_room_for_others() -> None:
    sim = Simulation(CONFIG, num_blocks=64)
    sim.add(make_request(4, 200), batch(200, 10))
    sim.step()
    num_small = 0
    for _ in range(40):
        for _ in range(sim.scheduler.room("batch")):
            sim.add(batch(8, 2))
            num_small += 1
        sim.step()
    assert num_small > 40
    for _ in range(2 * CONFIG.max_batch_size):
        if not sim.scheduler.room("batch"):
            break
        sim.add(batch(200, 10))
    assert not sim.scheduler.room("batch"), "but so many of them are enough"
    sim.run()


def test_a_realtime_request_that_excludes_batch_work_waits_for_one_turn_of_it_not_for_its_end() -> None:
    sim = Simulation(replace(CONFIG, batch_floor=0.25), num_blocks=64)
    first, second, behind = make_request(40, 100), make_request(240, 12), make_request(4, 2)
    sim.sample = lambda request: None if request is first else 7
    guaranteed, *others = (batch(4, max_tokens) for max_tokens in (2, 20, 25, 30))
    sim.add(guaranteed, *others)
    while guaranteed.status is not RequestStatus.FINISHED:
        sim.step()
    sim.add(first)
    sim.step()
    assert first.status is RequestStatus.FINISHED
    assert not any(request.guaranteed for request in others)
    sim.add(second, behind)
    for i in range(120):
        while sim.scheduler.room("batch"):
            sim.add(batch(4, 10 + i % 10))
        sim.step()
    assert (second.status, behind.status) == (RequestStatus.FINISHED, RequestStatus.FINISHED)


def test_a_waiting_realtime_request_closes_the_room_for_batch() -> None:
    sim = Simulation(CONFIG, num_blocks=64)
    before = sim.scheduler.room("batch")
    sim.add(*(make_request(4, 30) for _ in range(9)))
    sim.step()
    assert before > 1
    assert sim.scheduler.room("batch") <= 1


# Preemption


@pytest.mark.parametrize(("costs", "swaps"), [(CHEAP_SWAP, True), (DEAR_SWAP, False)])
def test_the_cheaper_way_of_preemption_is_taken(costs: PreemptionCosts, swaps: bool) -> None:
    sim = Simulation(replace(CONFIG, batch_overcommit=3.0), num_blocks=32, num_cpu_blocks=64, costs=costs)
    sim.add(*(batch(12, 60) for _ in range(4)))
    sim.run()
    stats = sim.scheduler.stats()
    assert (stats.swap_preemptions > 0, stats.recompute_preemptions > 0) == (swaps, not swaps)
    assert (stats.total_cpu_blocks, stats.used_cpu_blocks) == (64, 0)


def test_what_does_not_fit_into_cpu_memory_is_recomputed() -> None:
    sim = Simulation(replace(CONFIG, batch_overcommit=3.0), num_blocks=32, num_cpu_blocks=2, costs=CHEAP_SWAP)
    sim.add(*(batch(12, 60) for _ in range(4)))
    sim.run()
    assert sim.scheduler.stats().recompute_preemptions > 0


def test_a_swapped_request_copies_back_only_what_is_no_longer_cached() -> None:
    sim = Simulation(CONFIG, num_blocks=20, num_cpu_blocks=20, costs=CHEAP_SWAP)
    victim = batch(39, 20)
    sim.add(victim)
    for _ in range(3):
        sim.step()
    urgent = make_request(46, 1)  # twelve blocks: nine are free, three of the victim's are taken
    sim.add(urgent)
    plan = sim.step()
    assert plan.preempted == [victim]
    assert len(plan.swap_out) == 11
    assert victim.status is RequestStatus.SWAPPED
    plan = sim.step()
    assert 0 < len(plan.swap_in) <= 4
    assert [(chunk.request, chunk.num_tokens) for chunk in plan.chunks] == [(victim, 1)], "nothing is computed again"
    sim.run()


def test_a_swapped_request_can_be_cancelled() -> None:
    sim = Simulation(CONFIG, num_blocks=20, num_cpu_blocks=20, costs=CHEAP_SWAP)
    victim, urgent = batch(39, 20), make_request(46, 5)
    sim.add(victim)
    sim.step()
    sim.add(urgent)
    sim.step()
    assert victim.status is RequestStatus.SWAPPED
    sim.finish(victim)
    sim.run()
    assert sim.scheduler.stats().used_cpu_blocks == 0


@pytest.mark.parametrize("overcommit", [1.0, 1.5, 4.0, 100.0])
@pytest.mark.parametrize("num_cpu_blocks", [0, 1_000])
def test_overcommitted_batch_work_does_not_thrash(overcommit: float, num_cpu_blocks: int) -> None:
    config = replace(CONFIG, max_batch_size=16, batch_overcommit=overcommit)
    sim = Simulation(config, num_blocks=64, num_cpu_blocks=num_cpu_blocks, costs=CHEAP_SWAP)
    requests = [batch(16, 80) for _ in range(32)]
    sim.add(*requests)
    steps = sim.run()
    assert max(r.num_preemptions for r in requests) <= 1
    assert (sum(r.num_preemptions for r in requests) == 0) == (overcommit == 1.0)
    assert steps <= 32 * 80 / 2


def test_overcommitting_pays_where_outputs_end_early() -> None:
    steps = []
    for overcommit in (1.0, 2.0):
        rng = random.Random(0)
        sim = Simulation(
            replace(CONFIG, max_batch_size=16, batch_overcommit=overcommit),
            num_blocks=64,
            sample=lambda _, rng=rng: 1 if rng.random() > 0.05 else None,
        )
        sim.add(*(batch(16, 80) for _ in range(64)))
        steps.append(sim.run())
    assert steps[1] < 0.75 * steps[0]


def test_the_newest_gives_way_and_keeps_its_place_before_newcomers() -> None:
    sim = Simulation(replace(CONFIG, batch_overcommit=3.0), num_blocks=20)
    old, young = batch(16, 40), batch(16, 40)
    sim.add(old, young)
    sim.step()
    late = batch(4, 4)
    while not young.num_preemptions:
        sim.step()
    sim.add(late)
    while old.status is not RequestStatus.FINISHED:
        assert late.status is RequestStatus.WAITING
        sim.step()
    assert old.num_preemptions == 0
    sim.run()
    assert sim.first_token_step[young] < sim.first_token_step[late]


def test_realtime_is_never_preempted() -> None:
    rng = random.Random(1)
    sim = Simulation(CONFIG, num_blocks=30)
    realtime = []
    for _ in range(300):
        if rng.random() < 0.2:
            realtime.append(make_request(rng.randint(1, 40), rng.randint(1, 20)))
            sim.add(realtime[-1])
        if rng.random() < 0.2:
            sim.add(batch(rng.randint(1, 40), rng.randint(1, 20)))
        sim.step()
    sim.run()
    assert len(realtime) > 40
    assert sum(r.num_preemptions for r in realtime) == 0


def test_realtime_coming_and_going_preempts_nobody_over_and_over() -> None:
    sim = Simulation(CONFIG, num_blocks=1_000)
    requests = [batch(8, 200) for _ in range(8)]
    sim.add(*requests)
    sim.step()
    for _ in range(20):
        sim.add(make_request(4, 2))
        for _ in range(4):
            sim.step()
    assert sum(r.num_preemptions for r in requests) == 20
    assert max(r.num_preemptions for r in requests) == MAX_PREEMPTIONS


def test_a_batch_request_leaves_a_watermark_of_blocks() -> None:
    sim = Simulation(replace(CONFIG, batch_floor=0.0, max_batch_tokens=1_000), num_blocks=200)
    first = batch(4 * 150, 1)
    sim.add(first, batch(4 * 49, 1), batch(4 * 48, 1))
    sim.failed_step(culprit=False)
    assert running(sim, "batch") == 1
    sim.finish(sim.live[1])
    sim.failed_step(culprit=False)
    assert running(sim, "batch") == 2


def test_a_swapped_request_starts_with_no_more_than_it_had_computed() -> None:
    sim = Simulation(replace(CONFIG, batch_overcommit=10.0), num_blocks=8, num_cpu_blocks=20, costs=CHEAP_SWAP)
    twins = [make_request(range(6), max_tokens, tier="batch") for max_tokens in (9, 7)]
    sim.add(*twins)
    while twins[1].num_tokens < 12:
        sim.step()
    urgent = make_request(9, 4)
    sim.add(urgent)
    sim.step()
    assert twins[1].status is RequestStatus.SWAPPED
    assert twins[1].num_computed_tokens == 11
    sim.run()
    assert twins[1].output_token_ids == twins[0].output_token_ids[:7]


def test_a_swapped_request_comes_back_past_blocks_that_a_waiting_child_holds() -> None:
    config = replace(CONFIG, max_batch_size=2, enable_prefix_caching=False)
    sim = Simulation(config, num_blocks=24, num_cpu_blocks=24, costs=CHEAP_SWAP)
    parent, victim, urgent = batch(48, 12), batch(36, 10), make_request(20, 5)
    sim.add(parent, victim)
    sim.step()
    sim.step()
    child = make_request(parent.prompt_token_ids, 4, tier="batch")
    sim.fork(parent, child)
    sim.add(urgent)
    sim.step()
    assert victim.status is RequestStatus.SWAPPED
    sim.finish(parent)
    assert len(child.block_ids) == 11
    assert sim.step().swap_in
    assert not child.block_ids
    sim.run()


def test_a_swapped_request_takes_its_prefix_from_what_a_waiting_child_gives_back_for_it() -> None:
    sim = Simulation(replace(CONFIG, max_batch_size=3), num_blocks=24, num_cpu_blocks=24, costs=CHEAP_SWAP)
    parents = batch(21, 11), batch(13, 8)
    sim.add(*parents)
    sim.step()
    victim = make_request([*parents[1].prompt_token_ids[:12], *range(12)], 4, tier="batch")
    sim.add(victim)
    sim.step()
    children = [make_request(parent.prompt_token_ids, 4, tier="batch") for parent in parents]
    for parent, child in zip(parents, children, strict=True):
        sim.fork(parent, child)
    sim.add(make_request(53, 4))
    sim.step()
    assert (victim.status, len(victim.cpu_block_ids)) == (RequestStatus.SWAPPED, 6)
    for parent in parents:
        sim.finish(parent)
    assert [len(child.block_ids) for child in children] == [5, 3], "the last three begin the victim's prompt, too"
    assert sim.scheduler.stats().free_blocks + sim.scheduler.stats().cached_blocks == 2
    assert len(sim.step().swap_in) == 3
    sim.run()


def test_nobody_enters_in_the_step_that_swaps_in() -> None:
    sim = Simulation(replace(CONFIG, max_batch_size=2, enable_prefix_caching=False), num_blocks=50, num_cpu_blocks=50, costs=CHEAP_SWAP)
    elder, victim, urgent, newcomer = batch(10, 2), batch(10, 10), make_request(4, 1), batch(4, 4)
    sim.add(elder, victim)
    sim.step()
    sim.add(urgent)
    sim.step()
    sim.add(newcomer)
    plan = sim.step()
    assert (len(plan.swap_in), newcomer.status) == (3, RequestStatus.WAITING)
    sim.step()
    assert newcomer.status is RequestStatus.RUNNING
    sim.run()


def test_swapped_and_recomputed_requests_keep_what_they_generated() -> None:
    for num_cpu_blocks in (0, 100):
        sim = Simulation(replace(CONFIG, batch_overcommit=10.0), num_blocks=24, num_cpu_blocks=num_cpu_blocks, costs=CHEAP_SWAP)
        requests = [batch(10, 50) for _ in range(6)]
        sim.add(*requests)
        sim.run()
        assert any(r.num_preemptions for r in requests)
        assert all(r.output_token_ids == list(range(7, 57)) for r in requests)
