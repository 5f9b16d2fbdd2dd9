"""The thread between the streams and the engine: fetch what there is room for, begin it, prepare it, hand it over."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import structlog
from redis.exceptions import ResponseError

from producer.codec import decode_request
from producer.errors import Cancelled, DeadlineExceeded, HeadraceError, InternalError, Poisoned
from producer.keys import TIERS, Tier
from producer.validate import fail
from producer.wire import Chunk, GenerateRequest
from worker.core import Core
from worker.engine.request import Request
from worker.guard import described
from worker.outputs import Outputs
from worker.registry import ActiveRequest, Start
from worker.routing import tier_of
from worker.stream.consumer import Consumer, Entry
from worker.stream.delivery import Delivery
from worker.stream.ledger import Begun, Ledger
from worker.stream.trouble import TROUBLE, Trouble

BLOCK_MS = 250  # one slice of a blocking read: how late a claim, a stop or new room may be noticed
WAIT_S = 0.1

log = structlog.get_logger("headrace.worker")


class Intake:
    """Fetches requests, realtime ones first, and never more than the engine has room for.

    Suspects, which two workers did not survive, are run alone: while any is held nothing else is fetched, and one at a time is
    given to the engine once that is empty. Until its turn comes a suspect's delivery count is kept one lower, so that a crash
    meanwhile is not held against it: of a batch that died twice only the culprit comes to be given up, the others are run once
    more and answered.
    """

    def __init__(self, core: Core, consumer: Consumer, ledger: Ledger) -> None:
        self._config = core.config
        self._registry = core.registry
        self._loop = core.loop
        self._publisher = core.publisher
        self._metrics = core.metrics
        self._trouble = Trouble(core.outage)
        self._consumer = consumer
        self._ledger = ledger
        self._stopping = threading.Event()
        self._open = threading.Event()
        self._open.set()
        self._parked = threading.Event()
        self._first = True
        self._reread = True  # something may be pending for us that we do not know of
        self._claim_at_s = 0.0
        self._claim_wanted = threading.Event()
        self._unbegun: list[ActiveRequest] = []
        self._suspects: list[ActiveRequest] = []
        self._alone: ActiveRequest | None = None
        self._thread = core.guard.thread("intake", self._run)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop fetching; what was fetched is in the registry."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def pause(self) -> None:
        """Stop fetching until `resume`; when it returns, all that was fetched for the engine is with it."""
        self._parked.clear()
        self._open.clear()
        while self._thread.is_alive() and not self._parked.wait(WAIT_S):
            pass

    def resume(self) -> None:
        """Fetch again, first of all what was handed back and nobody has taken."""
        self._reread = True
        self._open.set()

    def claim_now(self) -> None:
        """Somebody has handed requests back."""
        self._claim_wanted.set()

    def _run(self) -> None:
        while not self._stopping.is_set():
            if not self._open.is_set():
                self._parked.set()
                self._open.wait(WAIT_S)
                continue
            try:
                self._round()
            except TROUBLE as error:
                self._recover(error)

    def _recover(self, error: Exception) -> None:
        pause_s = self._trouble.hit(error)
        self._reread = True
        # Leases ran on meanwhile: whoever still lives renews first.
        self._claim_at_s = max(self._claim_at_s, time.monotonic() + self._config.lease_s / 3)
        if isinstance(error, ResponseError) and str(error).startswith("NOGROUP"):
            try:
                self._consumer.ensure_groups()
            except TROUBLE as another:
                pause_s = self._trouble.hit(another)
        self._stopping.wait(pause_s)

    def _round(self) -> None:
        if self._unbegun:
            self._deliver(())
        elif not self._loop.ready or self._loop.stalled:
            self._stopping.wait(WAIT_S)
        elif not self._run_suspects():
            room = self._loop.room()
            if any(room.values()):
                self._deliver(self._fetch(room))
                self._trouble.over()
            else:
                self._loop.await_turn(WAIT_S)

    # Fetching

    def _fetch(self, room: dict[Tier, int]) -> Sequence[Entry]:
        if self._reread:
            return self._own_pending()
        if self._claim_wanted.is_set() or time.monotonic() >= self._claim_at_s:
            return self._claim(room)
        return self._consumer.read(room, BLOCK_MS)

    def _own_pending(self) -> Sequence[Entry]:
        if self._first:
            self._consumer.ensure_groups()
        entries = self._consumer.own_pending(self._registry.knows, crashed=self._first)
        self._first = self._reread = False
        return entries

    def _claim(self, room: dict[Tier, int]) -> Sequence[Entry]:
        self._claim_wanted.clear()
        tiers = [tier for tier in TIERS if room[tier]]
        entries = [entry for tier in tiers for entry in self._consumer.claim(tier, room[tier])]
        if entries or any(self._consumer.claim_is_under_way(tier) for tier in tiers):
            self._claim_wanted.set()
        else:
            self._claim_at_s = time.monotonic() + self._config.lease_s / 2 * random.uniform(0.8, 1.0)
        return [entry for entry in entries if not self._registry.knows(entry.tier, entry.id)]

    # Beginning

    def _deliver(self, entries: Sequence[Entry]) -> None:
        self._unbegun += [self._registry.enter(Delivery(entry)) for entry in entries]
        if self._unbegun:
            self._begin(self._unbegun)
            self._unbegun = []
            self._ledger.renew([active.delivery for active in self._suspects])  # which sets their delivery counts

    def _begin(self, batch: Sequence[ActiveRequest], *, alone: bool = False) -> None:
        """Begin what was delivered. Until all that Redis has to do with it is done nothing is changed, so it may be called again."""
        begun = self._ledger.begin([active.delivery for active in batch], alone=alone)
        now_s = time.monotonic()
        chunks = [self._ledger.published(active.delivery) if said.resumes else [] for active, said in zip(batch, begun, strict=True)]
        for active, said, published in zip(batch, begun, chunks, strict=True):
            self._obey(active, said, published, now_s)

    def _obey(self, active: ActiveRequest, begun: Begun, chunks: list[Chunk], now_s: float) -> None:
        active.start = Start.of(begun, now_s)
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
            self._publisher.end(active, error)
        except Exception as error:  # a fault of ours with this one request must not cost the others
            log.error("request could not be prepared", id=active.id, **described(error))
            self._publisher.end(active, InternalError("the request could not be prepared"))

    def _hand_over(self, active: ActiveRequest, chunks: list[Chunk]) -> None:
        wanted = decode_request(active.delivery.fields, active.delivery.tier)
        engine = self._loop.engine
        if wanted.params.n > engine.config.max_batch_size:
            raise fail("n", f"at most {engine.config.max_batch_size}, this worker's batch")
        requests = engine.inputs.prepare_all(replace(wanted, tier=tier_of(wanted, self._config.routes)))
        outputs = Outputs(active.id, requests, engine.make_detokenizer)
        outputs.resume(chunks)
        num_resumed = outputs.num_tokens
        self._label(active, wanted, requests)
        with self._registry.lock:  # an order to end it comes before or after both
            if self._registry.activate(active, outputs):
                self._loop.add(requests)
        self._metrics.tokens(requests[0].tier, prompt=outputs.gather.num_prompt_tokens)
        if num_resumed:
            self._metrics.resumed(num_resumed)
            log.info("request resumed", id=active.id, attempt=active.delivery.attempt, tokens=num_resumed)

    def _label(self, active: ActiveRequest, wanted: GenerateRequest, requests: Sequence[Request]) -> None:
        assert active.start is not None, "it was begun"
        if wanted.deadline_ms is not None:
            active.deadline_s = active.start.monotonic_s(wanted.deadline_ms)
        active.source = wanted.source
        active.streamed = active.streamed or wanted.stream
        for request in requests:
            request.deadline = active.deadline_s
            request.source = wanted.source

    # Suspects

    def _hold(self, active: ActiveRequest) -> None:
        log.warning("suspect held to be run alone", id=active.id, attempt=active.delivery.attempt)
        active.delivery.count = active.delivery.attempt - 1
        self._suspects.append(active)

    def _run_suspects(self) -> bool:
        """See to the suspects; False where there are none, and anything may be fetched."""
        if self._alone is not None and self._held(self._alone):
            self._registry.await_change(WAIT_S)
            return True
        self._alone = None
        self._suspects = [active for active in self._suspects if self._held(active) and active.end is None]
        if not self._suspects:
            return False
        if self._registry.running:
            self._registry.await_change(WAIT_S)
            return True
        self._begin(self._suspects[:1], alone=True)
        self._alone = self._suspects.pop(0)
        return True

    def _held(self, active: ActiveRequest) -> bool:
        return self._registry.knows(active.delivery.tier, active.delivery.entry.id)
