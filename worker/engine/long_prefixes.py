"""Requests that share a long prefix: one computes it, the others wait for its blocks."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left

from producer.keys import Tier
from worker.engine.request import Request, RequestStatus
from worker.engine.scheduler import LONG_PREFILL_STEPS, Scheduler

Key = tuple[Tier, str, bytes]


class LongPrefixes:
    """Holds a request back from the scheduler while another one computes a long beginning of its prompt.

    The scheduler computes short prompts one after the other, and each finds in the cache what the previous one has computed. Long
    prompts take turns, so those that share a beginning would each compute it. A request waits only for one of its own tier and source
    with no later deadline: fairness and deadlines would have put it behind that one anyway.

    Those that are held have the status WAITING, but are not yet in the scheduler.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        config = scheduler.config
        self._scheduler = scheduler
        self._length = LONG_PREFILL_STEPS * config.max_batch_tokens
        self._is_on = config.enable_prefix_caching and config.policy == "continuous"
        self._leaders: dict[Key, Request] = {}
        self._held: dict[Request, list[tuple[int, Request]]] = {}  # by leader: (number of tokens shared with it, request)

    def add(self, request: Request) -> None:
        """Let a request begin, or wait for its leader. Raises `ContextLengthExceeded` if it can never fit."""
        if not self._is_on or request.max_cached_tokens <= self._length:
            self._scheduler.add(request)
            return
        self._scheduler.check_fits(request)
        key = self._key(request)
        leader = self._leaders.get(key)
        if leader is None:
            self._scheduler.add(request)
            self._leaders[key] = request
        elif _deadline_s(leader) <= _deadline_s(request) and not self._scheduler.waits_for_quiet(leader):
            self._held.setdefault(leader, []).append((_num_shared(leader, request), request))
        else:
            self._scheduler.add(request)

    def release(self) -> None:
        """Let the requests begin whose leader has computed the shared part. To be called before each step."""
        for key, leader in list(self._leaders.items()):
            leads = not self._scheduler.waits_for_quiet(leader)
            waiting, still = self._held.pop(leader, []), []
            for num_shared, request in waiting:
                if leads and num_shared > leader.num_computed_tokens:
                    still.append((num_shared, request))
                else:
                    self._scheduler.add(request)
            if still:
                self._held[leader] = still
            elif not leads or leader.num_computed_tokens >= leader.num_prompt_tokens - 1:
                del self._leaders[key]

    def finish(self, request: Request) -> None:
        """End a request, wherever it is. If it led others whose part it has not computed, the first of them now leads."""
        if self._discard(request):
            request.move_to(RequestStatus.FINISHED)
            return
        self._scheduler.finish(request)
        key = next((key for key, leader in self._leaders.items() if leader is request), None)
        if key is not None:
            del self._leaders[key]
            for num_shared, other in self._held.pop(request, ()):
                if num_shared > request.num_computed_tokens:
                    self.add(other)
                else:
                    self._scheduler.add(other)

    def num_held(self, tier: Tier) -> int:
        return sum(request.tier == tier for held in self._held.values() for _, request in held)

    def _discard(self, request: Request) -> bool:
        for held in self._held.values():
            for item in held:
                if item[1] is request:
                    held.remove(item)
                    return True
        return False

    def _key(self, request: Request) -> Key:
        return request.tier, request.source, array("q", request.prompt_token_ids[: self._length]).tobytes()


def _deadline_s(request: Request) -> float:
    return math.inf if request.deadline_at_s is None else request.deadline_at_s


def _num_shared(leader: Request, request: Request) -> int:
    """Number of leading tokens that both prompts share and that the request may find in the cache."""
    ours, theirs = request.prompt_token_ids, leader.prompt_token_ids
    most = min(len(ours), len(theirs) - 1, request.max_cached_tokens)
    return bisect_left(range(most), True, key=lambda i: ours[: i + 1] != theirs[: i + 1])
