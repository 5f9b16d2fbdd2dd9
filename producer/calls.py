"""What the clients do, as generators for `exchange`: put, cancel, wait."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from redis.exceptions import ResponseError

from producer import codec, scripts
from producer.connection import BLOCK_S, SOCKET_TIMEOUT_S
from producer.errors import Cancelled, HeadraceError, InvalidRequest, QueueFull, RedisUnavailable, ReplyExpired, UnknownRequest
from producer.exchange import GRACE_S, Batch, Call, Patience, exchange, one
from producer.keys import CONTROL_LENGTH, Keys
from producer.options import Wanted
from producer.reply import START, ReplyFold, outcome, parse_entries
from producer.scripts import Argument
from producer.wire import Chunk, Encoding, Frame, Result

REPLY_TTL_MS = 3600 * 1000
FINISHED_STATE_TTL_MS = 24 * 3600 * 1000
STATE_TTL_MS = 7 * 24 * 3600 * 1000
FINAL = (b"done", b"failed", b"cancelled")
READ_COUNT = 256
PIPELINE = 256  # requests put at once
LOST_WITHIN_S = 3600.0  # Redis lost a state that vanishes this soon after a sign of life: it outlives the end by a day

Status = Literal["queued", "running", "done", "failed", "cancelled", "unknown"]
CancelOutcome = Literal["cancelled", "cancelling", "finished", "unknown"]
_log = logging.getLogger("headrace")


@dataclass(frozen=True, slots=True)
class Submission:
    """A request ready to be put on its stream, for the first time or again."""

    request_id: str
    keys: tuple[str, str, str, str]
    args: tuple[Argument, ...]
    durable: bool
    generated_id: bool
    streaming: bool

    def command(self, deadline: str | None = None) -> tuple[Argument, ...]:
        """The enqueue script's call; ``deadline`` replaces the relative one when the request is put again."""
        args = self.args if deadline is None else (*self.args[:2], deadline, *self.args[3:])
        return scripts.load("enqueue").command(self.keys, args)

    def is_put_by(self, reply: list[Any]) -> bool:
        """Whether the call answered by ``reply`` put it: a generated id is already known only if the reply to an earlier try was lost."""
        return reply[0] == b"queued" or (reply[0] == b"exists" and self.generated_id)


def submission(keys: Keys, wanted: Wanted, encoding: Encoding, max_queue_depth: int | None, trace_context: Mapping[str, str]) -> Submission:
    """Encode a request.

    Args:
        trace_context: fields that carry the caller's trace.

    Raises:
        InvalidRequest: it is larger than an entry may be.
    """
    request = wanted.request
    args = (
        request.tier,
        "" if max_queue_depth is None else max_queue_depth,
        "" if wanted.deadline_s is None else f"+{max(1, round(wanted.deadline_s * 1000))}",
        STATE_TTL_MS,
        REPLY_TTL_MS,
        FINISHED_STATE_TTL_MS,
        encoding,
        cancelled_body(encoding),
        int(wanted.durable),
        *(part for item in (codec.encode_request(request, encoding) | dict(trace_context)).items() for part in item),
    )
    names = (keys.stream(request.tier), keys.reply(request.id), keys.state(request.id), keys.limits)
    return Submission(request.id, names, args, wanted.durable, wanted.generated_id, request.stream)


def cancelled_body(encoding: Encoding) -> bytes:
    """What the scripts answer to a request that is cancelled before a worker takes it."""
    return codec.encode_body(codec.encode_error(Cancelled("cancelled before it started")), encoding)


@dataclass(slots=True)
class Ticket:
    """What a client remembers of a request: how to put it again if Redis loses it, and its last frame once known.

    Attributes:
        submission: None for a request that this client did not put.
        is_new: this call put it. If not, its id was known, and the client that put it may be waiting for it: another one, or
            this one, if the reply to its first try was lost.
        deadline: absolute, as the enqueue script returned it ('' for none); None if it did not.
        refused: why the request was not accepted (`Client.submit_many`).
        alive_s: monotonic time of the last sign that Redis knows the request.
    """

    request_id: str
    submission: Submission | None = None
    is_new: bool = False
    deadline: str | None = None
    refused: HeadraceError | None = None
    final: Frame | None = None
    alive_s: float = -math.inf

    def outcome(self) -> Result:
        """The result; raises the error if the answer was one."""
        if self.refused is not None:
            raise self.refused
        assert self.final is not None, "not finished"
        return outcome(self.final, self.request_id)

    @property
    def finished(self) -> bool:
        """Whether `outcome` is known to this client."""
        return self.final is not None or self.refused is not None


