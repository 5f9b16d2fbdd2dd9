"""The blocking client. One instance serves any number of threads, and works in a forked child too."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, TypeVar, Unpack

import redis
from redis import Redis
from redis.exceptions import ResponseError

from producer.calls import CancelOutcome, Status
from producer.connection import connect
from producer.core import CONNECTION, DEFAULT_URL, ClientCore, HandleCore, Settings
from producer.exchange import Batch, Call, Pause
from producer.options import BatchItem, CommonOptions, RequestOptions
from producer.sockets import within
from producer.wire import Chunk, Result

T = TypeVar("T")


class Client(ClientCore):
    """Puts requests on a queue and blocks on their replies.

    Threads share it freely; a forked child opens connections of its own. Every call may raise `RedisUnavailable`.
    """

    def __init__(self, url: str = DEFAULT_URL, queue: str = "default", **settings: Unpack[Settings]) -> None:
        """As `ClientCore` says."""
        super().__init__(url, queue, **settings)
        self._by_process: dict[int, Redis] = {os.getpid(): self._connect()}

    def submit_and_wait(self, prompt: str | None = None, *, timeout: float | None = None, **options: Unpack[RequestOptions]) -> Result:
        """Run one request and return its result.

        A request whose caller times out or is interrupted (Ctrl-C) is cancelled. One with a given ``id`` is cancelled only if Redis
        has said that this call put it, which it does not if the first reply was lost and the request was sent again. What is not
        cancelled ends by itself soon after, because the timeout is also its deadline unless ``deadline_s`` gives one.

        Args:
            timeout: seconds in all, including trouble with Redis; None waits as long as it takes.

        Raises:
            InvalidRequest: before anything is sent.
            WaitTimeout, QueueFull, Cancelled, DeadlineExceeded, BatchFailed, …: see `producer.errors`.
        """
        return self._drive(self._submit_and_wait_call(prompt, timeout, options))

    def submit(self, prompt: str | None = None, **options: Unpack[RequestOptions]) -> Handle:
        """Put one request on the queue; raises `QueueFull` if its tier is full.

        An id that is already known is not run again: the handle is for the earlier request.
        """
        return Handle(self, self._drive(self._submit_call(prompt, options)))

    def submit_many(self, items: Sequence[str | BatchItem]) -> list[Handle]:
        """Put many requests on the queue in few round trips; each is a prompt, or a map of `submit`'s keywords.

        Nothing is sent if one is invalid. If a full queue refuses one, its handle's `result` raises `QueueFull`.
        """
        return [Handle(self, ticket) for ticket in self._drive(self._submit_many_call(items))]

    def score(self, prompt: str, continuations: Sequence[str], *, timeout: float | None = None, **options: Unpack[CommonOptions]) -> Result:
        """Summed log-probability of each continuation after the prompt, in ``Result.scores``."""
        return self.submit_and_wait(prompt, timeout=timeout, kind="score", continuations=continuations, **options)

    def embed(self, prompt: str, *, timeout: float | None = None, **options: Unpack[CommonOptions]) -> Result:
        """The prompt's pooled hidden state, in ``Result.embedding``."""
        return self.submit_and_wait(prompt, timeout=timeout, kind="embed", **options)

    def get(self, id: str) -> Handle:  # noqa: A002 - the keyword's name everywhere in the interface
        """A handle on a request of this queue, whichever client submitted it."""
        return Handle(self, self._attach(id))

    def abandon(self, id: str) -> CancelOutcome:  # noqa: A002 - the keyword's name everywhere in the interface
        """`Handle.cancel` for a caller in a hurry: it waits for Redis for one second only."""
        return self._drive(self._abandon_call(id))

    @property
    def redis(self) -> Redis:
        """The underlying redis-py client, for the caller's own commands."""
        pid = os.getpid()
        client = self._by_process.get(pid)
        if client is None:
            client = self._connect_anew(pid)
        return client

    def _connect_anew(self, pid: int) -> Redis:
        """In a forked child, or after `close`. If several threads get here at once, one's client is kept; the others' were never used.

        A child takes over nothing of its parent's: a thread that was not forked may have held a lock of the pool.
        """
        client = self._by_process.setdefault(pid, self._connect())
        for other in self._by_process.keys() - {pid}:
            self._by_process.pop(other, None)
        return client

    def _connect(self) -> Redis:
        return connect(self._url, queue=self.queue, **CONNECTION)

    def close(self) -> None:
        """Close all connections; the client connects again if it is used again."""
        connected = self._by_process.pop(os.getpid(), None)
        if connected is not None:
            connected.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _drive(self, call: Call[T]) -> T:
        """Run a call to its end. An exception that interrupts it is thrown into the call, which may have something to take back."""
        try:
            step = next(call)
            while True:
                try:
                    reply = self._perform(step)
                except BaseException as error:
                    step = call.throw(error)
                else:
                    step = call.send(reply)
        except StopIteration as end:
            value: T = end.value
            return value

    def _perform(self, step: Batch | Pause) -> list[Any] | None:
        if isinstance(step, Batch):
            return _send(self.redis.connection_pool, step)
        time.sleep(step.seconds)
        return None


class Handle(HandleCore[Client]):
    """One request on the queue. Threads may share it; another process gets its own with `Client.get`."""

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the final reply.

        Raises:
            WaitTimeout: not within ``timeout`` seconds; the request continues.
            ReplyExpired, UnknownRequest: there is no reply to wait for.
            Cancelled, DeadlineExceeded, BatchFailed, …: the error that the request was answered with.
        """
        return self._client._drive(self._result_call(timeout))

    def stream(self, timeout: float | None = None) -> Iterator[Chunk]:
        """Iterate over the answer as it is generated; the chunks joined are the final text. Raises what `result` does.

        With ``n`` > 1 there is one chunk, at the end: the first output; scores and embeddings have none.

        Args:
            timeout: seconds until the answer must be complete.
        """
        if self._ticket.finished:
            yield from self._whole()
            return
        wait = self._wait(timeout)
        self._client._drive(wait.begin_stream())
        while not wait.finished:
            yield from self._client._drive(wait.poll())
        self._ticket.outcome()

    def status(self) -> Status:
        """``queued``, ``running``, ``done``, ``failed`` or ``cancelled``.

        ``unknown``: never seen, forgotten (a day after the end), or put by a bare XADD and not taken by a worker yet.
        """
        return self._client._drive(self._status_call())

    def cancel(self) -> CancelOutcome:
        """Ask for the request to be cancelled.

        Returns:
            ``cancelled`` if it had not started, ``cancelling`` if a worker runs it, ``finished`` if it had ended already,
            ``unknown`` if Redis has no state for the id. A request with it that was put by a bare XADD and still waits is cancelled
            when a worker takes it; one that is put within a day is refused.
        """
        return self._client._drive(self._cancel_call())


def _send(pool: redis.ConnectionPool, batch: Batch) -> list[Any]:
    """One exchange on one connection, which goes back to the pool only if it owes no reply."""
    with within(batch.connect_limit_s):
        connection = pool.get_connection()
    try:
        connection.send_packed_command(connection.pack_commands(batch.commands))
        if not connection.can_read(timeout=batch.limit_s):
            raise redis.TimeoutError(f"no reply within {batch.limit_s:g} s")
        return [_read(connection) for _ in batch.commands]
    except BaseException:
        connection.disconnect()
        raise
    finally:
        pool.release(connection)


def _read(connection: Any) -> Any:
    try:
        return connection.read_response()
    except ResponseError as error:
        return error
