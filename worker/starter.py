"""Handles deliveries by the ledger's verdict: they are dropped, answered, held, or prepared and given to the engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import structlog

from producer.codec import decode_request
from producer.errors import Cancelled, DeadlineExceeded, HeadraceError, InternalError, Poisoned
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
from worker.stream.delivery import Delivery
from worker.stream.ledger import Begun, Ledger
from worker.suspects import Suspects

Ask = Callable[[Sequence[Delivery]], list[Begun]]

log = structlog.get_logger("headrace.worker")


class Starter:
    """Begins requests; used by one thread.

    Args:
        ahead: gets those that have to wait for their turn.
        suspects: gets those that have to run alone.
    """

    def __init__(self, context: WorkerContext, publisher: Publisher, ledger: Ledger, ahead: WaitingAhead, suspects: Suspects) -> None:
        self._config = context.config
        self._registry = context.registry
        self._loop = context.loop
        self._metrics = context.metrics
        self._publisher = publisher
        self._ledger = ledger
        self._ahead = ahead
        self._suspects = suspects

    def begin(self, batch: Sequence[ActiveRequest], ask: Ask) -> None:
        """Begin or hold a batch, as ``ask`` answers.

        Nothing is changed here until Redis has done its part, so it may be called again.
        """
        begun = ask([active.delivery for active in batch]) if batch else []
        now_s = time.monotonic()
        chunks = [self._ledger.published(active.delivery) if said.resumes else [] for active, said in zip(batch, begun, strict=True)]
        for active, said, published in zip(batch, begun, chunks, strict=True):
            self._obey(active, said, published, now_s)

    def begin_due(self, batch: Sequence[ActiveRequest]) -> None:
        """`begin` requests that were held and whose turn has come."""
        self.begin(batch, self._ledger.begin_held)

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
                self._suspects.add(active)
            case "held":
                active.source = active.delivery.source
                self._ahead.push(active)
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
        engine.inputs.check_resumable([token for chunk in chunks for token in chunk.token_ids], active.delivery.vocabulary)
        active.delivery.vocabulary = engine.inputs.vocabulary
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
