"""The requests that a worker holds, from their delivery to their final reply."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from producer.errors import HeadraceError
from producer.keys import Tier
from producer.wire import Result
from worker.engine.request import Request, RequestStatus
from worker.outputs import Outputs
from worker.stream.delivery import Delivery
from worker.stream.ledger import Begun
from worker.transcript import Transcript


@dataclass(frozen=True, slots=True)
class Start:
    """When a delivery was begun, on both clocks; other instants of its life are computed from this one.

    Attributes:
        enqueued_ms, begun_ms: Redis time.
        begun_s: the same instant as ``begun_ms``, monotonic.
    """

    enqueued_ms: int
    begun_ms: int
    begun_s: float

    @classmethod
    def of(cls, begun: Begun, now_s: float) -> Start:
        return cls(begun.enqueued_ms, begun.now_ms, now_s)

    def since_enqueued_ms(self, at_s: float) -> float:
        """Milliseconds from enqueueing to the monotonic instant ``at_s``; never negative, even if the clocks disagree."""
        return max(0.0, round(self.begun_ms - self.enqueued_ms + (at_s - self.begun_s) * 1000, 3))

    def redis_ms(self, at_s: float) -> int:
        """The Redis time of a monotonic instant."""
        return round(self.redis_ns(at_s) / 1_000_000)

    def redis_ns(self, at_s: float) -> int:
        """The same in nanoseconds."""
        return self.begun_ms * 1_000_000 + round((at_s - self.begun_s) * 1_000_000_000)

    def monotonic_s(self, redis_ms: int) -> float:
        """The monotonic instant of a Redis time."""
        return self.begun_s + (redis_ms - self.begun_ms) / 1000


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """One request that this worker holds.

    The fetching thread makes it and gives it to the engine (`outputs`). From then on the publishing thread owns it, except
    `end`, `streamed` and `delivery`, which others set under the registry's lock.

    Attributes:
        tier: in which it is served: its stream's until it is begun, then the one that a route chose, if any.
        outputs: the engine's; None until it is given to the engine.
        streamed: a caller reads along, so every step is published.
        end: why it has to end early.
        outcome: how it ended, to be written.
        deadline_at_s: monotonic.
        first_token_s, last_token_s: monotonic; of this attempt.
        num_refusals: how often the server seemed to refuse its reply because of its size.
        num_timeouts: how often writing its reply, alone, timed out.
        gone: the registry has forgotten it.
    """

    delivery: Delivery
    tier: Tier = field(init=False)
    outputs: Outputs | None = None
    start: Start | None = None
    source: str = ""
    streamed: bool = False
    end: HeadraceError | None = None
    outcome: Result | HeadraceError | None = None
    deadline_at_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    published_s: float = field(default_factory=time.monotonic)
    num_refusals: int = 0
    num_timeouts: int = 0
    gone: bool = False

    def __post_init__(self) -> None:
        self.tier = self.delivery.tier

    @property
    def id(self) -> str:
        return self.delivery.request_id

    @property
    def waits(self) -> bool:
        """Whether it still needs to be run."""
        return not self.gone and self.end is None

    @property
    def resumed(self) -> bool:
        """Whether it continues from the output of an earlier attempt."""
        return self.outputs is not None and self.outputs.num_resumed > 0

    @property
    def first_step_s(self) -> float | None:
        """Monotonic, in this attempt; None before."""
        steps = [request.first_step_s for request in self.outputs.requests] if self.outputs is not None else []
        return min((step_s for step_s in steps if step_s is not None), default=None)

    @property
    def queue_ms(self) -> float | None:
        """From enqueueing to its first step or, if `resumed`, to when a worker first began it; None before."""
        return self._since_enqueued_ms(self.delivery.started_ms, self.first_step_s)

    @property
    def ttft_ms(self) -> float | None:
        """From enqueueing to its first token, in whichever attempt; None before."""
        return self._since_enqueued_ms(self.delivery.first_token_ms, self.first_token_s)

    def _since_enqueued_ms(self, earlier_ms: int | None, at_s: float | None) -> float | None:
        """From enqueueing to an earlier attempt's Redis time ``earlier_ms`` if it is `resumed`, else to ``at_s``."""
        if self.start is None:
            return None
        if self.resumed and earlier_ms is not None:
            return float(max(0, earlier_ms - self.start.enqueued_ms))
        return None if at_s is None else self.start.since_enqueued_ms(at_s)

    @property
    def transcript(self) -> Transcript | None:
        """The first output's; None until it is given to the engine."""
        return self.outputs.first if self.outputs is not None else None


