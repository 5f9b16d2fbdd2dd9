"""Waiting out Redis trouble: restarts, LOADING, READONLY, OOM, NOGROUP, lost sockets, wrong passwords.

All a worker can do is try again: an operator may mend whatever Redis refuses now, and the requests that the worker
holds stay pending meanwhile. Each thread retries with growing, jittered pauses. The log has one line when the first
thread meets trouble and one, with its length, when the last one is through.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import structlog
from redis.exceptions import RedisError

from producer.connection import Backoff, Outage

TROUBLE = (RedisError, OSError)

log = structlog.get_logger("headrace.worker")


def worker_outage(clock: Callable[[], float] = time.monotonic) -> Outage:
    """What the worker's threads share: one log line when the first meets trouble, one when the last is through."""
    return Outage(_log_begin, _log_end, clock)


def _log_begin(error: BaseException) -> None:
    log.warning("redis trouble", error=type(error).__name__, detail=str(error), thread=threading.current_thread().name)


def _log_end(seconds: float) -> None:
    log.info("redis trouble over", seconds=round(seconds, 3))


class Trouble:
    """One thread's access to Redis: after an error it is not `ready` for a while, longer each time."""

    def __init__(self, outage: Outage, clock: Callable[[], float] = time.monotonic) -> None:
        self._outage = outage
        self._clock = clock
        self._backoff = Backoff()
        self._not_before_s = -float("inf")

    @property
    def pause_s(self) -> float:
        """Seconds until the next attempt is due; 0 if it is due now."""
        return max(0.0, self._not_before_s - self._clock())

    @property
    def ready(self) -> bool:
        return self.pause_s == 0.0

    def hit(self, error: BaseException) -> float:
        """An attempt failed; returns `pause_s`."""
        self._outage.enter(error, self)
        self._not_before_s = self._clock() + self._backoff.next_s()
        return self.pause_s

    def clear(self) -> None:
        """An attempt succeeded."""
        self._backoff.reset()
        self._outage.leave(self)