def enqueue(items: Sequence[Submission], keys: Keys, patience: Patience) -> Call[list[Ticket]]:
    """Put requests on their streams, `PIPELINE` at a time. If a queue is full, the ticket says so, and the others continue.

    Raises:
        RedisUnavailable: it is unknown which were accepted; putting them again under the same ids is safe. If it is not
            `retryable`, the new ``durable`` ones were cancelled, because they may not be on disk: they need other ids.
        InvalidRequest: ``durable`` was asked for, and this server does not support it; they were cancelled as well.
    """
    tickets: list[Ticket] = []
    for start in range(0, len(items), PIPELINE):
        tickets += yield from _enqueue_part(items[start : start + PIPELINE], keys, patience)
    return tickets


def _enqueue_part(items: Sequence[Submission], keys: Keys, patience: Patience) -> Call[list[Ticket]]:
    durable = any(item.durable for item in items)
    commands = tuple(item.command() for item in items)
    replies = yield from exchange(
        lambda: Batch((*commands, _wait_for_disk(patience)) if durable else commands), patience, scripts.load("enqueue"), judge_last=durable
    )
    if durable:
        confirmed = replies.pop()
        new = [item for item, reply in zip(items, replies, strict=True) if item.durable and item.is_put_by(reply)]
        yield from _check_durable(confirmed, new, keys, patience)
    return [_ticket(item, reply) for item, reply in zip(items, replies, strict=True)]


def _ticket(item: Submission, reply: list[Any]) -> Ticket:
    ticket = Ticket(item.request_id, item, item.is_put_by(reply), alive_s=time.monotonic())
    if reply[0] == b"queued":
        ticket.deadline = reply[2].decode()
    elif reply[0] == b"full":
        ticket.refused = QueueFull(
            f"{reply[1]} requests are queued or running, the limit is {reply[2].decode()}", request_id=item.request_id
        )
    return ticket


def _wait_for_disk(patience: Patience) -> tuple[Argument, ...]:
    return ("WAITAOF", 1, 0, max(1, int(min(SOCKET_TIMEOUT_S / 2, patience.remaining_s()) * 1000)))


def _check_durable(confirmed: Any, new: Sequence[Submission], keys: Keys, patience: Patience) -> Call[None]:
    """Cancel what was put just now and is not durable; what was on the queue before stays.

    Args:
        confirmed: WAITAOF's reply.
    """
    if not isinstance(confirmed, ResponseError) and confirmed[0] >= 1:
        return
    for item in new:
        yield from cancel(keys, item.request_id, patience)
    cancelled = "; it was cancelled: put it again under another id" if new else ""
    if isinstance(confirmed, ResponseError):
        raise InvalidRequest(f"durable must be off, this server cannot ({confirmed}){cancelled}", field="durable")
    error = RedisUnavailable(f"Redis did not confirm in time that the request is on disk{cancelled}")
    error.retryable = not new
    raise error


def cancel(keys: Keys, request_id: str, patience: Patience) -> Call[CancelOutcome]:
    script = scripts.load("cancel")
    names = (keys.reply(request_id), keys.state(request_id), keys.control)
    args = (request_id, cancelled_body("msgpack"), cancelled_body("json"), REPLY_TTL_MS, FINISHED_STATE_TTL_MS, CONTROL_LENGTH)
    said: bytes = yield from one(script.command(names, args), patience, script)
    return cast("CancelOutcome", said.decode())


def status(keys: Keys, request_id: str, patience: Patience) -> Call[Status]:
    reply: bytes | None = yield from one(("HGET", keys.state(request_id), "status"), patience)
    return "unknown" if reply is None else cast("Status", reply.decode())


