"""Where requests wait. Pure bookkeeping: neither torch nor redis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from producer.keys import Tier
from worker.engine.fairness import FairQueue, WaiterHeap
from worker.engine.request import Request, RequestStatus


class WaitingQueue:
    """The waiting requests of a tier: those that were preempted first, then the least served source's.

    Within a source, and among the preempted, the earliest deadline comes first, then the earliest arrival. A
    preempted request keeps its place: it was chosen once, and need not be chosen again.
    """

    def __init__(self, source_weights: Mapping[str, float]) -> None:
        self._returning: WaiterHeap[Request] = WaiterHeap()
        self._new: FairQueue[Request] = FairQueue(source_weights)
        self._num_new = 0
        self.num_blocks = 0  # most blocks that the waiting requests will need

    def __len__(self) -> int:
        return self._num_new + len(self._returning)

    def push(self, request: Request, *, lift: bool = True) -> None:
        """Let a request wait. Pass ``lift`` (see `FairQueue.push`) unless it was taken out only a moment ago."""
        self.num_blocks += request.max_blocks
        if request.status is RequestStatus.WAITING:
            self._num_new += 1
            request.account = self._new.push(request, lift=lift)
        else:
            self._returning.push(request)

    def peek(self) -> Request | None:
        """The next request; None if nothing waits."""
        return self._returning.peek() or self._new.peek()

    def pop(self) -> Request:
        """Take out what `peek` returns."""
        if self._returning.peek() is not None:
            request = self._returning.pop()
        else:
            request = self._new.pop()
            self._num_new -= 1
        self.num_blocks -= request.max_blocks
        return request

    def note_finished(self, request: Request, was: RequestStatus) -> None:
        """A waiting request, until now in status ``was``, has just finished."""
        self.num_blocks -= request.max_blocks
        if was is RequestStatus.WAITING:
            assert request.account is not None
            self._num_new -= 1
            request.account.waiting.note_finished()
        else:
            self._returning.note_finished()


class WaitingQueues:
    """All waiting requests, by tier.

    Batch requests that need more blocks than realtime leaves to their tier wait apart, so that they block no others
    while realtime is busy.

    Args:
        batch_blocks: blocks that realtime leaves to the batch tier.
    """

    def __init__(self, source_weights: Mapping[str, float], batch_blocks: int) -> None:
        self._batch_blocks = batch_blocks
        self.realtime = WaitingQueue(source_weights)
        self.batch = WaitingQueue(source_weights)
        self.oversized = WaitingQueue(source_weights)

    def __iter__(self) -> Iterator[WaitingQueue]:
        yield from (self.realtime, self.oversized, self.batch)

    def __len__(self) -> int:
        return len(self.realtime) + len(self.batch) + len(self.oversized)

    def of(self, request: Request) -> WaitingQueue:
        """The queue in which a request waits."""
        if request.tier == "realtime":
            return self.realtime
        return self.oversized if request.max_blocks > self._batch_blocks else self.batch

    def count(self, tier: Tier) -> int:
        """How many requests of a tier wait."""
        return len(self.realtime) if tier == "realtime" else len(self.batch) + len(self.oversized)

    def num_blocks(self, tier: Tier) -> int:
        """Most blocks that the waiting requests of a tier will need."""
        return self.realtime.num_blocks if tier == "realtime" else self.batch.num_blocks + self.oversized.num_blocks
