"""The thread between the engine and the callers: tokens become text, frames and final replies.

It never holds the engine up: outputs pile up in its inbox, and each round takes all that piled up since the last one, as one
frame a request. What Redis does not take now is kept and sent again until it stands there or is no longer ours. It may take
one thing and refuse another (in a full memory a final reply has room, a frame has not): only what it refuses waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from producer.errors import Cancelled, HeadraceError, InternalError, error_from_code
from producer.wire import Result
from worker.config import WorkerConfig
from worker.ending import frame_of, log_end, result_of, sample_of, settlement_of, without_what_is_too_large
from worker.engine.request import StepOutput
from worker.engine_loop import EngineLoop, Refusal
from worker.guard import Guard, described
from worker.metrics import WorkerMetrics
from worker.outputs import Output
from worker.registry import ActiveRequest, Registry
from worker.stream.delivery import LEAST_BULK_BYTES, MAX_REPLY_BYTES, Settlement, TokensFrame
from worker.stream.ledger import Ledger, Outcome, Settled
from worker.stream.trouble import TROUBLE, Outage, Trouble

ROUND_SETTLEMENTS = 64  # final replies in one round trip
LARGE_TRIES = 3  # until a reply counts as too large for the server
IDLE_S = 1.0
HAND_BACK_S = 5.0  # how long a worker that ends tries to hand back; after that its leases lapse

log = structlog.get_logger("headrace.worker")


@dataclass(frozen=True, slots=True)
class Ended:
    """A request is to end now, with `ActiveRequest.end`, whatever it has generated."""

    active: ActiveRequest


@dataclass(frozen=True, slots=True)
class Release:
    """All requests that are in the engine are to be handed back; then ``done`` is set."""

    done: threading.Event = field(default_factory=threading.Event)


OnEnd = Callable[[ActiveRequest, Outcome], None]
Event = list[StepOutput] | Refusal | Release | Ended


class Publisher:
    """Owns the outputs of all running requests; `put` may be called from any thread."""

    def __init__(
        self,
        config: WorkerConfig,
        guard: Guard,
        ledger: Ledger,
        registry: Registry,
        loop: EngineLoop,
        outage: Outage,
        metrics: WorkerMetrics,
        on_end: OnEnd | None = None,
    ) -> None:
        self.requests_done = 0
        self.last_error: tuple[str, int] | None = None  # code and Redis time in ms of the last failure but cancellations
        self._on_end = on_end
        self._config = config
        self._ledger = ledger
        self._registry = registry
        self._trouble = Trouble(outage)  # Redis cannot be asked
        self._frames_trouble = Trouble(outage)  # it refuses frames
        self._ending_trouble = Trouble(outage)  # it refuses some of the endings
        self._metrics = metrics
        self._loop = loop
        self._arrived = threading.Condition()
        self._events: list[Event] = []
        self._ending: dict[ActiveRequest, None] = {}  # have an outcome that is not written yet, oldest first
        self._refused: dict[ActiveRequest, None] = {}  # have one that Redis refused, the one refused longest ago first
        self._unpublished: dict[ActiveRequest, None] = {}
        self._release: Release | None = None
        self._stopping = False
        self._thread = guard.thread("publisher", self._run)

    def start(self) -> None:
        self._thread.start()

    def put(self, event: Event) -> None:
        with self._arrived:
            self._events.append(event)
            self._arrived.notify()

    def end(self, active: ActiveRequest, error: HeadraceError) -> None:
        """Have a request end now, with what it has generated so far as partial output of ``error``."""
        with self._registry.lock:
            if active.end is not None:
                return
            active.end = error
        self.put(Ended(active))

    def lose(self, active: ActiveRequest) -> None:
        """Another worker has it, or has answered it: stop, and say nothing. What has its outcome finds out for itself."""
        with self._registry.lock:  # before it can be given to us again
            if not self._registry.holds(active) or active.outcome is not None:
                return
            self._registry.drop(active)
            self._abort(active)
        self._metrics.lease_lost()
        self._ended(active, "lost")

    def look(self) -> None:
        """Something has changed that may make a frame due."""
        self.put([])

    def release(self) -> threading.Event:
        """Hand all requests that are in the engine back, without ending; the event is set when that is done."""
        release = Release()
        self.put(release)
        return release.done

    def hand_back(self, *, crashed: bool) -> None:
        """Write what can be written, hand all other requests back, and end the thread. The engine has ended before."""
        with self._arrived:
            self._stopping = True
            self._arrived.notify()
        self._thread.join()
        deadline_s = time.monotonic() + HAND_BACK_S
        while not (self._handed_back(crashed=crashed) and not self._refused) and time.monotonic() < deadline_s:
            time.sleep(min(max(self._trouble.pause_s, self._ending_trouble.pause_s), 0.2))

    def _run(self) -> None:
        while self._round():
            pass

    def _round(self) -> bool:
        with self._arrived:
            if not (self._events or self._stopping):
                self._arrived.wait(self._wait_s())
            events, self._events = self._events, []
            last = self._stopping
        for event in events:
            self._absorb(event)
        if self._trouble.ready:
            self._write(self._frames(everything=False), self._due_endings())
        if self._release is not None and self._trouble.ready and self._handed_back(crashed=False, running_only=True):
            self._release.done.set()
            self._release = None
        return not last

    def _wait_s(self) -> float:
        if not (self._ending or self._refused or self._unpublished or self._release):
            return IDLE_S
        if not self._trouble.ready:
            return self._trouble.pause_s
        if self._ending:
            return 0.0
        frames_s = min((self._due_in_s(active) for active in self._unpublished), default=IDLE_S)
        return min(max(frames_s, self._frames_trouble.pause_s), self._ending_trouble.pause_s if self._refused else IDLE_S)

    # What came in

    def _absorb(self, event: Event) -> None:
        if isinstance(event, Refusal):
            active = self._registry.of(event.requests[0])
            if active is not None:
                self._conclude(active, event.error)
        elif isinstance(event, Release):
            self._release = event
        elif isinstance(event, Ended):
            assert event.active.end is not None, "ended for a reason"
            if event.active.outcome is None:
                self._abort(event.active)
            self._conclude(event.active, event.active.end)
        else:
            now_s = time.monotonic()
            for output in event:
                active = self._registry.of(output.request)
                if active is not None and active.outcome is None:
                    self._take_guarded(active, output, now_s)

    def _take_guarded(self, active: ActiveRequest, output: StepOutput, now_s: float) -> None:
        try:
            self._take(active, output, now_s)
        except Exception as error:  # a fault of ours with this one request must not cost the others
            log.error("output could not be taken", id=active.id, **described(error))
            self._abort(active)
            self._conclude(active, InternalError("the output could not be turned into a reply"))

    def _take(self, active: ActiveRequest, output: StepOutput, now_s: float) -> None:
        outputs = active.outputs
        assert outputs is not None, "it is in the engine"
        if outputs.gather.has(output.request):  # stopped by a string, and aborted since
            return
        self._time(active, outputs.of(output.request), len(output.token_ids), now_s)
        ended = outputs.push(output)
        if output.error_code is not None:
            self._abort(active)
            self._conclude(active, error_from_code(output.error_code, output.error_message))
            return
        if ended and not output.finished:
            self._loop.abort(output.request.id)
        if outputs.gather.complete:
            self._conclude(active, result_of(active, worker=self._config.name, model=self._loop.engine.model_name))
        elif outputs.single:
            self._unpublished[active] = None

    def _time(self, active: ActiveRequest, output: Output, num_tokens: int, now_s: float) -> None:
        if not num_tokens:
            return
        self._metrics.tokens(active.delivery.tier, generation=num_tokens)
        if output.last_token_s is not None:
            self._metrics.inter_token(active.delivery.tier, now_s - output.last_token_s, num_tokens)
        elif active.first_token_s is None:
            self._time_first(active, now_s)
        output.last_token_s = active.last_token_s = now_s

    def _time_first(self, active: ActiveRequest, now_s: float) -> None:
        active.first_token_s = now_s
        if active.start is not None and not active.resumed:
            active.delivery.first_token_ms = active.start.redis_ms(now_s)
            self._metrics.first_token(active.delivery.tier, active.start.since_enqueued_ms(now_s) / 1000)

    def _abort(self, active: ActiveRequest) -> None:
        """Have the engine forget all of it."""
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
        self._unpublished.pop(active, None)
        self._ending[active] = None

    # What goes out

    def _due_in_s(self, active: ActiveRequest) -> float:
        assert active.transcript is not None, "it has tokens"
        if active.streamed or active.transcript.num_unpublished >= self._config.checkpoint_tokens:
            return 0.0
        return max(0.0, active.published_s + self._config.checkpoint_s - time.monotonic())

    def _frames(self, *, everything: bool) -> list[tuple[ActiveRequest, TokensFrame]]:
        self._unpublished = {active: None for active in self._unpublished if self._registry.holds(active)}
        if not self._frames_trouble.ready:
            return []
        due = [active for active in self._unpublished if everything or self._due_in_s(active) == 0.0]
        return [(active, frame_of(active)) for active in due]

    def _due_endings(self) -> list[ActiveRequest]:
        again = self._refused if self._ending_trouble.ready else ()
        return [*self._ending, *again][:ROUND_SETTLEMENTS]

    def _write(self, frames: list[tuple[ActiveRequest, TokensFrame]], ending: list[ActiveRequest]) -> bool:
        """Whether Redis could be asked; what it refused is due again after a pause. What may be too large goes last, and alone."""
        settlements = {active: settlement_of(active) for active in ending}
        large = {active: item for active, item in settlements.items() if item.num_bytes > LEAST_BULK_BYTES}
        small = {active: item for active, item in settlements.items() if active not in large}
        light = [(active, frame) for active, frame in frames if len(frame.body) <= LEAST_BULK_BYTES]
        heavy = [(active, frame) for active, frame in frames if len(frame.body) > LEAST_BULK_BYTES]
        return (
            self._write_together(light, small)
            and all(self._write_together([frame], {}) for frame in heavy)
            and all(self._write_large(active, item) for active, item in large.items())
        )

    def _write_together(self, frames: list[tuple[ActiveRequest, TokensFrame]], settlements: dict[ActiveRequest, Settlement]) -> bool:
        if not (frames or settlements):
            return True
        try:
            written = self._ledger.write([frame for _, frame in frames], list(settlements.values()))
        except TROUBLE as error:
            self._trouble.hit(error)
            return False
        self._trouble.over()
        self._take_settled(list(settlements), written.settled)
        self._take_positions([active for active, _ in frames], written.positions)
        return True

    def _write_large(self, active: ActiveRequest, settlement: Settlement) -> bool:
        """Alone: what is too long for the server costs the connection, and what else is on it."""
        if settlement.num_bytes > MAX_REPLY_BYTES:
            self._shrink(active, settlement.num_bytes)
            return True
        try:
            [result] = self._ledger.write([], [settlement]).settled
        except TROUBLE as error:
            self._trouble.hit(error)
            refused = not isinstance(error, RedisTimeoutError) and self._ledger.is_reachable()  # a slow link is no refusal
        else:
            refused = isinstance(result, ResponseError) and str(result).startswith("Protocol error")
            if not refused:
                self._trouble.over()
                self._take_settled([active], [result])
                return True
        active.num_refusals += refused
        if active.num_refusals == LARGE_TRIES:
            self._shrink(active, settlement.num_bytes)
        return False

    def _shrink(self, active: ActiveRequest, num_bytes: int) -> None:
        """Answer with an error what is too large for a reply."""
        log.error("reply too large", id=active.id, num_bytes=num_bytes)
        active.outcome = without_what_is_too_large(active)
        self._refused.pop(active, None)
        self._ending[active] = None

    def _take_settled(self, ending: list[ActiveRequest], settled: list[Settled | ResponseError]) -> None:
        for active, result in zip(ending, settled, strict=True):
            self._ending.pop(active, None)
            self._refused.pop(active, None)
            if isinstance(result, ResponseError):
                self._refused[active] = None
            else:
                self._settled(active, result.outcome, result.published)
        if refusal := next((result for result in settled if isinstance(result, ResponseError)), None):
            self._ending_trouble.hit(refusal)
        elif not self._refused:
            self._ending_trouble.over()

    def _take_positions(self, actives: list[ActiveRequest], positions: list[int | None] | ResponseError) -> None:
        if isinstance(positions, ResponseError):
            self._frames_trouble.hit(positions)
            return
        for active, position in zip(actives, positions, strict=True):
            self._published(active, position)
        if actives or not self._unpublished:
            self._frames_trouble.over()

    def _published(self, active: ActiveRequest, position: int | None) -> None:
        transcript = active.transcript
        assert transcript is not None, "it was published"
        if position is None:
            self._unpublished.pop(active, None)
            self.lose(active)
            return
        transcript.stands_published(position)
        active.published_s = time.monotonic()
        if not transcript.num_unpublished:
            self._unpublished.pop(active, None)

    def _settled(self, active: ActiveRequest, outcome: Outcome, published: int) -> None:
        if outcome == "behind":
            assert active.transcript is not None, "it had a tail"
            active.transcript.stands_published(published)
            self._ending[active] = None
            return
        self._registry.drop(active)
        if outcome == "lost":
            self._metrics.lease_lost()
        elif outcome == "written":
            self.requests_done += 1
            self._metrics.request_finished(sample_of(active))
            self._note_error(active)
        self._ended(active, outcome)

    def _note_error(self, active: ActiveRequest) -> None:
        error, start = active.outcome, active.start
        if isinstance(error, HeadraceError) and not isinstance(error, Cancelled) and start is not None:
            self.last_error = (error.code, start.redis_ms(time.monotonic()))

    def _ended(self, active: ActiveRequest, became: Outcome) -> None:
        log_end(active, became, with_text=self._config.log_prompts)
        if self._on_end is None:
            return
        try:
            self._on_end(active, became)
        except Exception as error:  # whoever listens is no part of what was promised to callers
            log.error("end could not be told", id=active.id, **described(error))

    def _handed_back(self, *, crashed: bool, running_only: bool = False) -> bool:
        """One attempt at writing everything and handing back the rest: all, or those that are in the engine.

        Tokens that Redis refuses are generated again by whoever goes on. What has ended is not handed back.
        """
        while any(due := (self._frames(everything=True), self._due_endings())):
            if not self._write(*due):
                return False
        try:
            with self._registry.leases:
                self._release_all(crashed=crashed, running_only=running_only)
        except TROUBLE as error:
            self._trouble.hit(error)
            return False
        self._trouble.over()
        return True

    def _release_all(self, *, crashed: bool, running_only: bool) -> None:
        held = [active for active in self._registry.all() if active.outcome is None and (active.outputs or not running_only)]
        count = self._ledger.release([active.delivery for active in held], crashed=crashed)
        for active in held:
            self._abort(active)
            self._registry.drop(active)
        if held:
            log.info("handed back", requests=count, crashed=crashed)
