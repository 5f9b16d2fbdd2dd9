"""Steps, chunks, prefixes, forks, static batches: one tier, no pressure. See `test_scheduler_tiers` for the rest."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest

from producer.errors import ContextLengthExceeded
from producer.keys import TIERS, Tier
from tests.memory import num_alive
from tests.scheduling import Simulation, make_request
from worker.engine.config import EngineConfig
from worker.engine.request import UNKNOWN_TOKEN, Request, RequestStatus
from worker.engine.scheduler import Scheduler
from worker.engine.step import StepPlan

CONFIG = EngineConfig(max_batch_size=4, max_batch_tokens=16, block_size=4)


def chunks(plan: StepPlan) -> list[tuple[str, int, int]]:
    return [(chunk.request.id, chunk.start, chunk.num_tokens) for chunk in plan.chunks]


def test_prefill_in_chunks_runs_beside_decodes_within_the_budget() -> None:
    sim = Simulation(replace(CONFIG, max_batch_tokens=8), num_blocks=16)
    a, b = make_request(3, 4), make_request(12, 2)
    sim.add(a, b)
    steps = [chunks(sim.step()) for _ in range(4)]
    assert steps == [
        [(a.id, 0, 3), (b.id, 0, 5)],
        [(a.id, 3, 1), (b.id, 5, 7)],
        [(a.id, 4, 1), (b.id, 12, 1)],
        [(a.id, 5, 1)],
    ]
    assert not sim.scheduler.has_work()


def test_first_step_is_noted_when_it_is_planned_and_kept() -> None:
    sim = Simulation(replace(CONFIG, max_batch_size=1, max_batch_tokens=8), num_blocks=16, step_s=lambda _: 1.0)
    first, second = make_request(12, 3), make_request(3, 1)
    sim.add(first, second)
    noted = []
    while sim.scheduler.has_work():
        sim.step()
        noted.append((first.first_step_s, second.first_step_s))
    start_s = noted[0][0]
    assert noted == [(start_s, None)] * 4 + [(start_s, start_s + 4.0)]


def test_a_request_leaves_and_another_enters_between_two_steps() -> None:
    sim = Simulation(replace(CONFIG, max_batch_size=1), num_blocks=16)
    first, second = make_request(3, 1), make_request(3, 1)
    sim.add(first, second)
    assert chunks(sim.step()) == [(first.id, 0, 3)]
    assert chunks(sim.step()) == [(second.id, 0, 3)]


def test_decodes_run_in_every_step_however_much_prefill_there_is() -> None:
    sim = Simulation(CONFIG, num_blocks=200)
    decoding = make_request(3, 30)
    sim.add(decoding)
    sim.step()
    sim.add(*(make_request(100, 1) for _ in range(5)))
    for step in range(20):
        assert sim.step().chunks[0] == (decoding, 3 + step, 1, True)


def test_an_endless_prompt_lets_newcomers_in_and_still_gets_half_the_budget() -> None:
    sim = Simulation(CONFIG, num_blocks=500)
    endless = make_request(1_000, 1)
    sim.add(endless)
    sim.step()
    done = 16
    for _ in range(20):
        newcomer = make_request(6, 1)
        sim.add(newcomer)
        sim.step()
        assert newcomer.status is RequestStatus.FINISHED, "first token in its first step"
        assert endless.num_computed_tokens >= done + 8
        done = endless.num_computed_tokens
    assert done == 16 + 20 * 10


def test_newcomers_cannot_hold_an_endless_prompt_up() -> None:
    sim = Simulation(replace(CONFIG, max_batch_size=8), num_blocks=1_000)
    endless = make_request(1_000, 1)
    sim.add(endless)
    sim.step()
    for step in range(1, 20):
        sim.add(*(make_request(30, 1) for _ in range(2)))
        sim.step()
        assert endless.num_computed_tokens >= 16 + 8 * step


def test_an_endless_newcomer_leaves_half_the_budget_to_those_behind_it() -> None:
    sim = Simulation(CONFIG, num_blocks=1_000)
    endless, behind = make_request(1_000, 1), make_request(30, 1)
    sim.add(endless, behind)
    assert chunks(sim.step()) == [(behind.id, 0, 8), (endless.id, 0, 8)]


def test_endless_prompts_take_turns() -> None:
    sim = Simulation(CONFIG, num_blocks=500)
    first, second = make_request(600, 1), make_request(600, 1)
    sim.add(first, second)
    for _ in range(20):
        sim.step()
    assert abs(first.num_computed_tokens - second.num_computed_tokens) <= 32


def test_ordinary_prompts_are_finished_in_order() -> None:
    sim = Simulation(CONFIG, num_blocks=100)
    requests = [make_request(40, 1) for _ in range(4)]
    sim.add(*requests)
    sim.run()
    assert [sim.finish_step[r] for r in requests] == [3, 5, 8, 10]


def test_a_request_that_can_never_fit_is_refused_and_the_next_one_is_fine() -> None:
    scheduler = Scheduler(EngineConfig(block_size=16, max_batch_tokens=512), num_blocks=4, max_model_len=1024)
    for prompt, max_tokens, limit in ((64, 2, "KV cache"), (1_000, 25, "context")):
        with pytest.raises(ContextLengthExceeded, match=limit):
            scheduler.add(make_request(prompt, max_tokens))
    scheduler.add(make_request(64, 1))
    assert len(scheduler.schedule().chunks) == 1


def test_the_context_is_filled_to_its_last_token() -> None:
    scheduler = Scheduler(EngineConfig(max_batch_tokens=512), num_blocks=100, max_model_len=64)
    scheduler.add(make_request(60, 4))
    with pytest.raises(ContextLengthExceeded):
        scheduler.add(make_request(60, 5))


def test_two_prompts_of_sixty_percent_of_the_pool_run_one_after_the_other() -> None:
    sim = Simulation(replace(CONFIG, max_batch_tokens=512), num_blocks=40)
    requests = [make_request(90, 6), make_request(90, 6)]
    sim.add(*requests)
    assert sim.run() == 12
    assert [r.num_preemptions for r in requests] == [0, 0]


def test_a_failed_step_is_planned_again() -> None:
    sim = Simulation(CONFIG, num_blocks=16)
    sim.add(make_request(30, 3), make_request(3, 3))
    sim.step()
    failed = sim.failed_step(culprit=False)
    assert chunks(sim.schedule()) == chunks(failed)


def test_after_a_failed_step_the_culprit_leaves_and_the_others_go_on() -> None:
    sim = Simulation(CONFIG, num_blocks=16)
    requests = [make_request(3, 3) for _ in range(3)]
    sim.add(*requests)
    sim.step()
    sim.failed_step(culprit=True)
    assert [r.status for r in requests] == [RequestStatus.RUNNING, RequestStatus.FINISHED, RequestStatus.RUNNING]
    assert sim.run() == 1


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("cancel_at", range(12))
def test_cancelled_at_any_step_a_request_gives_everything_back(cancel_at: int, caching: bool) -> None:
    sim = Simulation(replace(CONFIG, enable_prefix_caching=caching), num_blocks=20)
    victim, neighbour = make_request(40, 6), make_request(10, 8)
    sim.add(victim, neighbour)
    for _ in range(cancel_at):
        sim.step()
    sim.finish(victim)
    sim.finish(victim)
    sim.run()
    stats = sim.scheduler.stats()
    assert stats.free_blocks + stats.cached_blocks == stats.total_blocks
    assert len(neighbour.output_token_ids) == 8


def test_cancelled_between_schedule_and_advance_a_request_gives_everything_back() -> None:
    sim = Simulation(CONFIG, num_blocks=20)
    victim, neighbour = make_request(6, 6), make_request(6, 6)
    sim.add(victim, neighbour)
    plan = sim.schedule()
    sim.finish(victim)
    sim.scheduler.advance(plan)
    assert (victim.num_computed_tokens, neighbour.num_computed_tokens) == (0, 6)


# Prefix cache


def test_a_prompt_sent_again_starts_from_the_cache() -> None:
    sim = Simulation(CONFIG, num_blocks=20)
    prompt = list(range(14))
    for expected in (0, 12):
        request = make_request(prompt, 1)
        sim.add(request)
        assert chunks(sim.step()) == [(request.id, expected, 14 - expected)]
        assert request.num_cached_tokens == expected
    stats = sim.scheduler.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (28, 12)


def test_a_prompt_of_whole_blocks_sent_again_still_computes_its_last_token() -> None:
    sim = Simulation(CONFIG, num_blocks=20)
    for expected in (0, 8, 8):
        request = make_request(range(12), 3)
        sim.add(request)
        sim.run()
        assert request.num_cached_tokens == expected


def test_what_was_generated_is_found_by_the_next_turn_of_a_conversation() -> None:
    sim = Simulation(CONFIG, num_blocks=20)
    first = make_request(range(6), 7)
    sim.add(first)
    sim.run()
    second = make_request([*range(6), *first.output_token_ids, 99, 98], 1)
    sim.add(second)
    sim.run()
    assert second.num_cached_tokens == 12


def test_a_prefix_is_not_found_before_it_is_computed() -> None:
    sim = Simulation(CONFIG, num_blocks=20)
    sim.add(make_request(range(12), 2))
    sim.failed_step(culprit=False)
    other = make_request([*range(12), 77], 2)
    sim.add(other)
    sim.schedule()
    assert not other.block_ids, "waits for the blocks that this step computes"


def test_requests_of_the_same_prefix_that_arrive_together_compute_it_once() -> None:
    sim = Simulation(replace(CONFIG, max_batch_size=10, max_batch_tokens=64), num_blocks=100)
    requests = [make_request([*range(16), 100 + i], 4) for i in range(10)]
    sim.add(*requests)
    assert len(sim.step().chunks) == 1
    assert [chunk.num_tokens for chunk in sim.step().chunks] == [1] * 10
    assert sim.scheduler.stats().used_blocks == 4 + 10
    assert [r.num_cached_tokens for r in requests] == [0] + [16] * 9


def test_shared_blocks_count_once_against_the_pool() -> None:
    sim = Simulation(replace(CONFIG, max_batch_tokens=64), num_blocks=14)
    requests = [make_request([*range(40), 100 + i], 4) for i in range(4)]  # 11 blocks each, 10 of them the same
    sim.add(*requests)
    sim.step()
    assert len(sim.step().chunks) == 4


def test_switched_off_the_cache_keeps_and_finds_nothing() -> None:
    sim = Simulation(replace(CONFIG, enable_prefix_caching=False), num_blocks=20)
    for _ in range(2):
        request = make_request(range(14), 1)
        sim.add(request)
        sim.run()
        assert request.num_cached_tokens == 0
    stats = sim.scheduler.stats()
    assert (stats.free_blocks, stats.cached_blocks, stats.prefix_queries) == (20, 0, 0)


def test_embeddings_and_scored_tokens_are_computed_not_found() -> None:
    sim = Simulation(CONFIG, num_blocks=40, sample=lambda _: None)
    sim.add(make_request(range(14), 1))
    sim.run()
    for kind, score_start, expected in (("embed", 0, 0), ("score", 10, 8), ("score", 1, 0), ("score", 13, 12)):
        request = make_request(range(14), 0)
        request.kind, request.score_start = kind, score_start  # type: ignore[assignment]  # kind is a Literal
        sim.add(request)
        sim.step()
        assert request.num_cached_tokens == expected


def test_a_resumed_request_goes_on_behind_its_output_and_finds_its_prefix() -> None:
    sim = Simulation(CONFIG, num_blocks=20)
    first = make_request(range(6), 8)
    sim.add(first)
    sim.run()
    resumed = make_request(range(6), 8, output=first.output_token_ids[:5])
    sim.add(resumed)
    assert chunks(sim.step()) == [(resumed.id, 8, 3)]
    sim.run()
    assert resumed.output_token_ids == first.output_token_ids
    assert resumed.num_cached_tokens == 6, "of the prompt"


def test_a_token_not_read_yet_keeps_its_block_out_of_the_cache_until_it_is() -> None:
    scheduler = Scheduler(CONFIG, num_blocks=20)
    request = make_request(range(7), 8)
    scheduler.add(request)
    scheduler.advance(scheduler.schedule())
    request.output_token_ids.append(UNKNOWN_TOKEN)
    scheduler.advance(scheduler.schedule())
    assert (request.num_computed_tokens, request.num_indexed_blocks) == (8, 1)
    request.output_token_ids[-1:] = [50, 51]
    scheduler.advance(scheduler.schedule())
    assert request.num_indexed_blocks == 2


# Forks


@pytest.mark.parametrize("caching", [True, False])
def test_a_child_shares_the_parents_full_prompt_blocks_and_computes_the_rest(caching: bool) -> None:
    sim = Simulation(replace(CONFIG, enable_prefix_caching=caching), num_blocks=20)
    parent, child = make_request(range(10), 4), make_request(range(10), 4)
    sim.add(parent)
    sim.step()
    sim.fork(parent, child)
    plan = sim.step()
    assert chunks(plan) == [(parent.id, 10, 1), (child.id, 8, 2)]
    assert child.block_ids[:2] == parent.block_ids[:2]
    assert child.block_ids[2] != parent.block_ids[2]
    sim.finish(parent)
    sim.run()


def test_a_child_outlives_its_parent_before_it_ran() -> None:
    sim = Simulation(replace(CONFIG, enable_prefix_caching=False, max_batch_size=1), num_blocks=20)
    parent, child = make_request(range(10), 4), make_request(range(10), 4)
    sim.add(parent)
    sim.step()
    sim.fork(parent, child)
    sim.finish(parent)
    assert sim.scheduler.stats().used_blocks == 2
    assert chunks(sim.step()) == [(child.id, 8, 2)]


@pytest.mark.parametrize("tier", TIERS)
def test_a_waiting_child_keeps_nobody_out_of_the_pool(tier: Tier) -> None:
    sim = Simulation(replace(CONFIG, enable_prefix_caching=False), num_blocks=4)
    parent, whole = make_request(range(10), 1, tier=tier), make_request(13, 4, tier=tier)
    child = make_request(range(10), 1, tier=tier)
    sim.add(parent, whole)
    plan = sim.schedule()
    sim.compute(plan.chunks)
    sim.scheduler.advance(plan)
    sim.fork(parent, child)
    sim.finish(parent)
    sim.run()
    assert len(whole.output_token_ids) == 4
    assert len(child.output_token_ids) == 1


# Static batches


def static(**settings: Any) -> EngineConfig:
    return replace(CONFIG, policy="static", **settings)


def test_a_static_batch_runs_to_its_end_with_nobody_entering() -> None:
    sim = Simulation(static(max_batch_size=2, max_wait_ms=0.0), num_blocks=40)
    first, second, third = make_request(5, 2), make_request(5, 6), make_request(5, 2, tier="batch")
    sim.add(first, second, third)
    assert sim.run() == 6 + 2
    assert sim.finish_step[third] == 8


def test_a_static_batch_waits_to_fill_but_no_longer_than_max_wait() -> None:
    now = [100.0]
    sim = Simulation(static(max_wait_ms=50.0), num_blocks=40, clock=lambda: now[0])
    sim.add(make_request(5, 2))
    assert not sim.step().chunks
    assert sim.scheduler.wait_s() == pytest.approx(0.05)
    now[0] += 0.049
    sim.add(make_request(5, 2))
    assert not sim.step().chunks
    now[0] += 0.0011
    assert sim.scheduler.wait_s() == 0.0
    assert len(sim.step().chunks) == 2


def test_a_static_batch_starts_when_it_is_full_or_no_more_would_fit() -> None:
    for num_blocks, prompts in ((40, [5] * 4), (4, [6, 9])):
        sim = Simulation(static(), num_blocks=num_blocks)
        sim.add(*(make_request(prompt, 2) for prompt in prompts))
        assert len(sim.step().chunks) >= 1


def test_a_static_batch_prefills_all_before_it_ends() -> None:
    sim = Simulation(static(max_batch_tokens=8), num_blocks=40)
    sim.add(*(make_request(20, 2) for _ in range(4)))
    sim.step()
    assert sim.scheduler.stats().running_realtime == 4
    sim.run()


# What the engine asks


def test_room_counts_free_slots_and_a_few_that_may_wait() -> None:
    sim = Simulation(EngineConfig(max_batch_size=16, max_batch_tokens=64, block_size=4), num_blocks=1_000)
    assert sim.scheduler.room("realtime") == 18
    sim.add(*(make_request(4, 8) for _ in range(10)))
    assert sim.scheduler.room("realtime") == 8
    sim.step()
    assert sim.scheduler.room("realtime") == 8
    sim.add(*(make_request(4, 8) for _ in range(8)))
    sim.step()
    assert sim.scheduler.room("realtime") == 0


def test_room_is_bounded_by_blocks() -> None:
    sim = Simulation(EngineConfig(max_batch_size=16, max_batch_tokens=64, block_size=4), num_blocks=40)
    for _ in range(30):
        request = make_request(30, 11)  # ten blocks
        sim.add(request)
        sim.finish(request)
    assert 3 <= sim.scheduler.room("realtime") <= 5
    sim.add(*(make_request(30, 11) for _ in range(4)))
    sim.step()
    assert sim.scheduler.room("realtime") <= 1


def test_room_lets_one_in_where_nothing_waits_and_a_slot_is_free() -> None:
    sim = Simulation(CONFIG, num_blocks=10)
    sim.add(make_request(36, 4))
    sim.step()
    assert sim.scheduler.room("realtime") == 1


def test_room_is_what_the_next_static_batch_lacks() -> None:
    sim = Simulation(static(max_wait_ms=0.0), num_blocks=40)
    sim.add(make_request(5, 4))
    sim.step()
    assert sim.scheduler.room("batch") == 4
    sim.add(make_request(5, 4))
    assert sim.scheduler.room("batch") == 3


def test_waste_is_the_end_of_each_last_block() -> None:
    sim = Simulation(CONFIG, num_blocks=20)
    sim.add(make_request(5, 4), make_request(8, 4))
    sim.step()
    stats = sim.scheduler.stats()
    assert (stats.allocated_slots, stats.wasted_slots, stats.used_blocks) == (16, 3, 4)


def calls_of_a_step(num_waiting: int) -> int:
    """Python calls made to plan and advance steps with a full batch, one request leaving and one entering."""
    sim = Simulation(EngineConfig(max_batch_size=8, max_batch_tokens=64, block_size=4), num_blocks=200)
    sim.add(*(make_request(4, 50, source=str(i % 7)) for i in range(8 + num_waiting)))
    sim.step()
    calls = 0

    def count(_frame: object, event: str, _arg: object) -> None:
        nonlocal calls
        calls += event == "call"

    for _ in range(5):
        leaver = next(r for r in sim.live if r.status is RequestStatus.RUNNING)
        sys.setprofile(count)
        sim.scheduler.finish(leaver)
        plan = sim.scheduler.schedule()
        sim.scheduler.advance(plan)
        sys.setprofile(None)
        for chunk in plan.chunks:
            if chunk.last:
                chunk.request.output_token_ids.append(1)
        sim.live.remove(leaver)
    return calls


def test_a_step_does_as_much_work_for_ten_waiting_as_for_ten_thousand() -> None:
    few, many = calls_of_a_step(10), calls_of_a_step(10_000)
    assert many <= few * 1.1


def test_cancelling_thousands_that_wait_leaves_nothing_behind() -> None:
    sim, before = Simulation(CONFIG, num_blocks=20), num_alive(Request)
    requests = [make_request(4, 4, source=str(i % 3)) for i in range(3_000)]
    for request in requests:
        sim.scheduler.add(request)
    for request in requests[1:]:
        sim.scheduler.finish(request)
    assert (sim.scheduler.stats().waiting_realtime, sim.scheduler.stats().num_held) == (1, 1)
    first = requests[0]
    del request, requests
    assert num_alive(Request) - before < 300
    assert [chunk.request for chunk in sim.scheduler.schedule().chunks] == [first]


def test_finished_requests_are_not_kept() -> None:
    sim, before = Simulation(CONFIG, num_blocks=20), num_alive(Request)
    sim.add(make_request(4, 2))
    sim.run()
    sim.first_token_step.clear()
    sim.finish_step.clear()
    assert num_alive(Request) <= before
    assert not sim.scheduler.has_work()
