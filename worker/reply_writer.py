"""What goes out to callers: frames of tokens, and final replies.

What Redis does not accept now is kept and sent again until it is written or is no longer ours. Redis may accept one thing and refuse
another (when its memory is full, a final reply has room and a frame has not): only what it refuses waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import structlog
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from worker.context import WorkerContext
from worker.ending import frame_of, settlement_of, without_what_is_too_large
from worker.registry import ActiveRequest
from worker.stream.delivery import LEAST_BULK_BYTES, MAX_REPLY_BYTES, Settlement, TokensFrame
from worker.stream.ledger import Ledger, Outcome, Settled, Written
from worker.stream.trouble import TROUBLE, Trouble

ROUND_SETTLEMENTS = 64  # final replies in one round trip
LARGE_TRIES = 3  # until a reply counts as too large for the server
LARGE_TIMEOUTS = 8  # until a reply counts as too large for the link; each blocks the thread for a socket timeout
IDLE_S = 1.0

OnSettled = Callable[[ActiveRequest, Outcome], None]
OnLost = Callable[[ActiveRequest], None]

log = structlog.get_logger("headrace.worker")


class ReplyWriter:
    """Owns what has to be written; used by one thread at a time.

    Args:
        trouble: that thread's state of Redis being out of reach.
        on_settled: called when a request's end is decided: its reply is written, or another worker answers it.
        on_lost: called when a frame was refused because the request is no longer ours to run.
    """

    def __init__(self, context: WorkerContext, ledger: Ledger, trouble: Trouble, *, on_settled: OnSettled, on_lost: OnLost) -> None:
        self._config = context.config
        self._registry = context.registry
        self._ledger = ledger
        self._on_settled = on_settled
        self._on_lost = on_lost
        self._trouble = trouble
        self._frames_trouble = Trouble(context.outage)  # Redis refuses frames
        self._heavy_trouble = Trouble(context.outage)  # a large frame does not get through, others do
        self._replies_trouble = Trouble(context.outage)  # it refuses some of the final replies
        self._unpublished: dict[ActiveRequest, None] = {}  # have tokens that are not written yet
        self._heavy: set[ActiveRequest] = set()  # of these, the ones whose frame did not get through for its size
        self._unsettled: dict[ActiveRequest, None] = {}  # have an outcome that is not written yet, oldest first
        self._refused: dict[ActiveRequest, None] = {}  # have an outcome that Redis refused, the one refused longest ago first

    def mark_unpublished(self, active: ActiveRequest) -> None:
        """It has new tokens, to be written when its next frame is due."""
        self._unpublished[active] = None

    def mark_unsettled(self, active: ActiveRequest) -> None:
        """It has its outcome, to be written together with its unpublished tokens."""
        self._unpublished.pop(active, None)
        self._unsettled[active] = None

    @property
    def any_refused(self) -> bool:
        """Whether a final reply that Redis refused is still to be written."""
        return bool(self._refused)

    @property
    def refused_pause_s(self) -> float:
        """Seconds until the refused final replies are due again."""
        return self._replies_trouble.pause_s

    @property
    def due_in_s(self) -> float:
        """Seconds until something is due; `IDLE_S` if nothing waits."""
        if self._unsettled:
            return 0.0
        frames_s = min((self._frame_due_in_s(active) for active in self._unpublished), default=IDLE_S)
        return min(max(frames_s, self._frames_trouble.pause_s), self._replies_trouble.pause_s if self._refused else IDLE_S)

    def write_due(self) -> None:
        """Write what is due, with as many final replies as one round trip takes."""
        self._write(self._frames(everything=False), self._due_endings())

    def write_all(self) -> bool:
        """Write everything, due or not, except what Redis refuses; False if Redis could not be reached."""
        while True:
            frames, endings = self._frames(everything=True), self._due_endings()
            if not frames and not endings:
                return True
            if not self._write(frames, endings):
                return False

    # What is due

    def _frame_due_in_s(self, active: ActiveRequest) -> float:
        assert active.transcript is not None, "it has tokens"
        if active in self._heavy:
            return self._heavy_trouble.pause_s
        if active.streamed or active.transcript.num_unpublished >= self._config.checkpoint_tokens:
            return 0.0
        return max(0.0, active.published_s + self._config.checkpoint_s - time.monotonic())

    def _frames(self, *, everything: bool) -> list[tuple[ActiveRequest, TokensFrame]]:
        self._unpublished = {active: None for active in self._unpublished if self._registry.holds(active)}
        self._heavy &= self._unpublished.keys()
        if not self._frames_trouble.ready:
            return []
        at_once = self._unpublished.keys() - self._heavy if everything else ()
        due = [active for active in self._unpublished if active in at_once or self._frame_due_in_s(active) == 0.0]
        return [(active, frame_of(active)) for active in due]

    def _due_endings(self) -> list[ActiveRequest]:
        again = self._refused if self._replies_trouble.ready else ()
        return [*self._unsettled, *again][:ROUND_SETTLEMENTS]

    # Writing

    def _write(self, frames: Sequence[tuple[ActiveRequest, TokensFrame]], endings: Sequence[ActiveRequest]) -> bool:
        """Returns whether Redis was reached; what it refused is due again after a pause. Replies that may be too large go last, alone."""
        small, large = _by_size(endings)
        light = [(active, frame) for active, frame in frames if len(frame.body) <= LEAST_BULK_BYTES]
        heavy = [(active, frame) for active, frame in frames if len(frame.body) > LEAST_BULK_BYTES]
        return (
            self._write_together(light, small)
            and all(self._write_heavy(active, frame) for active, frame in heavy)
            and all(self._write_large(active) for active in large)
        )

    def _write_together(self, frames: Sequence[tuple[ActiveRequest, TokensFrame]], settlements: dict[ActiveRequest, Settlement]) -> bool:
        if not (frames or settlements):
            return True
        try:
            written = self._ledger.write([frame for _, frame in frames], list(settlements.values()))
        except TROUBLE as error:
            self._trouble.hit(error)
            return False
        self._trouble.clear()
        self._take_settled(list(settlements), written.settled)
        self._take_positions([active for active, _ in frames], written.positions)
        return True

    def _write_alone(self, frames: Sequence[TokensFrame], settlements: Sequence[Settlement]) -> Written | Exception | None:
        """Write what may be too large for the server or the link: that costs the connection, and everything else sent on it.

        Returns what became of it; the error, if this failed although Redis takes other writes; None if Redis could not be asked.
        """
        try:
            written = self._ledger.write(frames, settlements)
        except TROUBLE as error:
            if self._ledger.is_writable():
                return error
            self._trouble.hit(error)
            return None
        self._trouble.clear()
        return written

    def _write_heavy(self, active: ActiveRequest, frame: TokensFrame) -> bool:
        written = self._write_alone([frame], [])
        if isinstance(written, Written):
            self._heavy_trouble.clear()
            self._heavy.discard(active)
            self._take_positions([active], written.positions)
        elif written is not None:
            self._heavy.add(active)
            self._heavy_trouble.hit(written)
        return written is not None

    def _write_large(self, active: ActiveRequest) -> bool:
        settlement = settlement_of(active)
        if settlement.num_bytes > MAX_REPLY_BYTES:
            self._shrink(active, settlement.num_bytes)
            return True
        written = self._write_alone([], [settlement])
        if written is None:
            return False
        [result] = written.settled if isinstance(written, Written) else [written]
        if isinstance(result, Settled) or (isinstance(result, ResponseError) and not str(result).startswith("Protocol error")):
            self._take_settled([active], [result])
        else:
            self._refuse_large(active, settlement.num_bytes, result)
        return True

    def _refuse_large(self, active: ActiveRequest, num_bytes: int, error: Exception) -> None:
        """Keep for later a reply that fails alone: because of its size, or because the link is slow at the moment."""
        if isinstance(error, RedisTimeoutError):
            active.num_timeouts += 1
        else:
            active.num_refusals += 1
        self._unsettled.pop(active, None)
        self._refused.pop(active, None)
        if active.num_refusals == LARGE_TRIES or active.num_timeouts == LARGE_TIMEOUTS:
            self._shrink(active, num_bytes)
        else:
            self._refused[active] = None
            self._replies_trouble.hit(error)

    def _shrink(self, active: ActiveRequest, num_bytes: int) -> None:
        """Replace a reply that is too large by an error."""
        log.error("reply too large", id=active.id, num_bytes=num_bytes)
        active.outcome = without_what_is_too_large(active)
        self._refused.pop(active, None)
        self._unsettled[active] = None

    # What Redis says

    def _take_settled(self, endings: Sequence[ActiveRequest], settled: Sequence[Settled | ResponseError]) -> None:
        for active, result in zip(endings, settled, strict=True):
            self._unsettled.pop(active, None)
            self._refused.pop(active, None)
            if isinstance(result, ResponseError):
                self._refused[active] = None
            elif result.outcome == "behind":
                assert active.transcript is not None, "it had a tail"
                active.transcript.stands_published(result.published)
                self._unsettled[active] = None
            else:
                self._on_settled(active, result.outcome)
        if refusal := next((result for result in settled if isinstance(result, ResponseError)), None):
            self._replies_trouble.hit(refusal)
        elif not self._refused:
            self._replies_trouble.clear()

    def _take_positions(self, actives: Sequence[ActiveRequest], positions: Sequence[int | None] | ResponseError) -> None:
        if isinstance(positions, ResponseError):
            self._frames_trouble.hit(positions)
            return
        for active, position in zip(actives, positions, strict=True):
            self._on_published(active, position)
        if actives or not self._unpublished:
            self._frames_trouble.clear()

    def _on_published(self, active: ActiveRequest, position: int | None) -> None:
        transcript = active.transcript
        assert transcript is not None, "it was published"
        if position is None:
            self._unpublished.pop(active, None)
            self._on_lost(active)
            return
        transcript.stands_published(position)
        active.published_s = time.monotonic()
        if not transcript.num_unpublished:
            self._unpublished.pop(active, None)


def _by_size(endings: Sequence[ActiveRequest]) -> tuple[dict[ActiveRequest, Settlement], list[ActiveRequest]]:
    """The replies that any server accepts, and the requests with larger ones, which are encoded again one by one to save memory."""
    small: dict[ActiveRequest, Settlement] = {}
    large = []
    for active in endings:
        settlement = settlement_of(active)
        if settlement.num_bytes > LEAST_BULK_BYTES:
            large.append(active)
        else:
            small[active] = settlement
    return small, large