class Registry:
    """All `ActiveRequest`s, by entry and by id; every method may be called from any thread.

    A request is entered before the ledger begins it, so that an order to cancel it, which may arrive at any moment after that,
    always finds it.

    Attributes:
        lock: protects everything here.
        leases: held while leases are renewed, and while requests are handed back until they are dropped. A lease renewed after
            its request was handed back would belong to this worker again without anyone knowing.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.leases = threading.Lock()
        self._changed = threading.Condition(self.lock)
        self._by_entry: dict[tuple[Tier, str], ActiveRequest] = {}
        self._by_id: dict[str, ActiveRequest] = {}
        self._by_request: dict[Request, ActiveRequest] = {}

    def __len__(self) -> int:
        return len(self._by_entry)

    @property
    def running(self) -> bool:
        """Whether any is in the engine, or has ended and is not yet answered."""
        return any(active.outputs is not None or active.outcome is not None for active in self.all())

    def knows(self, tier: Tier, entry_id: str) -> bool:
        with self.lock:
            return (tier, entry_id) in self._by_entry

    def holds(self, active: ActiveRequest) -> bool:
        """Whether ``active`` itself is here, not only another one of the same entry."""
        with self.lock:
            return self._by_entry.get((active.delivery.tier, active.delivery.entry.id)) is active

    def enter(self, delivery: Delivery) -> ActiveRequest:
        """A new one. It replaces one of the same entry that still waits, whose delivery Redis lost and then made again."""
        active = ActiveRequest(delivery)
        with self.lock:
            former = self._by_entry.get((delivery.tier, delivery.entry.id))
            if former is not None and former.outputs is None and former.outcome is None:
                self.drop(former)
            self._by_entry[delivery.tier, delivery.entry.id] = active
            self._by_id.setdefault(active.id, active)
        return active

    def get(self, request_id: str) -> ActiveRequest | None:
        """The one with this id; of several, the one that runs."""
        return self._by_id.get(request_id)

    def of(self, request: Request) -> ActiveRequest | None:
        """The one to which an engine request belongs; None if the worker has dropped it meanwhile."""
        return self._by_request.get(request)

    def drop(self, active: ActiveRequest) -> None:
        """Forget it: it has its final reply, or belongs to another worker now."""
        with self._changed:
            active.gone = True
            if self.holds(active):
                del self._by_entry[active.delivery.tier, active.delivery.entry.id]
            if self._by_id.get(active.id) is active:
                del self._by_id[active.id]
            for request in active.outputs.requests if active.outputs is not None else ():
                self._by_request.pop(request, None)
            self._changed.notify_all()

    def activate(self, active: ActiveRequest, outputs: Outputs) -> bool:
        """It goes to the engine now, as ``outputs.requests``; False if an order to end it, or its loss, came first."""
        with self.lock:
            if active.end is not None or not self.holds(active):
                return False
            active.outputs = outputs
            self._by_id[active.id] = active
            self._by_request.update(dict.fromkeys(outputs.requests, active))
            return True

    def adopt(self, newcomer: ActiveRequest) -> bool:
        """Have the running request of the same id continue under ``newcomer``'s delivery; False if there is none.

        This happens when Redis lost its data and the caller put its request again: the entry is new, and what was
        generated for the old one is kept.
        """
        with self.lock:
            elder = self._by_id.get(newcomer.id)
            if elder is None or elder is newcomer or elder.outputs is None or elder.outcome is not None:
                return False
            self._by_entry.pop((elder.delivery.tier, elder.delivery.entry.id), None)
            newcomer.delivery.started_ms, newcomer.delivery.first_token_ms = elder.delivery.started_ms, elder.delivery.first_token_ms
            newcomer.delivery.vocabulary = elder.delivery.vocabulary
            elder.delivery = newcomer.delivery
            elder.streamed = elder.streamed or newcomer.streamed
            newcomer.gone = True
            self._by_entry[newcomer.delivery.tier, newcomer.delivery.entry.id] = elder
            return True

    def all(self) -> list[ActiveRequest]:
        with self.lock:
            return list(self._by_entry.values())

    def num_waiting_elsewhere(self, tier: Tier) -> int:
        """Engine requests from a tier's stream that wait in another tier, for the first time."""
        return sum(
            request.tier != tier and request.status is RequestStatus.WAITING
            for active in self.all()
            if active.delivery.tier == tier and active.outputs is not None
            for request in active.outputs.requests
        )

    def expired(self, now_s: float) -> Iterable[ActiveRequest]:
        """Those whose deadline has passed and that have not ended yet."""
        return [active for active in self.all() if _open_deadline_at_s(active) <= now_s]

    def next_deadline_at_s(self) -> float:
        """Monotonic, of those that have not ended yet; infinite if there is none."""
        return min(map(_open_deadline_at_s, self.all()), default=math.inf)

    def await_change(self, timeout_s: float) -> None:
        """Wait until one is dropped."""
        with self._changed:
            self._changed.wait(timeout_s)


def _open_deadline_at_s(active: ActiveRequest) -> float:
    """Monotonic; infinite if there is none, or the request has ended already."""
    if active.deadline_at_s is None or active.end is not None or active.outcome is not None:
        return math.inf
    return active.deadline_at_s
