"""What the blocking and the asyncio client have in common: everything except the I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Generic, TypedDict, TypeVar

from producer import calls, tracing, validate
from producer.calls import Submission, Ticket, Wait
from producer.codec import ENCODINGS
from producer.connection import redact
from producer.errors import HeadraceError, InvalidRequest, QueueFull, RedisUnavailable
from producer.exchange import Call, Patience, client_outage
from producer.keys import Keys, check_name
from producer.options import MAX_DEADLINE_S, Wanted, build, build_many
from producer.tracing import NOT_TRACED, Traced
from producer.wire import Chunk, Encoding, Result

DEFAULT_URL = "redis://127.0.0.1:6379/0"
DEADLINE_GRACE_S = 5.0  # how long after its caller's timeout a request that could not be cancelled may still run
ABANDON_S = 1.0  # how long the cancelling of an abandoned request may take
CONNECTION = {"health_check_interval": 0}  # a PING before a call would have its own time limit, and each exchange notices a dead peer


class Settings(TypedDict, total=False):
    """Settings of a client.

    Attributes:
        encoding: of the bodies, requests and replies; ``msgpack`` (default) or ``json``.
        max_queue_depth: most requests queued and running in a tier, unless the queue's own limit is set in Redis; one more
            is refused with `QueueFull`. None (default) does not limit.
        patience_s: how long calls without a timeout wait for Redis during trouble; 10 s by default.
    """

    encoding: Encoding
    max_queue_depth: int | None
    patience_s: float


class ClientCore:
    """A client's settings, and its calls as generators."""

    def __init__(
        self, url: str, queue: str, *, encoding: Encoding = "msgpack", max_queue_depth: int | None = None, patience_s: float = 10.0
    ) -> None:
        """Connect when first used.

        Args:
            url: ``redis://``, ``rediss://``, ``unix://``, ``redis+sentinel://host:port,…/service/db`` or
                ``redis+cluster://host:port,…``; redis-py's query options (``?socket_timeout=20``) apply.
            queue: 1-128 characters of ``[A-Za-z0-9._-]``.

        Raises:
            ValueError: an argument is malformed (`InvalidRequest` is one).
        """
        if encoding not in ENCODINGS:
            raise validate.invalid("encoding", f"one of {', '.join(ENCODINGS)}")
        self.queue = queue
        self.keys = Keys(queue)
        self._url = url
        self._encoding = encoding
        self._max_queue_depth = max_queue_depth if max_queue_depth is None else validate.integer("max_queue_depth", max_queue_depth, 1)
        self._patience_s = validate.number("patience_s", patience_s, 0.0)
        self._outage = client_outage()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({redact(self._url)!r}, queue={self.queue!r})"

    def _patience(self) -> Patience:
        """For a call without a timeout of its own."""
        return self._patience_of(self._patience_s)

    def _patience_of(self, timeout_s: float | None) -> Patience:
        return Patience(timeout_s, self._outage)

    def _submission(self, wanted: Wanted, traced: Traced) -> Submission:
        return calls.submission(self.keys, wanted, self._encoding, self._max_queue_depth, traced.fields)

    def _submit_call(self, prompt: str | None, options: Mapping[str, Any]) -> Call[Ticket]:
        return self._enqueue_call(build(prompt, options), self._patience(), NOT_TRACED)

    def _enqueue_call(self, wanted: Wanted, patience: Patience, within: Traced) -> Call[Ticket]:
        with tracing.span("PRODUCER", "submit", self.queue, {"messaging.message.id": wanted.request.id}, within=within) as traced:
            [ticket] = yield from calls.enqueue([self._submission(wanted, traced)], self.keys, patience)
            if ticket.refused is not None:
                raise ticket.refused
            return ticket

    def _submit_many_call(self, items: Sequence[str | Mapping[str, Any]]) -> Call[list[Ticket]]:
        many = build_many(items)
        with tracing.span("PRODUCER", "submit", self.queue, {"messaging.batch.message_count": len(many)}) as traced:
            return (yield from calls.enqueue([self._submission(wanted, traced) for wanted in many], self.keys, self._patience()))

    def _submit_and_wait_call(self, prompt: str | None, timeout_s: float | None, options: Mapping[str, Any]) -> Call[Result]:
        wanted = build(prompt, options)
        timeout_s = check_timeout(timeout_s)
        if wanted.deadline_s is None and timeout_s is not None:
            wanted = replace(wanted, deadline_s=timeout_s + DEADLINE_GRACE_S)
        with tracing.span("CLIENT", "submit_and_wait", self.queue, {"messaging.message.id": wanted.request.id}) as traced:
            return (yield from self._answer_call(wanted, self._patience_of(timeout_s), traced))

    def _answer_call(self, wanted: Wanted, patience: Patience, traced: Traced) -> Call[Result]:
        """A request whose caller gives up, times out or is interrupted is cancelled before the error is raised.

        A request that another call put is not cancelled: its caller may have more time. One with a given id may be another's
        until the reply to the enqueue says that it is new.
        """
        ticket = None
        try:
            ticket = yield from self._enqueue_call(wanted, patience, traced)
            return (yield from self._wait_call(ticket, patience))
        except (GeneratorExit, RedisUnavailable, QueueFull, InvalidRequest):
            raise
        except BaseException:
            if wanted.generated_id if ticket is None else ticket.is_new and not ticket.finished:
                with suppress(HeadraceError):
                    yield from self._abandon_call(wanted.request.id)
            raise

    def _abandon_call(self, request_id: str) -> Call[calls.CancelOutcome]:
        """Cancel a request that nobody waits for any more, within `ABANDON_S`."""
        return calls.cancel(self.keys, request_id, self._patience_of(ABANDON_S))

    def _wait_call(self, ticket: Ticket, patience: Patience) -> Call[Result]:
        if not ticket.finished:
            wait = Wait(self.keys, ticket, patience, streaming=False)
            while not wait.finished:
                yield from wait.poll()
        return ticket.outcome()

    def _attach(self, request_id: str) -> Ticket:
        return Ticket(check_name("id", request_id))


