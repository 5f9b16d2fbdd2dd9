"""Virtual token counters: which source is served next. Pure bookkeeping: neither torch nor redis.

After "Fairness in Serving Large Language Models" (Sheng et al. 2024): every source has a counter of the service it has
received, and the source with the least is served next. Prompt tokens are charged on admission, output tokens as they come.
A source that comes back is lifted to the least counter of those that wait, so that it cannot save up. Among
sources that always wait, the gap in service is bounded by twice what one full batch holds.

The same order is used twice: for the requests that wait in the engine, and for those that a worker holds beyond its
engine's room (`worker.ahead`).
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Mapping
from itertools import count
from typing import Generic, Protocol, TypeVar

from worker.engine.request import RequestStatus

PROMPT_TOKEN_COST = 1.0
OUTPUT_TOKEN_COST = 2.0  # an output token takes its own step
MAX_IDLE_SOURCES = 4096
_COMPACT_ABOVE = 64


class Waiter(Protocol):
    """A waiting request: its source, its order among those of the same source, and whether it still waits."""

    @property
    def source(self) -> str: ...
    @property
    def sort_key(self) -> tuple[float, int, int]: ...
    @property
    def status(self) -> RequestStatus: ...


W = TypeVar("W", bound=Waiter)


class WaiterHeap(Generic[W]):
    """Waiters in the order of their sort keys, and in order of arrival if their keys are equal.

    One that finishes is skipped when its turn comes (lazy deletion).
    """

    def __init__(self) -> None:
        self._entries: list[tuple[tuple[float, int, int], int, W]] = []
        self._tie_break = count()  # waiters themselves are not ordered
        self._num_dead = 0

    def __len__(self) -> int:
        return len(self._entries) - self._num_dead

    def push(self, request: W) -> None:
        heapq.heappush(self._entries, (request.sort_key, next(self._tie_break), request))

    def peek(self) -> W | None:
        """The first one; None if there is none."""
        while self._entries:
            request = self._entries[0][-1]
            if request.status is not RequestStatus.FINISHED:
                return request
            heapq.heappop(self._entries)
            self._num_dead -= 1
        return None

    def pop(self) -> W:
        """Take out what `peek` returns."""
        return heapq.heappop(self._entries)[-1]

    def note_finished(self) -> None:
        """One of these has just finished. Keeps the share of finished ones small, at O(1) each."""
        self._num_dead += 1
        if self._num_dead > _COMPACT_ABOVE and 2 * self._num_dead > len(self._entries):
            self._entries = [entry for entry in self._entries if entry[-1].status is not RequestStatus.FINISHED]
            heapq.heapify(self._entries)
            self._num_dead = 0


class SourceAccount(Generic[W]):
    """One source's waiting requests and the service it has received, in weighted tokens."""

    __slots__ = ("active", "output_cost", "prompt_cost", "served", "source", "waiting")

    def __init__(self, source: str, weight: float) -> None:
        self.source = source
        self.prompt_cost = PROMPT_TOKEN_COST / weight
        self.output_cost = OUTPUT_TOKEN_COST / weight
        self.served = 0.0
        self.waiting: WaiterHeap[W] = WaiterHeap()
        self.active = False  # one of those from which `FairQueue` chooses


class FairQueue(Generic[W]):
    """Waiting requests of many sources: the first of the least served source is next. O(log n) per operation.

    Args:
        weights: share of service of a source relative to the others; 1 where not named.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._accounts: dict[str, SourceAccount[W]] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()  # sources with nothing waiting, longest idle first
        self._active: list[tuple[float, int, SourceAccount[W]]] = []  # its `served` may lag behind the account's
        self._tie_break = count()
        self._last_served = 0.0

    def push(self, request: W, *, lift: bool = True) -> SourceAccount[W]:
        """Take a request in; returns its source's account. Pass ``lift`` unless it was only put aside for a moment."""
        least_served = self._least_served() if lift else 0.0  # first, because it may move the source itself to the idle ones
        account = self._account(request.source)
        if not account.waiting:
            account.served = max(account.served, least_served)
        account.waiting.push(request)
        if not account.active:
            self._activate(account)
        return account

    def peek(self) -> W | None:
        """The next request; None if nothing waits."""
        account = self._next_account()
        return None if account is None else account.waiting.peek()

    def pop(self) -> W:
        """Take out what `peek` returns."""
        account = self._next_account()
        assert account is not None
        return account.waiting.pop()

    def _account(self, source: str) -> SourceAccount[W]:
        account = self._accounts.get(source)
        if account is None:
            account = self._accounts[source] = SourceAccount(source, self._weights.get(source, 1.0))
        self._idle.pop(source, None)
        return account

    def _activate(self, account: SourceAccount[W]) -> None:
        account.active = True
        heapq.heappush(self._active, (account.served, next(self._tie_break), account))

    def _least_served(self) -> float:
        account = self._next_account()
        return self._last_served if account is None else account.served

    def _next_account(self) -> SourceAccount[W] | None:
        while self._active:
            served, tie_break, account = self._active[0]
            if account.waiting.peek() is None:
                self._deactivate(account)
            elif account.served > served:
                heapq.heapreplace(self._active, (account.served, tie_break, account))
            else:
                return account
        return None

    def _deactivate(self, account: SourceAccount[W]) -> None:
        heapq.heappop(self._active)
        account.active = False
        self._last_served = account.served
        self._idle[account.source] = None
        if len(self._idle) > MAX_IDLE_SOURCES:
            forgotten, _ = self._idle.popitem(last=False)
            del self._accounts[forgotten]
