"""Requests that share a prompt: one computes it, the others wait for its blocks."""

from __future__ import annotations

from collections.abc import Sequence

from producer.keys import Tier
from worker.engine.long_prefixes import LongPrefixes
from worker.engine.request import Request, RequestStatus
from worker.engine.scheduler import Scheduler


class Siblings:
    """Holds back the requests of one prompt until the first has computed it, so that it is computed once.

    Those that are held have the status WAITING, but are not yet in the scheduler.
    """

    def __init__(self, scheduler: Scheduler, prefixes: LongPrefixes) -> None:
        self._scheduler = scheduler
        self._prefixes = prefixes
        self._held: dict[Request, list[Request]] = {}  # by the request for which they wait

    def add(self, requests: Sequence[Request]) -> None:
        """Let requests of one prompt begin. Raises `ContextLengthExceeded` as the scheduler does; then none has begun."""
        for request in requests:  # continuations differ in length
            self._scheduler.check_fits(request)
        first, *others = requests
        self._prefixes.add(first)
        if self._worth_waiting(first):
            self._hold(first, others)
        else:
            for request in others:
                self._prefixes.add(request)

    def computed(self, first: Request) -> None:
        """A running request has computed its prompt: those that wait for it may share it. Does nothing if none wait."""
        for request in self._held.pop(first, ()):
            self._scheduler.fork(first, request)

    def ended(self, first: Request) -> None:
        """A request has ended: what it computed is in the prefix cache; if it computed nothing, the next one computes it."""
        held = self._held.pop(first, None)
        if held and first.num_computed_tokens < first.num_prompt_tokens:
            self._prefixes.add(held[0])
            self._hold(held[0], held[1:])
        else:
            for request in held or ():
                self._scheduler.add(request)

    def discard(self, request: Request) -> bool:
        """End a request that is held; False if it is not."""
        for held in self._held.values():
            if request in held:
                held.remove(request)
                request.move_to(RequestStatus.FINISHED)
                return True
        return False

    def num_held(self, tier: Tier) -> int:
        return sum(request.tier == tier for held in self._held.values() for request in held)

    def _hold(self, first: Request, others: list[Request]) -> None:
        if others:
            self._held[first] = others

    def _worth_waiting(self, first: Request) -> bool:
        """Not for less than a block, nor in a static batch, which no request may enter later. Scores are shared through the cache."""
        config = self._scheduler.config
        shares = first.kind == "generate" or config.enable_prefix_caching
        return shares and config.policy == "continuous" and first.max_cached_tokens >= config.block_size