C = TypeVar("C", bound=ClientCore)


class HandleCore(Generic[C]):
    """One request, as a client knows it."""

    def __init__(self, client: C, ticket: Ticket) -> None:
        self._client = client
        self._ticket = ticket

    @property
    def id(self) -> str:
        return self._ticket.request_id

    @property
    def is_new(self) -> bool:
        """Whether the call that returned this handle put the request; False if its given id was known already.

        It was known, too, if this call put the request, the reply was lost, and the call was sent again.
        """
        return self._ticket.is_new

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r}, queue={self._client.queue!r})"

    def _result_call(self, timeout_s: float | None) -> Call[Result]:
        return self._client._wait_call(self._ticket, self._client._patience_of(check_timeout(timeout_s)))

    def _wait(self, timeout_s: float | None) -> Wait:
        return Wait(self._client.keys, self._ticket, self._client._patience_of(check_timeout(timeout_s)), streaming=True)

    def _whole(self) -> list[Chunk]:
        """A reply that was read before, as one chunk; raises the error if the answer was one."""
        result = self._ticket.outcome()
        return [Chunk(result.text, result.token_ids, attempt=result.attempt, logprobs=result.logprobs)]

    def _status_call(self) -> Call[calls.Status]:
        return calls.status(self._client.keys, self.id, self._client._patience())

    def _cancel_call(self) -> Call[calls.CancelOutcome]:
        return calls.cancel(self._client.keys, self.id, self._client._patience())


def check_timeout(timeout_s: float | None) -> float | None:
    """Return ``timeout_s`` if it is None or a number of seconds from 0 to `MAX_DEADLINE_S`, else raise `InvalidRequest`."""
    return None if timeout_s is None else validate.number("timeout", timeout_s, 0.0, MAX_DEADLINE_S)
