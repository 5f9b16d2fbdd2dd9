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
class Ticket:
    """One request's place in the buffer, and the account of the source to which it is charged.

    Attributes:
        num_bytes: size of its entry, by which its prompt is charged, because it is not tokenised yet.
        num_charged: output tokens charged so far.
    """

    active: ActiveRequest
    sort_key: tuple[float, int, int]
    num_bytes: int
    status: RequestStatus = RequestStatus.WAITING
    account: SourceAccount[Ticket] | None = field(default=None, repr=False)
    num_charged: int = 0

    @classmethod
    def of(cls, active: ActiveRequest) -> Ticket:
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


class Line:
    """The requests that wait in one tier."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.tickets: dict[ActiveRequest, Ticket] = {}
        self.num_bytes = 0
        self._queue: FairQueue[Ticket] = FairQueue(weights)

    def push(self, ticket: Ticket) -> None:
        ticket.account = self._queue.push(ticket)
        self.tickets[ticket.active] = ticket
        self.num_bytes += ticket.num_bytes

    def pop(self) -> Ticket | None:
        """Take out the next one, and charge its prompt; None if none waits."""
        if self._queue.peek() is None:
            return None
        ticket = self._queue.pop()
        self._forget(ticket)
        assert ticket.account is not None, "it was pushed"
        ticket.account.served += ticket.account.prompt_cost * ticket.num_bytes / BYTES_PER_TOKEN
        return ticket

    def purge(self) -> None:
        """Forget those that have ended or belong to another worker now."""
        for ticket in [ticket for ticket in self.tickets.values() if ticket.active.gone]:
            ticket.status = RequestStatus.FINISHED
            assert ticket.account is not None, "it was pushed"
            ticket.account.waiting.note_finished()
            self._forget(ticket)

    def _forget(self, ticket: Ticket) -> None:
        del self.tickets[ticket.active]
        self.num_bytes -= ticket.num_bytes


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
        self._lines = {tier: Line(self.weights) for tier in TIERS}
        self._left: list[Ticket] = []  # have left the buffer, and may still be generating
        self._settle_above = _MIN_SETTLED

    def __len__(self) -> int:
        return sum(map(self.count, TIERS))

    def count(self, tier: Tier) -> int:
        return len(self._lines[tier].tickets)

    def wanted(self, tier: Tier, room: int) -> int:
        """How many more of a tier are worth fetching if the engine has ``room``."""
        line, most = self._lines[tier], room + self._capacity
        if len(line.tickets) >= most or line.num_bytes >= MAX_BYTES:
            line.purge()
        return max(0, most - len(line.tickets)) if line.num_bytes < MAX_BYTES else 0

    def push(self, active: ActiveRequest) -> None:
        """Let a request wait."""
        self._lines[active.delivery.tier].push(Ticket.of(active))

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
        waiting = [sorted(self._waiting(tier), key=lambda ticket: ticket.sort_key) for tier in TIERS]
        return [ticket.active for tickets in waiting for ticket in tickets[len(tickets) // 2 :]]

    def all(self) -> list[ActiveRequest]:
        return [ticket.active for tier in TIERS for ticket in self._waiting(tier)]

    def purge(self) -> None:
        """Forget those that have ended or belong to another worker now."""
        for line in self._lines.values():
            line.purge()

    def _waiting(self, tier: Tier) -> Collection[Ticket]:
        return [ticket for ticket in self._lines[tier].tickets.values() if ticket.active.waits]

    def _take(self, tier: Tier, count: int) -> list[ActiveRequest]:
        taken: list[ActiveRequest] = []
        while len(taken) < count and (ticket := self._lines[tier].pop()) is not None:
            if ticket.active.waits:
                self._left.append(ticket)
                taken.append(ticket.active)
        return taken

    def _settle(self) -> None:
        for ticket in self._left:
            ticket.charge()
        self._left = [ticket for ticket in self._left if not ticket.active.gone]
        self._settle_above = max(_MIN_SETTLED, 2 * len(self._left))
