"""Who waits before the engine, and who is next: least served source first, early deadlines first within one."""

from __future__ import annotations

from collections import Counter
from itertools import count

import pytest

from producer.errors import Cancelled
from producer.keys import Tier
from tests.fakes import FakeDetokenizer
from tests.memory import num_alive
from tests.scheduling import make_request
from worker import ahead as module
from worker.ahead import TURN, WaitingAhead
from worker.outputs import Outputs
from worker.registry import ActiveRequest, Registry
from worker.stream.consumer import Entry
from worker.stream.delivery import Delivery

NUMBERS = count(1)


def active(source: str = "", tier: Tier = "realtime", deadline_at_s: float | None = None, body: bytes = b"x" * 40) -> ActiveRequest:
    request = ActiveRequest(Delivery(Entry(tier, f"1000-{next(NUMBERS)}", {b"id": b"x", b"json": body})), source=source)
    request.deadline_at_s = deadline_at_s
    return request


def ahead_of(*requests: ActiveRequest, capacity: int = 1000) -> WaitingAhead:
    ahead = WaitingAhead(capacity)
    for request in requests:
        ahead.push(request)
    return ahead


def take(ahead: WaitingAhead, realtime: int = 0, batch: int = 0) -> list[ActiveRequest]:
    return ahead.take({"realtime": realtime, "batch": batch})


def generate(request: ActiveRequest, num_tokens: int) -> None:
    """The engine has it, and has generated so many tokens for it."""
    request.outputs = Outputs("x", [make_request(4, 8)], lambda item: FakeDetokenizer(item.params))
    request.outputs.first.push(list(range(num_tokens)), None, finished=True)


def test_sources_take_turns_and_an_early_deadline_is_first_in_its_own() -> None:
    flood = [active("a") for _ in range(20)]
    others = [active("b") for _ in range(3)]
    urgent = active("a", deadline_at_s=5.0)
    taken = take(ahead_of(*flood, *others, urgent), realtime=8)
    assert urgent is next(request for request in taken if request.source == "a")
    assert set(others) < set(taken)
    assert [request for request in taken if request in flood] == flood[:4]


def test_generated_tokens_are_charged_and_so_is_who_did_not_wait() -> None:
    ahead = WaitingAhead(1000)
    greedy = active("greedy")
    ahead.pass_by(greedy)
    generate(greedy, 400)
    waiting = [active("greedy") for _ in range(5)] + [active("modest") for _ in range(5)]
    for request in waiting:
        ahead.push(request)
    first = take(ahead, realtime=1) + take(ahead, realtime=1)
    generate(first[0], 10_000)
    assert [request.source for request in first + take(ahead, realtime=5)].count("greedy") == 5


def test_weights_are_shares_of_service() -> None:
    ahead = WaitingAhead(1000)
    ahead.weights["gold"] = 3.0
    for _ in range(12):
        for source in ("gold", "lead"):
            ahead.push(active(source))
    assert Counter(request.source for request in take(ahead, realtime=8)) == {"gold": 6, "lead": 2}


def test_realtime_is_taken_first_and_no_more_than_a_turn() -> None:
    ahead = ahead_of(*(active(tier=tier) for tier in ("batch", "realtime") for _ in range(10)))
    taken = take(ahead, realtime=99, batch=99)
    assert [request.delivery.tier for request in taken] == ["realtime"] * 10 + ["batch"] * (TURN - 10)
    assert (ahead.count("realtime"), ahead.count("batch"), len(ahead)) == (0, 20 - TURN, 20 - TURN)


@pytest.mark.parametrize("how", ["dropped", "ended"])
def test_who_ended_meanwhile_is_passed_over(how: str) -> None:
    registry = Registry()
    ended, other = (registry.enter(active().delivery) for _ in range(2))
    ahead = ahead_of(ended, other)
    if how == "dropped":
        registry.drop(ended)
    else:
        ended.end = Cancelled("cancelled")
    assert ahead.all() == [other]
    assert take(ahead, realtime=5) == [other]
    assert len(ahead) == 0


@pytest.mark.parametrize("how", ["purged", "lost", "read again"])
def test_entry_that_comes_back_while_the_old_one_is_held_waits_in_its_place(how: str) -> None:
    registry = Registry()
    first, back, last = (registry.enter(active().delivery) for _ in range(3))
    ahead = ahead_of(first, back, last)
    if how != "read again":
        registry.drop(back)
    if how == "purged":
        ahead.purge()
    again = registry.enter(Delivery(back.delivery.entry))
    ahead.push(again)
    assert take(ahead, realtime=5) == [first, again, last]
    assert len(ahead) == 0


def test_as_many_are_wanted_as_find_place(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry()
    waiting = [registry.enter(active().delivery) for _ in range(5)]
    ahead = ahead_of(*waiting, capacity=3)
    assert [ahead.wanted("realtime", room) for room in (0, 2, 4)] == [0, 0, 2]
    assert ahead.wanted("batch", 0) == 3
    for request in waiting[:3]:
        registry.drop(request)
    assert ahead.wanted("realtime", 0) == 1
    monkeypatch.setattr(module, "MAX_BYTES", 50)
    assert ahead.wanted("realtime", 100) == 0


def test_the_latest_half_is_given_to_others_and_a_single_one() -> None:
    waiting, single = [active() for _ in range(5)], active(tier="batch")
    assert ahead_of(*reversed(waiting), single).latest() == [*waiting[2:], single]
    assert ahead_of().latest() == []


def test_those_that_left_are_forgotten_when_they_ended() -> None:
    ahead, registry, before = WaitingAhead(0), Registry(), num_alive(ActiveRequest)
    for _ in range(2_000):
        request = registry.enter(active().delivery)
        ahead.pass_by(request)
        registry.drop(request)
    assert num_alive(ActiveRequest) - before < 500
