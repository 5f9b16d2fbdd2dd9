"""The thread between the streams and the engine: fetches what there is room for, begins it, prepares it, hands it over."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import structlog
from redis.exceptions import ResponseError

from producer.codec import decode_request
from producer.errors import Cancelled, DeadlineExceeded, HeadraceError, InternalError, Poisoned
from producer.keys import TIERS, Tier
from producer.validate import invalid
from producer.wire import Chunk, GenerateRequest
from worker.ahead import WaitingAhead
from worker.context import WorkerContext
from worker.engine.request import Request
from worker.guard import described
from worker.outputs import Outputs
from worker.publisher import Publisher
from worker.registry import ActiveRequest, Start
from worker.routing import tier_of
from worker.stream.consumer import MAX_PAGE, Consumer, Entry
from worker.stream.delivery import Delivery
from worker.stream.ledger import Begun, Ledger
from worker.stream.trouble import TROUBLE, Trouble

BLOCK_MS = 250  # one slice of a blocking read: how late a claim or a stop may be noticed
POLL_S = 0.01  # between reads of the streams while requests wait for room; a blocking read may return up to 100 ms late
WAIT_S = 0.1

Ask = Callable[[Sequence[Delivery]], list[Begun]]

log = structlog.get_logger("headrace.worker")


class Intake:
    """Fetches requests, realtime ones first: what the engine has room for, and `WorkerConfig.fetch_ahead` more.

    Requests delivered beyond the engine's room are held: leased, but begun and tokenised only when given to the engine, in
    the order of `WaitingAhead`. Suspects, in whose attempts two workers died, are run alone: while any is held nothing else is
    fetched, and they are given to the engine one at a time once it is empty.

    A request's delivery count rises only when it is given to the engine, so a crash counts against the requests that ran, never
    against those that waited. After two crashes each request that was running is run alone, so only the culprit reaches ``max_attempts``.
    """

    def __init__(self, context: WorkerContext, publisher: Publisher, consumer: Consumer, ledger: Ledger) -> None:
        self._config = context.config
        self._registry = context.registry
        self._loop = context.loop
        self._publisher = publisher
        self._metrics = context.metrics
        self._trouble = Trouble(context.outage)
        self._consumer = consumer
        self._ledger = ledger
        self._stopping = threading.Event()
        self._open = threading.Event()
        self._open.set()
        self._parked = threading.Event()
        self._first = True
        self._reread = True  # there may be entries pending for us that we do not know
        self._claim_at_s = 0.0
        self._claim_wanted = threading.Event()
        self._claiming: set[Tier] = set()  # tiers whose pending list has not been searched to its end
        self._asked: deque[str] = deque()  # workers that asked for requests
        self._found_nothing = False
        self._poll_at_s = 0.0
        self._unbegun: list[ActiveRequest] = []
        self._ahead = WaitingAhead(context.config.fetch_ahead)
        self._due: list[ActiveRequest] = []  # their turn has come
        self._suspects: list[ActiveRequest] = []
        self._alone: ActiveRequest | None = None
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
        self._reread = True
        self._open.set()

    def claim_now(self) -> None:
        """Another worker has handed requests back."""
        self._claim_wanted.set()

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
        self._asked.append(recipient)

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
        self._reread = True
        self._claiming.clear()
        # Leases ran on meanwhile: living workers renew theirs first.
        self._claim_at_s = max(self._claim_at_s, time.monotonic() + self._config.lease_s / 3)
        if isinstance(error, ResponseError) and str(error).startswith("NOGROUP"):
            try:
                self._consumer.ensure_groups()
            except TROUBLE as another:
                pause_s = self._trouble.hit(another)
        self._stopping.wait(pause_s)

    def _round(self) -> bool:
        """Fetch, hold and give once; returns whether there was nothing to fetch."""
        if not self._loop.ready or self._loop.stalled:
            self._stopping.wait(WAIT_S)
            return False
        self._begin_delivered()
        self._begin_due()
        self._answer_askers()
        if self._run_suspects():
            return False
        turn = self._loop.num_turns
        room = self._give(self._room())
        wanted = {tier: self._ahead.wanted(tier, room[tier]) for tier in TIERS}
        patient = all(room.values()) and not len(self._ahead)
        if not any(wanted.values()) or (not patient and time.monotonic() < self._poll_at_s):
            self._loop.await_turn(turn, POLL_S)
            return False
        entries = self._fetch(wanted, patient=patient)
        self._unbegun += [self._registry.enter(Delivery(entry)) for entry in entries]
        self._begin_delivered()
        self._trouble.clear()
        self._poll_at_s = 0.0 if entries else time.monotonic() + POLL_S
        return not (entries or self._claiming or len(self._ahead))

    # Fetching

    def _room(self) -> dict[Tier, int]:
        """How many further requests of each stream are worth giving to the engine now.

        Those that a route has put into another tier count against their own stream while they wait, or fetching would not end.
        """
        room = self._loop.room()
        if self._config.routes:
            room = {tier: max(0, room[tier] - self._registry.num_waiting_elsewhere(tier)) for tier in TIERS}
        return room

    def _fetch(self, wanted: dict[Tier, int], *, patient: bool) -> Sequence[Entry]:
        if self._reread:
            return self._own_pending()
        claimed = self._claim(wanted)
        taken = Counter(entry.tier for entry in claimed)
        left = {tier: wanted[tier] - taken[tier] for tier in TIERS}
        if not any(left.values()):
            return claimed
        patient = patient and not any(wanted[tier] for tier in self._claiming)
        return claimed + (self._consumer.read(left, BLOCK_MS) if patient else self._consumer.read_now(left))

    def _own_pending(self) -> Sequence[Entry]:
        if self._first:
            self._consumer.ensure_groups()
        entries = self._consumer.own_pending(self._registry.knows, crashed=self._first)
        self._first = self._reread = False
        return entries

    def _claim(self, wanted: dict[Tier, int]) -> list[Entry]:
        if self._claim_wanted.is_set() or time.monotonic() >= self._claim_at_s:
            self._claim_wanted.clear()
            self._claiming.update(TIERS)
            self._claim_at_s = time.monotonic() + self._config.lease_s / 2 * random.uniform(0.8, 1.0)
        claimed: list[Entry] = []
        for tier in [tier for tier in TIERS if tier in self._claiming and wanted[tier]]:
            page = self._consumer.claim(tier, wanted[tier])
            if not page and not self._consumer.claim_is_under_way(tier):
                self._claiming.discard(tier)
            claimed += [entry for entry in page if not self._registry.knows(tier, entry.id)]
        return claimed

    # Beginning

    def _begin_delivered(self) -> None:
        """Begin the requests that find room with none waiting before them, and hold the rest."""
        while page := self._unbegun[:MAX_PAGE]:
            room, arrived = self._room(), Counter(active.delivery.tier for active in page)
            fit = {tier for tier in TIERS if arrived[tier] <= room[tier] and not self._ahead.count(tier)}
            passing = [active for active in page if active.delivery.tier in fit and active.delivery.entry.counted]
            self._begin_page(passing, self._ledger.begin)
            for active in passing:
                self._ahead.pass_by(active)
            self._begin_page([active for active in page if active not in passing], self._ledger.hold)

    def _begin_page(self, page: Sequence[ActiveRequest], ask: Ask) -> None:
        self._begin(page, ask)
        begun = set(page)
        self._unbegun = [active for active in self._unbegun if active not in begun]
        self._ledger.write_counts([active.delivery for active in page if active.waits])

    def _give(self, room: dict[Tier, int]) -> dict[Tier, int]:
        """Give the engine the next requests in turn; returns the room that is left."""
        self._due = self._ahead.take(room)
        given = Counter(active.delivery.tier for active in self._due)
        self._begin_due()
        return {tier: room[tier] - given[tier] for tier in TIERS}

    def _begin_due(self) -> None:
        self._begin(self._due, self._ledger.begin_held)
        self._due = []

    def _begin(self, batch: Sequence[ActiveRequest], ask: Ask) -> None:
        """Begin or hold a batch. Nothing is changed here until Redis has done its part, so it may be called again."""
        begun = ask([active.delivery for active in batch]) if batch else []
        now_s = time.monotonic()
        chunks = [self._ledger.published(active.delivery) if said.resumes else [] for active, said in zip(batch, begun, strict=True)]
        for active, said, published in zip(batch, begun, chunks, strict=True):
            self._obey(active, said, published, now_s)

    def _obey(self, active: ActiveRequest, begun: Begun, chunks: list[Chunk], now_s: float) -> None:
        active.start = Start.of(begun, now_s)
        if active.delivery.deadline_ms is not None:
            active.deadline_at_s = active.start.monotonic_s(active.delivery.deadline_ms)
        active.streamed = active.streamed or begun.streamed
        match begun.verdict:
            case "settled" | "duplicate" | "lost":
                self._registry.drop(active)
                log.info("request dropped", id=active.id, why=begun.verdict)
            case "cancelled":
                self._refuse(active, Cancelled("cancelled"), chunks)
            case "expired":
                self._refuse(active, DeadlineExceeded("the deadline passed before it could be run"), chunks)
            case "poisoned":
                attempts = active.delivery.attempt - 1
                self._refuse(active, Poisoned(f"given up after {attempts} attempts: each worker that held it died"), chunks)
            case "suspect":
                log.warning("suspect held to be run alone", id=active.id, attempt=active.delivery.attempt)
                self._suspects.append(active)
            case "held":
                self._hold(active)
            case "run":
                self._run_request(active, chunks)

    def _refuse(self, active: ActiveRequest, error: HeadraceError, chunks: list[Chunk]) -> None:
        error.partial_text = "".join(chunk.text for chunk in chunks)
        error.partial_token_ids = [token for chunk in chunks for token in chunk.token_ids]
        self._publisher.end(active, error)

    def _run_request(self, active: ActiveRequest, chunks: list[Chunk]) -> None:
        if self._registry.adopt(active):
            return
        try:
            self._hand_over(active, chunks)
        except HeadraceError as error:
            self._refuse(active, error, chunks)
        except Exception as error:  # our fault with one request must not cost the others
            log.error("request could not be prepared", id=active.id, **described(error))
            self._publisher.end(active, InternalError("the request could not be prepared"))

    def _hand_over(self, active: ActiveRequest, chunks: list[Chunk]) -> None:
        wire_request = decode_request(active.delivery.fields, active.delivery.tier)
        active.tier = tier_of(wire_request, self._config.routes)
        engine = self._loop.engine
        if wire_request.params.n > engine.config.max_batch_size:
            raise invalid("n", f"at most {engine.config.max_batch_size}, this worker's batch")
        requests = engine.inputs.prepare_all(replace(wire_request, tier=active.tier))
        engine.inputs.check_resumable([token for chunk in chunks for token in chunk.token_ids])
        outputs = Outputs(active.id, requests, engine.make_detokenizer)
        outputs.resume(chunks)
        self._label(active, wire_request, requests)
        with self._registry.lock:  # an order to end it comes before both or after both
            if self._registry.activate(active, outputs):
                self._loop.add(requests)
        self._metrics.tokens(active.tier, prompt=outputs.collector.num_prompt_tokens)
        if outputs.num_resumed:
            self._metrics.resumed(outputs.num_resumed)
            log.info("request resumed", id=active.id, attempt=active.delivery.attempt, tokens=outputs.num_resumed)

    def _label(self, active: ActiveRequest, wire_request: GenerateRequest, requests: Sequence[Request]) -> None:
        active.source = wire_request.source
        active.streamed = active.streamed or wire_request.stream
        for request in requests:
            request.deadline_at_s = active.deadline_at_s
            request.source = wire_request.source
            request.arrival, _ = active.delivery.entry.position

    # Waiting

    def _hold(self, active: ActiveRequest) -> None:
        delivery = active.delivery
        active.source = delivery.source
        self._ahead.push(active)

    def _answer_askers(self) -> None:
        while self._asked:
            self._hand_back(self._ahead.latest(), to=self._asked[0])
            self._asked.popleft()

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

    # Suspects

    def _run_suspects(self) -> bool:
        """Handle the suspects; False if there are none, so that anything may be fetched."""
        if self._alone is not None and self._is_ours(self._alone):
            self._registry.await_change(WAIT_S)
            return True
        self._alone = None
        self._suspects = [active for active in self._suspects if self._is_ours(active) and active.end is None]
        if not self._suspects:
            return False
        if self._registry.running:
            self._registry.await_change(WAIT_S)
            return True
        self._begin(self._suspects[:1], self._ledger.begin_held)
        self._alone = self._suspects.pop(0)
        return True

    def _is_ours(self, active: ActiveRequest) -> bool:
        return self._registry.knows(active.delivery.tier, active.delivery.entry.id)
