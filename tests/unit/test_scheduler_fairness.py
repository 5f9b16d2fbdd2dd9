"""Who is next: sources by virtual token counters, deadlines and arrival within a source."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scheduling import Simulation, make_request
from worker.engine import fairness
from worker.engine.config import EngineConfig
from worker.engine.fairness import OUTPUT_TOKEN_COST, PROMPT_TOKEN_COST, FairQueue
from worker.engine.queues import WaitingQueue
from worker.engine.request import Request, RequestStatus

CONFIG = EngineConfig(max_batch_size=4, max_batch_tokens=32, block_size=4)


def served(sim: Simulation) -> Counter[str]:
    """Weighted tokens that each source got."""
    service: Counter[str] = Counter()
    for request in [*sim.live, *sim.finish_step]:
        if request in sim.first_token_step:
            service[request.source] += int(PROMPT_TOKEN_COST * request.num_prompt_tokens)
            service[request.source] += int(OUTPUT_TOKEN_COST * len(request.output_token_ids))
    return service


def finish(queue: WaitingQueue, request: Request) -> None:
    was = request.status
    request.move_to(RequestStatus.FINISHED)
    queue.note_finished(request, was)


# Within a source


def test_earliest_deadline_first_then_arrival() -> None:
    sim = Simulation(replace(CONFIG, max_batch_size=1), num_blocks=40)
    plain, late, soon, plain_too = (make_request(4, 1, deadline_at_s=at_s) for at_s in (None, 9.0, 3.0, None))
    sim.add(plain, late, soon, plain_too)
    sim.run()
    assert list(sim.finish_step) == [soon, late, plain, plain_too]


def test_a_resumed_request_stands_where_it_arrived() -> None:
    sim = Simulation(replace(CONFIG, max_batch_size=1), num_blocks=40)
    newer, resumed = make_request(4, 1, arrival=7), make_request(4, 3, arrival=5, output=[1, 2])
    sim.add(newer, resumed)
    sim.run()
    assert list(sim.finish_step) == [resumed, newer]


# Among sources


def test_ten_sources_one_flooding_get_the_same_service() -> None:
    sim = Simulation(CONFIG, num_blocks=200)
    sources = [f"s{i}" for i in range(10)]
    flood = [make_request(16, 8, source="s0") for _ in range(1_000)]
    sim.add(*flood)
    bound = 2 * CONFIG.max_batch_size * int(PROMPT_TOKEN_COST * 16 + OUTPUT_TOKEN_COST * 8)
    for step in range(400):
        for source in sources[1:]:
            if sum(r.source == source and r.status is RequestStatus.WAITING for r in sim.live) < 2:
                sim.add(make_request(16, 8, source=source))
        sim.step()
        if step > 40:
            service = served(sim)
            assert max(service.values()) - min(service[source] for source in sources) <= bound


def test_short_and_long_requests_weigh_by_their_tokens() -> None:
    sim = Simulation(replace(CONFIG, max_batch_size=2), num_blocks=200)
    sim.add(*(make_request(4, 2, source="short") for _ in range(400)), *(make_request(40, 20, source="long") for _ in range(40)))
    for _ in range(250):
        sim.step()
    service = served(sim)
    assert abs(service["short"] - service["long"]) <= 2 * 2 * (40 + 2 * 20)


def test_a_source_of_twice_the_weight_gets_twice_the_service() -> None:
    sim = Simulation(replace(CONFIG, source_weights={"gold": 2.0}), num_blocks=200)
    for source in ("gold", "plain"):
        sim.add(*(make_request(16, 8, source=source) for _ in range(200)))
    for _ in range(300):
        sim.step()
    service = served(sim)
    assert service["gold"] / service["plain"] == pytest.approx(2.0, rel=0.15)


def test_a_source_that_comes_back_has_saved_nothing_up() -> None:
    sim = Simulation(replace(CONFIG, max_batch_size=1), num_blocks=40)
    sim.add(make_request(4, 1, source="idle"))
    sim.add(*(make_request(4, 4, source="busy") for _ in range(60)))
    for _ in range(120):
        sim.step()
    sim.add(*(make_request(4, 4, source="idle") for _ in range(30)))
    before = served(sim)
    for _ in range(80):
        sim.step()
    gained = served(sim) - before
    assert abs(gained["idle"] - gained["busy"]) <= 2 * (4 + 2 * 4)


def test_cached_prompt_tokens_are_not_charged() -> None:
    sim = Simulation(CONFIG, num_blocks=40)
    for expected in (33 + 2, 33 + 2 + 1 + 2):
        request = make_request([5] * 33, 1, source="a")
        sim.add(request)
        sim.run()
        assert request.account is not None
        assert request.account.served == expected


def test_idle_sources_are_forgotten_but_not_too_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fairness, "MAX_IDLE_SOURCES", 10)
    queue = FairQueue({})
    for i in range(100):
        request = make_request(4, 1, source=f"user-{i}")
        queue.push(request)
        assert queue.peek() is request
        queue.pop()
    assert queue.peek() is None
    assert len(queue._accounts) == 10


@settings(deadline=None)
@given(st.data())
def test_the_queue_counts_and_orders_under_any_use(data: st.DataObject) -> None:
    queue = WaitingQueue({})
    waiting: list[Request] = []
    for _ in range(data.draw(st.integers(1, 60))):
        action = data.draw(st.sampled_from(["push", "push", "pop", "finish"]))
        if action == "push":
            request = make_request(4, 1, source=data.draw(st.sampled_from("ab")), arrival=data.draw(st.integers(1, 9)))
            request.sort_key = (data.draw(st.sampled_from([1.0, 2.0])), request.arrival, int(request.id[1:]))
            request.max_blocks = 3
            if data.draw(st.booleans()):
                request.status = RequestStatus.PREEMPTED
            queue.push(request)
            waiting.append(request)
        elif waiting and action == "pop":
            request = queue.pop()
            waiting.remove(request)
            rivals = [
                r for r in waiting if r.status is request.status and (r.source == request.source or r.status is not RequestStatus.WAITING)
            ]
            assert all(request.sort_key <= r.sort_key for r in rivals)
            assert request.status is RequestStatus.PREEMPTED or all(r.status is RequestStatus.WAITING for r in waiting)
        elif waiting:
            request = waiting.pop(data.draw(st.integers(0, len(waiting) - 1)))
            finish(queue, request)
        assert len(queue) == len(waiting)
        assert queue.num_blocks == 3 * len(waiting)
        assert (queue.peek() is None) == (not waiting)
