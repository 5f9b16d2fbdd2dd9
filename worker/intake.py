"""The thread between the streams and the engine: fetches what there is room for, begins it, prepares it, hands it over."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Sequence

import structlog

from producer.keys import TIERS, Tier
from worker.ahead import WaitingAhead
from worker.context import WorkerContext
from worker.fetcher import Fetcher
from worker.publisher import Publisher
from worker.registry import ActiveRequest
from worker.starter import Ask, Starter
from worker.stream.consumer import MAX_PAGE, Consumer
from worker.stream.delivery import Delivery
from worker.stream.ledger import Ledger
from worker.stream.trouble import TROUBLE, Trouble
from worker.suspects import Suspects

POLL_S = 0.01  # between reads of the streams while requests wait for room; a blocking read may return up to 100 ms late
WAIT_S = 0.1

log = structlog.get_logger("headrace.worker")


class Intake:
    """Fetches requests, realtime ones first: what the engine has room for, and `WorkerConfig.fetch_ahead` more.

    Requests delivered beyond the engine's room are held: leased, but begun and tokenised only when given to the engine, in
    the order of `WaitingAhead`. Suspects, in whose attempts two workers died, are run alone: while any is held nothing else is
    fetched, and they are given to the engine one at a time once it is empty.

    A request's delivery count rises only when it is given to the engine, so a crash counts against the requests that ran, never
    against those that waited. After two crashes without new tokens in between, each request that was running is run alone, so only the
    culprit reaches ``max_attempts``.
    """

    def __init__(self, context: WorkerContext, publisher: Publisher, consumer: Consumer, ledger: Ledger) -> None:
        self._config = context.config
        self._registry = context.registry
        self._loop = context.loop
        self._ledger = ledger
        self._trouble = Trouble(context.outage)
        self._fetcher = Fetcher(consumer, context.registry, context.config.lease_s)
        self._ahead = WaitingAhead(context.config.fetch_ahead)
        self._suspects = Suspects(context.registry)
        self._starter = Starter(context, publisher, ledger, self._ahead, self._suspects)
        self._fetched: list[ActiveRequest] = []  # not begun or held yet
        self._due: list[ActiveRequest] = []  # next in turn
        self._askers: deque[str] = deque()  # workers that asked for requests
        self._poll_at_s = 0.0
        self._found_nothing = False
        self._stopping = threading.Event()
        self._open = threading.Event()
        self._open.set()
        self._parked = threading.Event()
        self._thread = context.guard.thread("intake", self._run)

    def start(self) -> None:
        """Begin to fetch. To be called when the engine is ready."""
        self._ahead.weights.update(self._loop.engine.config.source_weights)
        self._thread.start()

    def stop(self) -> None:
        """Stop fetching and hand back what waits; the rest of what was fetched is in the registry."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def pause(self) -> None:
        """Stop fetching until `resume`. On return, what waited has been handed back, and the rest is with the engine."""
        self._parked.clear()
        self._open.clear()
        while self._thread.is_alive() and not self._parked.wait(WAIT_S):
            pass

    def resume(self) -> None:
        """Fetch again, beginning with what was handed back and no worker has taken."""
        self._fetcher.reread_soon()
        self._open.set()

    def claim_now(self) -> None:
        """Another worker has handed requests back."""
        self._fetcher.claim_soon()

    def num_ahead(self, tier: Tier) -> int:
        """Requests of a tier that wait beyond what the engine has room for. May be called from any thread."""
        return self._ahead.count(tier)

    @property
    def starving(self) -> bool:
        """Whether there is room for more of both tiers, and nothing to fetch. May be read from any thread."""
        held = self._loop.stats.num_held
        return self._found_nothing and held < self._loop.engine.config.max_batch_size and all(self._loop.room().values())

    def share(self, recipient: str) -> None:
        """Hand back the latter half of those that wait, for ``recipient`` to claim. May be called from any thread."""
        self._askers.append(recipient)

    def _run(self) -> None:
        while not self._stopping.is_set():
            if not self._open.is_set():
                self._park()
                continue
            try:
                self._found_nothing = self._round()
            except TROUBLE as error:
                self._recover(error)
        self._hand_back_all()

    def _park(self) -> None:
        self._found_nothing = False
        if not self._parked.is_set():
            self._hand_back_all()
            self._parked.set()
        self._open.wait(WAIT_S)

    def _recover(self, error: Exception) -> None:
        pause_s = self._trouble.hit(error)
        self._found_nothing = False
        try:
            self._fetcher.recover(error)
        except TROUBLE as another:
            pause_s = self._trouble.hit(another)
        self._stopping.wait(pause_s)

    def _round(self) -> bool:
        """Begin, share, give and fetch once; returns whether there was nothing to fetch."""
        if not self._loop.ready or self._loop.stalled:
            self._stopping.wait(WAIT_S)
            return False
        self._begin_fetched()  # both are empty unless Redis was in trouble
        self._begin_due()
        self._answer_askers()
        if self._suspects.run_next(self._starter.begin_due):
            return False
        turn = self._loop.num_turns
        num_fetched = self._fetch(self._give())
        if num_fetched is None:
            self._loop.await_turn(turn, POLL_S)
            return False
        self._begin_fetched()
        self._trouble.clear()
        return not (num_fetched or self._fetcher.claiming or len(self._ahead))

    # Fetching

    def _room(self) -> dict[Tier, int]:
        """How many further requests of each stream are worth giving to the engine now.

        Those that a route has put into another tier count against their own stream while they wait, or fetching would not end.
        """
        room = self._loop.room()
        if self._config.routes:
            room = {tier: max(0, room[tier] - self._registry.num_waiting_elsewhere(tier)) for tier in TIERS}
        return room

    def _fetch(self, room: dict[Tier, int]) -> int | None:
        """Fetch for the engine's ``room`` and ahead of it; returns how many came, or None if this is not the time to ask."""
        wanted = {tier: self._ahead.wanted(tier, room[tier]) for tier in TIERS}
        patient = all(room.values()) and not len(self._ahead)
        if not any(wanted.values()) or (not patient and time.monotonic() < self._poll_at_s):
            return None
        entries = self._fetcher.fetch(wanted, patient=patient)
        self._fetched += [self._registry.enter(Delivery(entry)) for entry in entries]
        self._poll_at_s = 0.0 if entries else time.monotonic() + POLL_S
        return len(entries)

    # Beginning

    def _begin_fetched(self) -> None:
        """Begin the requests that find room with none waiting before them, and hold the rest."""
        while page := self._fetched[:MAX_PAGE]:
            room, arrived = self._room(), Counter(active.delivery.tier for active in page)
            fit = {tier for tier in TIERS if arrived[tier] <= room[tier] and not self._ahead.count(tier)}
            passing = [active for active in page if active.delivery.tier in fit and active.delivery.entry.counted]
            self._begin_page(passing, self._ledger.begin)
            for active in passing:
                self._ahead.pass_by(active)
            self._begin_page([active for active in page if active not in passing], self._ledger.hold)

    def _begin_page(self, page: Sequence[ActiveRequest], ask: Ask) -> None:
        self._starter.begin(page, ask)
        begun = set(page)
        self._fetched = [active for active in self._fetched if active not in begun]
        self._ledger.write_counts([active.delivery for active in page if active.waits])

    def _give(self) -> dict[Tier, int]:
        """Give the engine the next requests in turn; returns the room that is left."""
        room = self._room()
        self._due = self._ahead.take(room)
        given = Counter(active.delivery.tier for active in self._due)
        self._begin_due()
        return {tier: room[tier] - given[tier] for tier in TIERS}

    def _begin_due(self) -> None:
        self._starter.begin_due(self._due)
        self._due = []

    # Handing back

    def _answer_askers(self) -> None:
        while self._askers:
            self._hand_back(self._ahead.latest(), to=self._askers[0])
            self._askers.popleft()

    def _hand_back_all(self) -> None:
        try:
            self._hand_back(self._ahead.all())
        except TROUBLE as error:  # the rest is handed back at the worker's end, or is still here when fetching resumes
            self._trouble.hit(error)

    def _hand_back(self, waiting: Sequence[ActiveRequest], to: str = "") -> None:
        if not waiting:
            return
        with self._registry.leases:
            count = self._ledger.release([active.delivery for active in waiting], to=to)
            for active in waiting:
                self._registry.drop(active)
        self._ahead.purge()
        log.info("waiting requests handed back", requests=count, to=to)
