"""Waiting out Redis trouble: restarts, LOADING, READONLY, OOM, NOGROUP, lost sockets, wrong passwords.

A worker has nothing better to do than to try again: whatever Redis refuses today an operator may mend, and the requests it
holds stay pending meanwhile. So each thread retries with growing, jittered pauses, and the log has one line when the first
thread meets trouble and one, with its length, when the last is through.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import structlog
from redis.exceptions import RedisError

from producer.connection import Backoff

TROUBLE = (RedisError, OSError)

log = structlog.get_logger("headrace.worker")


class Outage:
    """What the worker's threads have in common: whether any of them is in trouble, and since when."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._afflicted: set[Trouble] = set()
        self._since_s = 0.0
        self.ended_s = -float("inf")

    @property
    def active(self) -> bool:
        return bool(self._afflicted)

    def enter(self, trouble: Trouble, error: BaseException) -> None:
        with self._lock:
            if not self._afflicted:
                self._since_s = self._clock()
                log.warning("redis trouble", error=type(error).__name__, detail=str(error), thread=threading.current_thread().name)
            self._afflicted.add(trouble)

    def leave(self, trouble: Trouble) -> None:
        with self._lock:
            if trouble not in self._afflicted:
                return
            self._afflicted.discard(trouble)
            if not self._afflicted:
                self.ended_s = self._clock()
                log.info("redis trouble over", seconds=round(self.ended_s - self._since_s, 3))


class Trouble:
    """One thread's dealings with Redis: after an error it is not `ready` for a while, longer each time."""

    def __init__(self, outage: Outage, clock: Callable[[], float] = time.monotonic) -> None:
        self._outage = outage
        self._clock = clock
        self._backoff = Backoff()
        self._not_before_s = -float("inf")

    @property
    def pause_s(self) -> float:
        """Seconds until the next attempt is due; 0 where it is."""
        return max(0.0, self._not_before_s - self._clock())

    @property
    def ready(self) -> bool:
        return self.pause_s == 0.0

    def hit(self, error: BaseException) -> float:
        """An attempt failed; returns `pause_s`."""
        self._outage.enter(self, error)
        self._not_before_s = self._clock() + self._backoff.next_s()
        return self.pause_s

    def clear(self) -> None:
        """An attempt succeeded."""
        self._backoff.reset()
        self._outage.leave(self)
