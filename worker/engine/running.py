"""The requests in the batch. Pure bookkeeping: neither torch nor redis."""

from __future__ import annotations

from collections.abc import Iterator

from producer.keys import Tier
from worker.engine.request import Request

MAX_PREEMPTIONS = 3  # a request that was preempted this often is chosen only if there is no other


class RunningSet:
    """Running requests in the order of admission, counted by tier."""

    def __init__(self) -> None:
        self.count: dict[Tier, int] = {"realtime": 0, "batch": 0}
        self.guaranteed_batch: Request | None = None  # the one batch request that keeps its tier from starving
        self._requests: dict[Request, None] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request) -> None:
        self._requests[request] = None
        self.count[request.tier] += 1
        if request.guaranteed and request.tier == "batch":
            self.guaranteed_batch = request

    def remove(self, request: Request) -> None:
        del self._requests[request]
        self.count[request.tier] -= 1
        if request is self.guaranteed_batch:
            self.guaranteed_batch = None

    def eldest_best_effort(self, max_blocks: int) -> Request | None:
        """The earliest arrival of those that may be preempted and need at most ``max_blocks``."""
        candidates = (request for request in self._best_effort() if request.max_blocks <= max_blocks)
        return min(candidates, key=_arrival, default=None)

    def victim(self, spared: Request | None) -> Request | None:
        """The request to preempt: the latest arrival, unless it was preempted too often. None if there is no other candidate."""
        candidates = (request for request in self._best_effort() if request is not spared)
        return max(candidates, key=_susceptibility, default=None)

    def _best_effort(self) -> Iterator[Request]:
        return (request for request in self._requests if not request.guaranteed)


def _arrival(request: Request) -> tuple[int, int]:
    return request.sort_key[1:]


def _susceptibility(request: Request) -> tuple[bool, int, int]:
    return (request.num_preemptions < MAX_PREEMPTIONS, *request.sort_key[1:])
