"""The fetch-ahead buffer: requests leased by this worker for which the engine has no room yet, in fairness order."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from producer.keys import TIERS, Tier
from worker.engine.fairness import FairQueue, SourceAccount
from worker.engine.request import RequestStatus
from worker.registry import ActiveRequest

TURN = 16  # requests that are begun and tokenised before the streams are read again
MAX_BYTES = 256 * 2**20  # of the entries of one tier
BYTES_PER_TOKEN = 4
_MIN_SETTLED = 256


@dataclass(slots=True, eq=False)
class HeldRequest:
    """One request's place in the buffer, and the account of the source to which it is charged.

    Attributes:
        num_bytes: size of its entry, by which its prompt is charged, because it is not tokenised yet.
        num_charged: output tokens charged so far.
    """

    active: ActiveRequest
    sort_key: tuple[float, int, int]
    num_bytes: int
    status: RequestStatus = RequestStatus.WAITING
    account: SourceAccount[HeldRequest] | None = field(default=None, repr=False)
    num_charged: int = 0

    @classmethod
    def of(cls, active: ActiveRequest) -> HeldRequest:
        deadline_at_s = math.inf if active.deadline_at_s is None else active.deadline_at_s
        return cls(active, (deadline_at_s, *active.delivery.entry.position), sum(map(len, active.delivery.fields.values())))

    @property
    def source(self) -> str:
        return self.active.source

    def charge(self) -> None:
        """Charge the output tokens that came since the last call."""
        outputs = self.active.outputs
        if outputs is not None and self.account is not None:
            num_tokens = outputs.num_tokens
            self.account.served += self.account.output_cost * (num_tokens - self.num_charged)
            self.num_charged = num_tokens


class HeldQueue:
    """The requests that wait in one tier."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.held: dict[ActiveRequest, HeldRequest] = {}
        self.num_bytes = 0
        self._queue: FairQueue[HeldRequest] = FairQueue(weights)

    def push(self, request: HeldRequest) -> None:
        request.account = self._queue.push(request)
        self.held[request.active] = request
        self.num_bytes += request.num_bytes

    def pop(self) -> HeldRequest | None:
        """Take out the next one, and charge its prompt; None if none waits."""
        if self._queue.peek() is None:
            return None
        request = self._queue.pop()
        self._forget(request)
        assert request.account is not None, "it was pushed"
        request.account.served += request.account.prompt_cost * request.num_bytes / BYTES_PER_TOKEN
        return request

    def purge(self) -> None:
        """Forget those that have ended or belong to another worker now."""
        for request in [request for request in self.held.values() if request.active.gone]:
            request.status = RequestStatus.FINISHED
            assert request.account is not None, "it was pushed"
            request.account.waiting.note_finished()
            self._forget(request)

    def _forget(self, request: HeldRequest) -> None:
        del self.held[request.active]
        self.num_bytes -= request.num_bytes


class WaitingAhead:
    """Chooses the next of the waiting requests. Used by the fetching thread, except `count`.

    The first request of the least served source is next, as in the engine, which only orders the few requests that wait there.
    Service is counted here again, because the engine does not know the requests that wait here: prompts by
    their size when they leave, output tokens as they come.

    Args:
        capacity: how many may wait in a tier. Any that are delivered beyond it are kept too.
    """

    def __init__(self, capacity: int) -> None:
        self.weights: dict[str, float] = {}
        self._capacity = capacity
        self._queues = {tier: HeldQueue(self.weights) for tier in TIERS}
        self._left: list[HeldRequest] = []  # have left the buffer, and may still be generating
        self._settle_above = _MIN_SETTLED

    def __len__(self) -> int:
        return sum(map(self.count, TIERS))

    def count(self, tier: Tier) -> int:
        return len(self._queues[tier].held)

    def wanted(self, tier: Tier, room: int) -> int:
        """How many more of a tier are worth fetching if the engine has ``room``."""
        queue, most = self._queues[tier], room + self._capacity
        if len(queue.held) >= most or queue.num_bytes >= MAX_BYTES:
            queue.purge()
        return max(0, most - len(queue.held)) if queue.num_bytes < MAX_BYTES else 0

    def push(self, active: ActiveRequest) -> None:
        """Let a request wait."""
        self._queues[active.delivery.tier].push(HeldRequest.of(active))

    def take(self, room: Mapping[Tier, int]) -> list[ActiveRequest]:
        """Take out the next requests: at most ``room`` of each tier and `TURN` in all, realtime first."""
        self._settle()
        taken: list[ActiveRequest] = []
        for tier in TIERS:
            taken += self._take(tier, min(room[tier], TURN - len(taken)))
        return taken

    def pass_by(self, active: ActiveRequest) -> None:
        """Charge a request that finds room at once, with none waiting before it."""
        self.push(active)
        self._take(active.delivery.tier, 1)
        if len(self._left) > self._settle_above:
            self._settle()

    def latest(self) -> list[ActiveRequest]:
        """The requests to give to another worker: the latter half of each tier, or the only one."""
        waiting = [sorted(self._waiting(tier), key=lambda request: request.sort_key) for tier in TIERS]
        return [request.active for held in waiting for request in held[len(held) // 2 :]]

    def all(self) -> list[ActiveRequest]:
        return [request.active for tier in TIERS for request in self._waiting(tier)]

    def purge(self) -> None:
        """Forget those that have ended or belong to another worker now."""
        for queue in self._queues.values():
            queue.purge()

    def _waiting(self, tier: Tier) -> Collection[HeldRequest]:
        return [request for request in self._queues[tier].held.values() if request.active.waits]

    def _take(self, tier: Tier, count: int) -> list[ActiveRequest]:
        taken: list[ActiveRequest] = []
        while len(taken) < count and (request := self._queues[tier].pop()) is not None:
            if request.active.waits:
                self._left.append(request)
                taken.append(request.active)
        return taken

    def _settle(self) -> None:
        for request in self._left:
            request.charge()
        self._left = [request for request in self._left if not request.active.gone]
        self._settle_above = max(_MIN_SETTLED, 2 * len(self._left))
