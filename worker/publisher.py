"""The thread between the engine and the callers: tokens become text, frames and final replies.

It never delays the engine: outputs collect in its inbox, and each round takes all that came since the last one, as one
frame per request. The `ReplyWriter` writes them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from producer.errors import Cancelled, HeadraceError, InternalError, error_from_code
from producer.wire import Result
from worker.context import WorkerContext
from worker.ending import log_end, result_of, stats_of
from worker.engine.step import StepOutput
from worker.engine_loop import Refusal
from worker.guard import described
from worker.outputs import Output
from worker.registry import ActiveRequest
from worker.reply_writer import ReplyWriter
from worker.stream.ledger import Ledger, Outcome
from worker.stream.trouble import TROUBLE, Trouble

HAND_BACK_S = 5.0  # how long an ending worker tries to hand back; after that its leases lapse

log = structlog.get_logger("headrace.worker")


@dataclass(frozen=True, slots=True)
class EndNow:
    """A request has to end now, with `ActiveRequest.end`, whatever it has generated."""

    active: ActiveRequest


@dataclass(frozen=True, slots=True)
class HandBack:
    """All requests in the engine have to be handed back; then ``done`` is set."""

    done: threading.Event = field(default_factory=threading.Event)


OnEnd = Callable[[ActiveRequest, Outcome], None]
InboxItem = list[StepOutput] | Refusal | HandBack | EndNow


class Publisher:
    """Owns the outputs of all running requests; `put` may be called from any thread."""

    def __init__(self, context: WorkerContext, ledger: Ledger, on_end: OnEnd | None = None) -> None:
        self.requests_done = 0
        self.last_error: tuple[str, int] | None = None  # code, and Redis time in ms, of the last failure other than a cancellation
        self._on_end = on_end
        self._config = context.config
        self._registry = context.registry
        self._loop = context.loop
        self._metrics = context.metrics
        self._ledger = ledger
        self._trouble = Trouble(context.outage)
        self._replies = ReplyWriter(context, ledger, self._trouble, on_settled=self._on_settled, on_lost=self.lose)
        self._arrived = threading.Condition()
        self._inbox: list[InboxItem] = []
        self._hand_back_asked: HandBack | None = None
        self._stopping = False
        self._thread = context.guard.thread("publisher", self._run)

    def start(self) -> None:
        self._thread.start()

    def put(self, item: InboxItem) -> None:
        with self._arrived:
            self._inbox.append(item)
            self._arrived.notify()

    def end(self, active: ActiveRequest, error: HeadraceError) -> None:
        """Have a request end now; what it has generated becomes the partial output of ``error``."""
        with self._registry.lock:
            if active.end is not None:
                return
            active.end = error
        self.put(EndNow(active))

    def lose(self, active: ActiveRequest) -> None:
        """Another worker has it or has answered it: stop without a reply. One that has its outcome finds out when it is written."""
        with self._registry.lock:  # before it can be delivered to us again
            if not self._registry.holds(active) or active.outcome is not None:
                return
            self._registry.drop(active)
            self._abort(active)
        self._metrics.lease_lost()
        self._tell_end(active, "lost")

    def wake(self) -> None:
        """Something has changed that may make a frame due."""
        self.put([])

    def hand_back_running(self) -> threading.Event:
        """Hand back all requests in the engine, without ending; the event is set when that is done."""
        asked = HandBack()
        self.put(asked)
        return asked.done

    def stop(self, *, crashed: bool) -> None:
        """Write what can be written, hand all other requests back, and end the thread. The engine must have ended before."""
        with self._arrived:
            self._stopping = True
            self._arrived.notify()
        self._thread.join()
        deadline_at_s = time.monotonic() + HAND_BACK_S
        while time.monotonic() < deadline_at_s:
            if self._try_to_hand_back(crashed=crashed) and not self._replies.any_refused:
                return
            time.sleep(min(max(self._trouble.pause_s, self._replies.refused_pause_s), 0.2))

    def _run(self) -> None:
        while self._round():
            pass

    def _round(self) -> bool:
        with self._arrived:
            if not (self._inbox or self._stopping):
                self._arrived.wait(self._replies.due_in_s if self._trouble.ready else self._trouble.pause_s)
            items, self._inbox = self._inbox, []
            last = self._stopping
        for item in items:
            self._absorb(item)
        if self._trouble.ready:
            self._replies.write_due()
        if self._hand_back_asked is not None and self._trouble.ready and self._try_to_hand_back(crashed=False, running_only=True):
            self._hand_back_asked.done.set()
            self._hand_back_asked = None
        return not last

    # What came in

    def _absorb(self, item: InboxItem) -> None:
        if isinstance(item, Refusal):
            active = self._registry.of(item.requests[0])
            if active is not None:
                self._conclude(active, item.error)
        elif isinstance(item, HandBack):
            self._hand_back_asked = item
        elif isinstance(item, EndNow):
            self._end_now(item.active)
        else:
            now_s = time.monotonic()
            for output in item:
                active = self._registry.of(output.request)
                if active is not None and active.outcome is None:
                    self._take_guarded(active, output, now_s)

    def _end_now(self, active: ActiveRequest) -> None:
        """Not for one that was lost meanwhile: the engine may have its next delivery under the same id."""
        assert active.end is not None, "ended for a reason"
        with self._registry.lock:
            if not self._registry.holds(active):
                return
            if active.outcome is None:
                self._abort(active)
        self._conclude(active, active.end)

    def _take_guarded(self, active: ActiveRequest, output: StepOutput, now_s: float) -> None:
        try:
            self._take(active, output, now_s)
        except Exception as error:  # our fault with one request must not cost the others
            log.error("output could not be taken", id=active.id, **described(error))
            self._abort(active)
            self._conclude(active, InternalError("the output could not be turned into a reply"))

    def _take(self, active: ActiveRequest, output: StepOutput, now_s: float) -> None:
        outputs = active.outputs
        assert outputs is not None, "it is in the engine"
        if outputs.collector.has(output.request):  # stopped by a string, and aborted meanwhile
            return
        self._time(active, outputs.of(output.request), len(output.token_ids), now_s)
        ended = outputs.push(output)
        if output.error_code is not None:
            self._abort(active)
            self._conclude(active, error_from_code(output.error_code, output.error_message))
            return
        if ended and not output.finished:
            self._loop.abort(output.request.id)
        if outputs.collector.complete:
            self._conclude(active, result_of(active, worker=self._config.name, model=self._loop.engine.model_name))
        elif outputs.single:
            self._replies.mark_unpublished(active)

    def _time(self, active: ActiveRequest, output: Output, num_tokens: int, now_s: float) -> None:
        if not num_tokens:
            return
        self._metrics.tokens(active.tier, generation=num_tokens)
        if output.last_token_s is not None:
            self._metrics.inter_token(active.tier, now_s - output.last_token_s, num_tokens)
        elif active.first_token_s is None:
            self._time_first(active, now_s)
        output.last_token_s = active.last_token_s = now_s

    def _time_first(self, active: ActiveRequest, now_s: float) -> None:
        active.first_token_s = now_s
        if active.start is not None and not active.resumed:
            active.delivery.first_token_ms = active.start.redis_ms(now_s)
            self._metrics.first_token(active.tier, active.start.since_enqueued_ms(now_s) / 1000)

    def _abort(self, active: ActiveRequest) -> None:
        """Have the engine forget the whole request."""
        for request in active.outputs.requests if active.outputs is not None else ():
            self._loop.abort(request.id)

    def _conclude(self, active: ActiveRequest, outcome: Result | HeadraceError) -> None:
        if active.outcome is not None:
            return
        if isinstance(outcome, HeadraceError):
            outcome.request_id = active.id
            if active.transcript is not None:
                outcome.partial_text = active.transcript.text
                outcome.partial_token_ids = list(active.transcript.token_ids)
        active.outcome = outcome
        self._replies.mark_unsettled(active)

    # What became of it

    def _on_settled(self, active: ActiveRequest, outcome: Outcome) -> None:
        self._registry.drop(active)
        if outcome == "lost":
            self._metrics.lease_lost()
        elif outcome == "written":
            self.requests_done += 1
            self._metrics.request_finished(stats_of(active))
            self._note_error(active)
        self._tell_end(active, outcome)

    def _note_error(self, active: ActiveRequest) -> None:
        error, start = active.outcome, active.start
        if isinstance(error, HeadraceError) and not isinstance(error, Cancelled) and start is not None:
            self.last_error = (error.code, start.redis_ms(time.monotonic()))

    def _tell_end(self, active: ActiveRequest, became: Outcome) -> None:
        log_end(active, became, with_text=self._config.log_prompts)
        if self._on_end is None:
            return
        try:
            self._on_end(active, became)
        except Exception as error:  # a listener's failure must not affect callers
            log.error("end could not be told", id=active.id, **described(error))

    # What is handed back

    def _try_to_hand_back(self, *, crashed: bool, running_only: bool = False) -> bool:
        """Try once to write everything and hand back the rest: all requests, or only those in the engine.

        The next owner generates again the tokens that Redis refuses. Requests that have ended are not handed back.
        """
        if not self._replies.write_all():
            return False
        try:
            with self._registry.leases:
                self._release_all(crashed=crashed, running_only=running_only)
        except TROUBLE as error:
            self._trouble.hit(error)
            return False
        self._trouble.clear()
        return True

    def _release_all(self, *, crashed: bool, running_only: bool) -> None:
        held = [active for active in self._registry.all() if active.outcome is None and (active.outputs or not running_only)]
        count = self._ledger.release([active.delivery for active in held], crashed=crashed)
        for active in held:
            self._abort(active)
            self._registry.drop(active)
        if held:
            log.info("handed back", requests=count, crashed=crashed)
