"""Connections to Redis, with every time limit and retry explicit, and what its errors mean.

redis-py by default times a socket out after five seconds, sends a failed command again by itself
and holds at most 100 connections. Here the library sends nothing twice: the caller decides,
because only the caller knows whether a command may have been run already.
"""

from __future__ import annotations

import os
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

import redis
import redis.asyncio as aioredis
from redis import exceptions
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.connection import UnixDomainSocketConnection, parse_url
from redis.retry import Retry

from producer.keys import Keys
from producer.sentinel import AsyncPool, AsyncSentinel, Sentinel
from producer.sockets import Address, AsyncTcp, AsyncTls, AsyncUnix, SentinelTcp, SentinelTls, Tcp, Tls, Unix

SOCKET_TIMEOUT_S = 10.0  # no reply for this long is a dead connection
CONNECT_TIMEOUT_S = 5.0
BLOCK_S = 4.0  # one slice of a blocking read; shorter than the socket's timeout, or a quiet stream would look dead
HEALTH_CHECK_S = 30
MAX_CONNECTIONS = 2**31  # a blocked caller holds a connection; we do not limit the number of callers
SENTINEL_SCHEMES = {"redis+sentinel": "redis", "rediss+sentinel": "rediss"}
CLUSTER_SCHEMES = {"redis+cluster": "redis", "rediss+cluster": "rediss"}
_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")

_TRANSIENT_PREFIXES = (
    "BUSY ",
    "CLUSTERDOWN",
    "LOADING",
    "MASTERDOWN",
    "MISCONF",
    "NOREPLICAS",
    "OOM",
    "READONLY",
    "TRYAGAIN",
    "UNBLOCKED",
    "max number of clients reached",
)


def connect(url: str, *, queue: str | None = None, **options: Any) -> redis.Redis:
    """A client for ``redis://``, ``rediss://``, ``unix://``, ``redis+sentinel://host:port,…/service/db`` or ``redis+cluster://host:port,…``.

    It connects when first used, answers in bytes and RESP2 shapes, never sends a command twice, and does not limit connections.

    Args:
        queue: on a cluster, the queue whose node is followed; only that queue's keys can be reached.
        options: settings of the connections (redis-py's names) in place of ours; those in the URL's query override both.

    Raises:
        ValueError: the URL is malformed, names a missing certificate file, or is a cluster's while ``queue`` is missing;
            the message holds no password.
    """
    retry = Retry(NoBackoff(), 0)
    if _scheme(url) in SENTINEL_SCHEMES:
        return _connect_sentinel(url, retry, options)
    return redis.Redis.from_pool(redis.ConnectionPool(**_pool_options(url, queue, retry, options, _CLASSES)))


def connect_async(url: str, *, queue: str | None = None, **options: Any) -> aioredis.Redis:
    """What `connect` makes, for asyncio."""
    retry = AsyncRetry(NoBackoff(), 0)
    if _scheme(url) in SENTINEL_SCHEMES:
        return _connect_async_sentinel(url, retry, options)
    return aioredis.Redis.from_pool(aioredis.ConnectionPool(**_pool_options(url, queue, retry, options, _ASYNC_CLASSES)))


def redact(url: str) -> str:
    """``url`` without its user, password and query, fit for logs and messages."""
    return re.sub(r"//[^/]*@", "//", url.partition("?")[0])


def is_transient(error: BaseException) -> bool:
    """Whether waiting can help: lost connections, restarts, failovers, full memory; not passwords, ACLs or our own bugs."""
    if isinstance(error, exceptions.AuthenticationError | exceptions.AuthorizationError):
        return False
    if isinstance(error, exceptions.ConnectionError | exceptions.TimeoutError | exceptions.ClusterDownError):
        return True
    return isinstance(error, exceptions.ResponseError) and _is_transient_reply(error)


def _is_transient_reply(error: exceptions.ResponseError) -> bool:
    """By type if redis-py has one (it then strips the code from the text), else by the code that the text begins with."""
    transient = (exceptions.ReadOnlyError, exceptions.OutOfMemoryError, exceptions.TryAgainError, exceptions.AskError)
    return isinstance(error, transient) or str(error).startswith(_TRANSIENT_PREFIXES)


