"""Asking servers that know the same (nodes of a cluster, sentinels) one after the other.

A silent server takes no more than its share of the time left, and is asked last from then on. Otherwise a call shorter than
the sockets' timeouts would spend all its time on that server, and so would the next call.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from redis.exceptions import AuthenticationError, ClusterDownError, ConnectionError, TimeoutError  # noqa: A004 - redis-py's

from producer.sockets import left_s, within, within_async

T = TypeVar("T")
Answer = TypeVar("Answer")


def ask_each(servers: list[T], ask: Callable[[T], Answer], failure: str) -> Answer:
    """Return the answer of the first server that gives one.

    Args:
        servers: in the order to ask them; those that fail are moved behind the others, in place.

    Raises:
        AuthenticationError: at once, because a wrong password is wrong at the others too.
        ConnectionError: no server answers; says ``failure`` and the last reason.
    """
    reasons: list[Exception] = []
    for server, share_s in _turns(servers):
        with _turn(servers, server, reasons), within(share_s):
            return ask(server)
    raise ConnectionError(f"{failure}: {reasons[-1]}")


async def ask_each_async(servers: list[T], ask: Callable[[T], Awaitable[Answer]], failure: str) -> Answer:
    """`ask_each` for asyncio."""
    reasons: list[Exception] = []
    for server, share_s in _turns(servers):
        with _turn(servers, server, reasons):
            async with within_async(share_s):
                return await ask(server)
    raise ConnectionError(f"{failure}: {reasons[-1]}")


def _turns(servers: list[T]) -> Iterator[tuple[T, float]]:
    """Each server with the time it may take: an even share of what those before it have left."""
    for num_left, server in zip(range(len(servers), 0, -1), tuple(servers), strict=True):
        yield server, left_s() / num_left


@contextmanager
def _turn(servers: list[T], server: T, reasons: list[Exception]) -> Iterator[None]:
    """Notes why ``server`` did not answer, and moves it to the end. Even an interruption, such as a cancelled task, counts as too slow."""
    try:
        yield
    except BaseException as error:
        servers[:] = sorted(servers, key=lambda other: other == server)
        if isinstance(error, AuthenticationError) or not isinstance(error, ConnectionError | TimeoutError | ClusterDownError):
            raise
        reasons.append(error)
