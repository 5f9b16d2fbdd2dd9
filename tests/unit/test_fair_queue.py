"""The fair queue against a plain list, through any use: waiters of equal sort keys, cancelled ones, sources that come and go."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from worker.engine import fairness
from worker.engine.fairness import FairQueue, SourceAccount
from worker.engine.request import RequestStatus


@dataclass(eq=False)
class Item:
    source: str
    sort_key: tuple[float, int, int]
    status: RequestStatus = RequestStatus.WAITING


class Use(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.queue: FairQueue[Item] = FairQueue({"a": 2.0})
        self.waiting: dict[Item, SourceAccount[Item]] = {}  # in the order of `push`

    @rule(source=st.sampled_from("abc"), deadline=st.integers(0, 2), lift=st.booleans())
    def push(self, source: str, deadline: int, lift: bool) -> None:
        least_served = min((account.served for account in self.waiting.values()), default=0.0)
        comes_back = all(item.source != source for item in self.waiting)
        item = Item(source, (float(deadline), 0, 0))
        account = self.waiting[item] = self.queue.push(item, lift=lift)
        assert not (lift and comes_back) or account.served >= least_served, "it has saved up"

    @precondition(lambda self: self.waiting)
    @rule(num_tokens=st.integers(0, 3))
    def pop(self, num_tokens: int) -> None:
        item = self.queue.peek()
        assert item is not None
        assert self.queue.pop() is item
        account = self.waiting.pop(item)
        account.served += account.prompt_cost * num_tokens

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        item = data.draw(st.sampled_from(list(self.waiting)))
        item.status = RequestStatus.FINISHED
        self.waiting.pop(item).waiting.note_finished()

    @rule()
    def look(self) -> None:
        """Not after every step, because checking tidies up."""
        first = self.queue.peek()
        assert (first is None) == (not self.waiting)
        if first is not None:
            assert self.waiting[first].served == min(account.served for account in self.waiting.values())
            assert first is min((item for item in self.waiting if item.source == first.source), key=lambda item: item.sort_key)

    @rule()
    def take_all(self) -> None:
        while self.waiting:
            self.look()
            self.pop(1)
        self.look()
        assert self.queue._accounts.keys() == self.queue._idle.keys()
        assert len(self.queue._idle) <= fairness.MAX_IDLE_SOURCES

    @invariant()
    def each_source_that_waits_has_one_account_and_is_not_to_be_forgotten(self) -> None:
        assert all(account is self.queue._accounts[item.source] for item, account in self.waiting.items())
        assert self.queue._idle.keys().isdisjoint(item.source for item in self.waiting)


def test_next_is_the_first_of_the_least_served_source_through_any_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fairness, "MAX_IDLE_SOURCES", 1)
    monkeypatch.setattr(fairness, "_COMPACT_ABOVE", 2)
    run_state_machine_as_test(Use, settings=settings(deadline=None, stateful_step_count=30))
