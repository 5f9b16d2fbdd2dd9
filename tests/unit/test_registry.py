"""What the registry says of the requests it holds, whatever has become of them."""

from __future__ import annotations

import math

import pytest

from producer.errors import Cancelled, HeadraceError
from producer.wire import Result
from tests.fakes import FakeDetokenizer
from tests.scheduling import make_request
from worker.outputs import Outputs
from worker.registry import ActiveRequest, Registry
from worker.stream.consumer import Entry
from worker.stream.delivery import Delivery


def entered(registry: Registry, entry_id: str = "1-0") -> ActiveRequest:
    return registry.enter(Delivery(Entry("realtime", entry_id, {b"id": b"x1", b"json": b"{}"})))


@pytest.mark.parametrize("end", [None, Cancelled("cancelled")])
@pytest.mark.parametrize("outcome", [None, Result(id="x1"), Cancelled("cancelled")])
def test_a_deadline_is_awaited_only_where_it_would_end_something(end: HeadraceError | None, outcome: Result | HeadraceError | None) -> None:
    registry = Registry()
    active = entered(registry)
    active.deadline_at_s, active.end, active.outcome = 5.0, end, outcome
    expired = list(registry.expired(now_s=6.0))
    assert expired == ([active] if end is None and outcome is None else [])
    assert registry.next_deadline_at_s() == (5.0 if expired else math.inf)


@pytest.mark.parametrize("loss", ["dropped", "dropped and entered anew", "ordered to end"])
def test_what_is_not_held_any_more_does_not_go_to_the_engine(loss: str) -> None:
    registry = Registry()
    active = entered(registry)
    if loss == "ordered to end":
        active.end = Cancelled("cancelled")
    else:
        registry.drop(active)
    if loss == "dropped and entered anew":
        entered(registry)
    request = make_request(4, 1)
    assert not registry.activate(active, Outputs("x1", [request], lambda _: FakeDetokenizer(request.params)))
    assert (registry.of(request), active.outputs) == (None, None)
