"""The asyncio client: the blocking client's calls as coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any, TypeVar, Unpack

import redis
import redis.asyncio as aioredis
from redis.exceptions import ResponseError

from producer.calls import CancelOutcome, Status
from producer.connection import connect_async
from producer.core import CONNECTION, DEFAULT_URL, ClientCore, HandleCore, Settings
from producer.exchange import Batch, Call, Pause
from producer.options import BatchItem, CommonOptions, RequestOptions
from producer.sockets import within_async
from producer.wire import Chunk, Result

T = TypeVar("T")


class AsyncClient(ClientCore):
    """`producer.Client` for asyncio; use each in one event loop only.

    A task that is cancelled in `submit_and_wait` cancels its request, as a caller's timeout does.
    """

    def __init__(self, url: str = DEFAULT_URL, queue: str = "default", **settings: Unpack[Settings]) -> None:
        """As `ClientCore` says."""
        super().__init__(url, queue, **settings)
        self._connected: aioredis.Redis | None = self._connect()

    async def submit_and_wait(
        self, prompt: str | None = None, *, timeout: float | None = None, **options: Unpack[RequestOptions]
    ) -> Result:
        """As `producer.Client.submit_and_wait`."""
        return await self._drive(self._submit_and_wait_call(prompt, timeout, options))

    async def submit(self, prompt: str | None = None, **options: Unpack[RequestOptions]) -> AsyncHandle:
        """As `producer.Client.submit`."""
        return AsyncHandle(self, await self._drive(self._submit_call(prompt, options)))

    async def submit_many(self, items: Sequence[str | BatchItem]) -> list[AsyncHandle]:
        """As `producer.Client.submit_many`."""
        return [AsyncHandle(self, ticket) for ticket in await self._drive(self._submit_many_call(items))]

    async def score(
        self, prompt: str, continuations: Sequence[str], *, timeout: float | None = None, **options: Unpack[CommonOptions]
    ) -> Result:
        """As `producer.Client.score`."""
        return await self.submit_and_wait(prompt, timeout=timeout, kind="score", continuations=continuations, **options)

    async def embed(self, prompt: str, *, timeout: float | None = None, **options: Unpack[CommonOptions]) -> Result:
        """As `producer.Client.embed`."""
        return await self.submit_and_wait(prompt, timeout=timeout, kind="embed", **options)

    def get(self, id: str) -> AsyncHandle:  # noqa: A002 - the keyword's name everywhere in the interface
        """A handle on a request of this queue, whichever client submitted it; no I/O."""
        return AsyncHandle(self, self._attach(id))

    @property
    def redis(self) -> aioredis.Redis:
        """The underlying redis-py client, for the caller's own commands."""
        if self._connected is None:
            self._connected = self._connect()
        return self._connected

    def _connect(self) -> aioredis.Redis:
        return connect_async(self._url, queue=self.queue, **CONNECTION)

    async def close(self) -> None:
        """Close all connections; the client connects again if it is used again."""
        connected, self._connected = self._connected, None
        if connected is not None:
            await connected.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def _drive(self, call: Call[T]) -> T:
        """Run a call to its end. An exception that interrupts it is thrown into the call, which may have something to take back."""
        try:
            step = next(call)
            while True:
                try:
                    reply = await self._perform(step)
                except BaseException as error:
                    step = call.throw(error)
                else:
                    step = call.send(reply)
        except StopIteration as end:
            value: T = end.value
            return value

    async def _perform(self, step: Batch | Pause) -> list[Any] | None:
        if isinstance(step, Batch):
            return await _send(self.redis.connection_pool, step)
        await asyncio.sleep(step.seconds)
        return None


class AsyncHandle(HandleCore[AsyncClient]):
    """`producer.Handle` for asyncio."""

    async def result(self, timeout: float | None = None) -> Result:
        """As `producer.Handle.result`."""
        return await self._client._drive(self._result_call(timeout))

    async def stream(self, timeout: float | None = None) -> AsyncIterator[Chunk]:
        """As `producer.Handle.stream`, as an asynchronous iterator."""
        if self._ticket.finished:
            for chunk in self._whole():
                yield chunk
            return
        wait = self._wait(timeout)
        await self._client._drive(wait.begin_stream())
        while not wait.finished:
            for chunk in await self._client._drive(wait.poll()):
                yield chunk
        self._ticket.outcome()

    async def status(self) -> Status:
        """As `producer.Handle.status`."""
        return await self._client._drive(self._status_call())

    async def cancel(self) -> CancelOutcome:
        """As `producer.Handle.cancel`."""
        return await self._client._drive(self._cancel_call())


async def _send(pool: aioredis.ConnectionPool, batch: Batch) -> list[Any]:
    """One exchange on one connection, which goes back to the pool only if it owes no reply."""
    num_cancels = _num_cancels()
    async with within_async(batch.connect_limit_s):
        connection = await pool.get_connection()
    try:
        _check_cancelled(num_cancels)
        async with asyncio.timeout(batch.limit_s) as limit:
            await connection.send_packed_command(connection.pack_commands(batch.commands))
            _check_cancelled(num_cancels)
            # The first reply may be long in coming, whatever the socket's timeout; our limit comes before redis-py's, which would
            # return None and leave the connection in use.
            replies = [await _read(connection, timeout=batch.limit_s + 1.0)]
            limit.reschedule(None)
            for _ in batch.commands[1:]:
                replies.append(await _read(connection))  # noqa: PERF401 - in order, one at a time
        return replies
    except TimeoutError:
        await connection.disconnect(nowait=True)
        raise redis.TimeoutError(f"no reply within {batch.limit_s:g} s") from None
    except BaseException:
        await connection.disconnect(nowait=True)
        raise
    finally:
        await pool.release(connection)


def _num_cancels() -> int:
    task = asyncio.current_task()
    assert task is not None, "called in a task"
    return task.cancelling()


def _check_cancelled(num_before: int) -> None:
    """Raise a cancellation that redis-py swallowed: Python 3.11's `asyncio.wait_for` drops one that arrives just as it finishes."""
    if _num_cancels() > num_before:
        raise asyncio.CancelledError


async def _read(connection: Any, **options: float) -> Any:
    try:
        return await connection.read_response(**options)
    except ResponseError as error:
        return error
