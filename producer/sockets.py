"""redis-py's connections, as clients and workers need them.

They leave a server that takes no writes: a demoted master keeps its connections open, and a client that stayed would never
reach the new master, which is behind the same name. Blocking connections can be given a time limit (`within`), and leave no
half-open socket behind when their handshake is interrupted: redis-py closes it on its own errors only, and after a
KeyboardInterrupt the pool would lend out a connection that still waits for a reply, which its next user would take for its own.
"""

from __future__ import annotations

import asyncio
import builtins
import math
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import Any

import redis.asyncio as aioredis
from redis.asyncio.connection import AbstractConnection as AsyncAbstractConnection
from redis.asyncio.connection import SSLConnection as AsyncSSLConnection
from redis.asyncio.connection import UnixDomainSocketConnection as AsyncUnixConnection
from redis.connection import AbstractConnection, Connection, SSLConnection, UnixDomainSocketConnection
from redis.exceptions import ConnectionError, ReadOnlyError, TimeoutError  # noqa: A004 - redis-py's
from redis.sentinel import SentinelManagedConnection, SentinelManagedSSLConnection

Address = tuple[str, int]  # host and port

DEMOTED = "the server is a replica now and takes no writes"
_LEAST_S = 0.001  # zero would be a socket that never waits
_until_s: ContextVar[float] = ContextVar("until_s", default=math.inf)


@contextmanager
def within(limit_s: float) -> Iterator[None]:
    """Within this, blocking connections have ``limit_s`` in all: for connecting, TLS, the handshake, asking others where to connect.

    Only if one name has several addresses, each of them has that long.
    """
    token = _until_s.set(min(_until_s.get(), time.monotonic() + limit_s))
    try:
        yield
    finally:
        _until_s.reset(token)


@asynccontextmanager
async def within_async(limit_s: float) -> AsyncIterator[None]:
    """The same for asyncio and whatever is awaited within it: that is cancelled after ``limit_s``, and redis-py's TimeoutError raised."""
    try:
        with within(limit_s):
            async with asyncio.timeout(limit_s):
                yield
    except builtins.TimeoutError:
        raise TimeoutError(f"no answer within {limit_s:g} s") from None


def left_s() -> float:
    """Seconds left of `within`, never zero; infinite outside of it."""
    return max(_LEAST_S, _until_s.get() - time.monotonic())


def _left_of(timeout_s: float | None) -> float | None:
    """A timeout of redis-py's, or what is left of `within` if that is less."""
    least_s = min(left_s(), math.inf if timeout_s is None else timeout_s)
    return None if least_s == math.inf else least_s


class _Blocking(AbstractConnection):
    _sock: Any

    def connect(self) -> None:
        try:
            super().connect()  # type: ignore[no-untyped-call]  # redis-py does not annotate it
        except BaseException:
            self.disconnect()  # type: ignore[no-untyped-call]  # redis-py does not annotate it
            raise

    def _connect(self) -> Any:
        """Restores the timeouts before the parser takes them for the connection's."""
        own = self.socket_connect_timeout, self.socket_timeout
        self.socket_connect_timeout, self.socket_timeout = map(_left_of, own)
        try:
            return super()._connect()  # type: ignore[no-untyped-call, safe-super]  # redis-py: not annotated, and the next class has one
        finally:
            self.socket_connect_timeout, self.socket_timeout = own

    def read_response(self, *args: Any, **kwargs: Any) -> Any:
        if self._sock is not None:
            self._sock.settimeout(_left_of(self.socket_timeout))
        try:
            return super().read_response(*args, **kwargs)
        except ReadOnlyError:
            self.disconnect()  # type: ignore[no-untyped-call]  # redis-py does not annotate it
            raise ConnectionError(DEMOTED) from None


class Tcp(_Blocking, Connection):
    pass


class Tls(_Blocking, SSLConnection):
    pass


class Unix(_Blocking, UnixDomainSocketConnection):
    pass


class SentinelTcp(_Blocking, SentinelManagedConnection):
    pass


class SentinelTls(_Blocking, SentinelManagedSSLConnection):
    pass


class _Async(AsyncAbstractConnection):
    async def connect(self) -> None:
        try:
            await super().connect()  # type: ignore[no-untyped-call]  # redis-py does not annotate it
        except BaseException:
            await self.disconnect(nowait=True)
            raise

    async def read_response(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return await super().read_response(*args, **kwargs)
        except ReadOnlyError:
            await self.disconnect(nowait=True)
            raise ConnectionError(DEMOTED) from None


class AsyncTcp(_Async, aioredis.Connection):
    pass


class AsyncTls(_Async, AsyncSSLConnection):
    pass


class AsyncUnix(_Async, AsyncUnixConnection):
    pass