class Backoff:
    """Growing, jittered pauses: the n-th lies between half and all of ``min(first * 2**n, cap)``."""

    def __init__(self, first_s: float = 0.05, cap_s: float = 2.0) -> None:
        self._first_s = first_s
        self._cap_s = cap_s
        self._count = 0

    def next_s(self) -> float:
        """How long to pause now, in seconds."""
        pause_s: float = min(self._first_s * 2.0 ** min(self._count, 30), self._cap_s)
        self._count += 1
        return pause_s * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        """The trouble is over: start small next time."""
        self._count = 0


class Outage:
    """Redis trouble, shared by several users of it: it begins when the first of them meets it, and ends when the last is through.

    Args:
        on_begin: called with the first error.
        on_end: called with the duration in seconds.
    """

    def __init__(
        self, on_begin: Callable[[BaseException], None], on_end: Callable[[float], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._on_begin = on_begin
        self._on_end = on_end
        self._clock = clock
        self._lock = threading.Lock()
        self._afflicted: set[object] = set()
        self._since_s = 0.0

    def enter(self, error: BaseException, who: object = None) -> None:
        """``who`` met ``error``; None stands for all users that need not be distinguished, because one's experience holds for all."""
        with self._lock:
            if not self._afflicted:
                self._since_s = self._clock()
                self._on_begin(error)
            self._afflicted.add(who)

    def leave(self, who: object = None) -> None:
        """``who`` is through, or was not in trouble."""
        if who not in self._afflicted:  # the usual case, without the lock
            return
        with self._lock:
            if who in self._afflicted:
                self._afflicted.discard(who)
                if not self._afflicted:
                    self._on_end(self._clock() - self._since_s)


_CLASSES: dict[str, type] = {"redis": Tcp, "rediss": Tls, "unix": Unix}
_ASYNC_CLASSES: dict[str, type] = {"redis": AsyncTcp, "rediss": AsyncTls, "unix": AsyncUnix}


def _scheme(url: str) -> str:
    return url.partition("://")[0]


def _pool_options(url: str, queue: str | None, retry: Any, options: dict[str, Any], classes: Mapping[str, type]) -> dict[str, Any]:
    """Arguments of a connection pool. Its connections have the class for the URL's scheme, or one that follows ``queue`` with it."""
    if _scheme(url) in CLUSTER_SCHEMES:
        from producer.cluster import FOLLOWERS, Slot

        seeds, plain = _split_cluster(url)
        if queue is None:
            raise ValueError("a cluster URL needs a queue, whose node is followed")
        kwargs = _options(plain, retry, options)
        kwargs |= {"connection_class": FOLLOWERS[classes[_scheme(plain)]], "slot": Slot(Keys(queue).prefix, seeds)}
    else:
        kwargs = _options(url, retry, options)
        kwargs["connection_class"] = classes[_scheme(url)]
    _check_options(kwargs)
    return kwargs


def _options(url: str, retry: Any, options: dict[str, Any]) -> dict[str, Any]:
    """A connection's arguments from a plain URL and from us."""
    from_url: dict[str, Any] = parse_url(url)
    for name in _FILES:
        if name in from_url and not os.path.isfile(from_url[name]):  # would look like Redis trouble, which is waited out
            raise ValueError(f"{name} in the Redis URL names no file")
    defaults: dict[str, Any] = {
        "socket_timeout": SOCKET_TIMEOUT_S,
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "health_check_interval": HEALTH_CHECK_S,
        "max_connections": MAX_CONNECTIONS,
    }
    if from_url.get("connection_class") is not UnixDomainSocketConnection:
        defaults |= {"socket_keepalive": True, "socket_keepalive_options": _keepalive()}
    fixed = {"retry": retry, "protocol": 2, "decode_responses": False}
    return defaults | options | from_url | fixed


def _check_options(kwargs: dict[str, Any]) -> None:
    """Find options that the connection refuses now, not at the first command."""
    try:
        kwargs["connection_class"](**{name: value for name, value in kwargs.items() if name not in ("connection_class", "max_connections")})
    except (TypeError, exceptions.RedisError) as error:
        raise ValueError(f"unusable option in the Redis URL ({error})") from None


def _keepalive() -> dict[int, int]:
    """A peer that vanished is noticed after about a minute, even if nothing times out."""
    wanted = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
    return {getattr(socket, name): value for name, value in wanted.items() if hasattr(socket, name)}


def _addresses(hosts: str, default_port: int) -> list[Address]:
    addresses = []
    for item in hosts.split(","):
        host, _, port = item.rpartition(":") if ":" in item and not item.endswith("]") else (item, "", str(default_port))
        addresses.append((host.strip("[]"), int(port)))
    return addresses


def _split(url: str) -> tuple[str, str, str, str]:
    """User and password with their ``@``, hosts, path, and query with its ``?``. `urlsplit` refuses an IPv6 address after another host."""
    rest, mark, query = url.partition("://")[2].partition("?")
    authority, _, path = rest.partition("/")
    user, at, hosts = authority.rpartition("@")
    return user + at, hosts, path.strip("/"), mark + query


def _split_sentinel(url: str) -> tuple[list[Address], str, str]:
    """Sentinels, service, and a plain URL that carries user, password, database and query; its host is a placeholder."""
    user, hosts, path, query = _split(url)
    service, _, database = path.partition("/")
    if not hosts or not service or "/" in database:
        raise ValueError("a sentinel URL is redis+sentinel://[user:password@]host:port[,host:port…]/service[/db]")
    plain = f"{SENTINEL_SCHEMES[_scheme(url)]}://{user}host/{database or 0}{query}"
    return _addresses(hosts, 26379), unquote(service), plain


def _split_cluster(url: str) -> tuple[list[Address], str]:
    """Nodes, and a plain URL that carries user, password and query; its host is a placeholder."""
    user, hosts, path, query = _split(url)
    if not hosts or path not in ("", "0"):
        raise ValueError("a cluster URL is redis+cluster://[user:password@]host:port[,host:port…]; a cluster's database is 0")
    return _addresses(hosts, 6379), f"{CLUSTER_SCHEMES[_scheme(url)]}://{user}host{query}"


def _sentinel_options(plain: str, retry: Any, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of the data connections and of those to the sentinels; the password is only for the former."""
    kwargs = _options(plain, retry, options)
    for name in ("host", "port", "connection_class"):
        kwargs.pop(name, None)
    shared = ("socket_timeout", "socket_connect_timeout", "socket_keepalive", "retry", "protocol")
    return kwargs, {name: kwargs[name] for name in shared}


def _connect_sentinel(url: str, retry: Retry, options: dict[str, Any]) -> redis.Redis:
    addresses, service, plain = _split_sentinel(url)
    kwargs, sentinel_kwargs = _sentinel_options(plain, retry, options)
    sentinel = Sentinel((), sentinel_kwargs=sentinel_kwargs)  # type: ignore[no-untyped-call]  # redis-py does not annotate it
    pools = [redis.ConnectionPool(connection_class=Tcp, host=host, port=port, **sentinel_kwargs) for host, port in addresses]
    sentinel.sentinels = [redis.Redis.from_pool(pool) for pool in pools]
    cls = SentinelTls if plain.startswith("rediss") else SentinelTcp
    master: redis.Redis = sentinel.master_for(service, connection_class=cls, **kwargs)  # type: ignore[no-untyped-call]  # redis-py does not annotate it
    return master


def _connect_async_sentinel(url: str, retry: AsyncRetry, options: dict[str, Any]) -> aioredis.Redis:
    addresses, service, plain = _split_sentinel(url)
    kwargs, sentinel_kwargs = _sentinel_options(plain, retry, options)
    sentinel = AsyncSentinel(addresses, sentinel_kwargs=sentinel_kwargs)  # type: ignore[no-untyped-call]  # redis-py does not annotate it
    tls = plain.startswith("rediss")
    master: aioredis.Redis = sentinel.master_for(service, connection_pool_class=AsyncPool, ssl=tls, **kwargs)
    return master