class Wait:
    """One caller's wait for one reply: call `poll` until it is `finished`."""

    def __init__(self, keys: Keys, ticket: Ticket, patience: Patience, *, streaming: bool) -> None:
        self.ticket = ticket
        self._keys = keys
        self._patience = patience
        self._streaming = streaming
        self._fold = ReplyFold(streaming=streaming)
        self._look_next = time.monotonic() - ticket.alive_s > BLOCK_S

    @property
    def finished(self) -> bool:
        """Whether everything up to the last frame was read."""
        return self._fold.final is not None or self.ticket.refused is not None

    def begin_stream(self) -> Call[None]:
        """Have the worker publish one frame per step, unless the request asked for that from the start."""
        if self.ticket.submission is None or not self.ticket.submission.streaming:
            script, request_id = scripts.load("stream"), self.ticket.request_id
            command = script.command((self._keys.state(request_id), self._keys.control), (request_id, CONTROL_LENGTH))
            yield from one(command, self._patience, script)

    def poll(self) -> Call[list[Chunk]]:
        """Continue reading for a slice of time; returns the new chunks.

        Raises:
            WaitTimeout: out of time.
            RedisUnavailable: out of time while Redis is in trouble, or Redis refuses for good.
            ReplyExpired, UnknownRequest: there is nothing to wait for.
        """
        late = self._patience.remaining_s() <= 0.0
        chunks = yield from (self._look() if late or self._look_next else self._block())
        self.ticket.final = self.ticket.final or self._fold.final
        if late and not self.finished:
            raise self._patience.wait_timeout(self.ticket.request_id)
        return chunks

    def _block(self) -> Call[list[Chunk]]:
        [reply] = yield from exchange(self._blocking_read, self._patience)
        self._look_next = not reply
        return self._fold.feed(parse_entries(reply))

    def _blocking_read(self) -> Batch:
        """After trouble it does not block: `_look` comes next, because Redis may have come back without the request."""
        block_s = 0.0 if self._patience.troubled else min(BLOCK_S, self._patience.remaining_s())
        return Batch((self._read("BLOCK", max(1, int(block_s * 1000))),), block_s + GRACE_S)

    def _read(self, *options: Argument) -> tuple[Argument, ...]:
        return ("XREAD", "COUNT", READ_COUNT, *options, "STREAMS", self._keys.reply(self.ticket.request_id), self._fold.last_id)

    def _look(self) -> Call[list[Chunk]]:
        """Read without blocking, and find out why there is nothing.

        The state is read before the reply, because the script that makes the state final also writes the last frame.
        """
        state = ("HGET", self._keys.state(self.ticket.request_id), "status")
        status, reply = yield from exchange(lambda: Batch((state, self._read())), self._patience)
        chunks = self._fold.feed(parse_entries(reply))
        self._look_next = False
        if not reply and status in FINAL:
            self._missed()
        elif not reply and status is None:
            yield from self._lost()
        else:
            self.ticket.alive_s = time.monotonic()
        return chunks

    def _missed(self) -> None:
        """It has ended, but not after the last entry read: after a failover ids may run backwards, so look at all of them once."""
        if self._fold.last_id == START:
            raise ReplyExpired("the request has ended, and its reply has expired", request_id=self.ticket.request_id)
        self._fold.rewind()
        self._look_next = True

    def _lost(self) -> Call[None]:
        """Redis does not know the request: if it is ours and was lost just now, put it again under the same id."""
        ticket = self.ticket
        if ticket.submission is None or time.monotonic() - ticket.alive_s > LOST_WITHIN_S:
            raise UnknownRequest("no request of that id is known", request_id=ticket.request_id)
        _log.warning("Redis has lost request %s, putting it again", ticket.request_id)
        reply = yield from one(ticket.submission.command(ticket.deadline), self._patience, scripts.load("enqueue"))
        self.ticket.refused = _ticket(ticket.submission, reply).refused
        if self._streaming:
            yield from self.begin_stream()
        self._fold.rewind()
