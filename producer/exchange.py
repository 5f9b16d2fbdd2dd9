"""Sending commands to Redis and waiting for it during trouble, without the I/O.

Every call of the clients is a generator: it yields a `Batch` of commands (or a `Pause`) and is sent the replies. `client`
drives it with sockets and threads, `aio` with an event loop; neither holds logic of its own.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from redis.exceptions import NoScriptError, RedisError, ResponseError

from producer.connection import SOCKET_TIMEOUT_S, Backoff, Outage, is_transient
from producer.errors import RedisUnavailable, WaitTimeout
from producer.scripts import Argument, Script

GRACE_S = 0.5  # how much later than requested a healthy server may answer a blocking read

T = TypeVar("T")
_log = logging.getLogger("headrace")


@dataclass(frozen=True, slots=True)
class Batch:
    """Commands to be sent at once on one connection.

    The driver answers with one raw RESP2 reply per command (an error reply is a `ResponseError` in its place), or throws the
    `RedisError` that broke the connection. It throws `redis.TimeoutError` if there is no connection within ``connect_limit_s``,
    or no first reply within ``limit_s`` after that.
    """

    commands: tuple[tuple[Argument, ...], ...]
    limit_s: float = SOCKET_TIMEOUT_S
    connect_limit_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Pause:
    """Nothing to do for this long."""

    seconds: float


Call = Generator[Batch | Pause, Any, T]


def client_outage() -> Outage:
    """What the callers of one client know of Redis's trouble: one log line when it begins, one when it ends."""
    return Outage(
        lambda error: _log.warning("Redis is unavailable, waiting: %s", error),
        lambda seconds: _log.warning("Redis is available again after %.1f s", seconds),
    )


class Patience:
    """How long one call may take in all, and how long it waits for Redis during trouble.

    Attributes:
        troubled: Redis has not answered since its last trouble.
    """

    def __init__(self, timeout_s: float | None, outage: Outage) -> None:
        self._outage = outage
        self._timeout_s = timeout_s
        self._deadline_at_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        self._backoff = Backoff()
        self.troubled = False

    def remaining_s(self) -> float:
        """Seconds left, never negative; infinite without a timeout."""
        return max(0.0, self._deadline_at_s - time.monotonic())

    def pause(self, error: RedisError) -> Pause:
        """How long to pause before the next try.

        Raises:
            RedisUnavailable: waiting cannot help, or there is no time left.
        """
        if not is_transient(error):
            raise RedisUnavailable(f"Redis refuses: {error}") from error
        self.troubled = True
        self._outage.enter(error)
        remaining_s = self.remaining_s()
        if remaining_s <= 0.0:
            raise RedisUnavailable(f"Redis was unavailable until the timeout of {self._timeout_s:g} s: {error}") from error
        return Pause(min(self._backoff.next_s(), remaining_s))

    def answered(self) -> None:
        """Redis has answered."""
        self.troubled = False
        self._backoff.reset()
        self._outage.leave()

    def wait_timeout(self, request_id: str) -> WaitTimeout:
        return WaitTimeout(f"no final reply within {self._timeout_s:g} s", request_id=request_id)


def exchange(make: Callable[[], Batch], patience: Patience, script: Script | None = None, *, judge_last: bool = False) -> Call[list[Any]]:
    """Send what ``make`` returns until Redis answers it; all of our commands may safely run twice.

    Args:
        script: sent along if the server does not know it.
        judge_last: the caller handles the last command's reply, even an error.

    Raises:
        RedisUnavailable: Redis was in trouble until the end of ``patience``, or refuses a command.
    """
    prelude: tuple[tuple[Argument, ...], ...] = ()
    while True:
        batch = make()
        left_s = patience.remaining_s() + GRACE_S
        try:
            replies = yield Batch(prelude + batch.commands, min(batch.limit_s, left_s), connect_limit_s=left_s)
        except RedisError as error:
            yield patience.pause(error)
            continue
        errors = [reply for reply in (replies[:-1] if judge_last else replies) if isinstance(reply, ResponseError)]
        if script is not None and not prelude and any(isinstance(error, NoScriptError) for error in errors):
            prelude = (script.load_command,)
            continue
        if not errors:
            patience.answered()
            return list(replies[len(prelude) :])
        yield patience.pause(next((error for error in errors if not is_transient(error)), errors[0]))


def one(command: tuple[Argument, ...], patience: Patience, script: Script | None = None) -> Call[Any]:
    """`exchange` of a single command."""
    [reply] = yield from exchange(lambda: Batch((command,)), patience, script)
    return reply
