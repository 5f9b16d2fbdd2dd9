"""The threads that a worker needs to run, and its end: when one of them fails, it hands everything back and ends."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable

import structlog

from producer.errors import HeadraceError

POLL_S = 0.02

log = structlog.get_logger("headrace.worker")


class Guard:
    """Makes threads, and knows whether the worker is to end: it was told to, or one of them has failed.

    Args:
        on_end: called whenever one of them ends, for any reason, and whenever the worker is told to end.

    Attributes:
        failure: the first failure of any of them.
        stops_asked: how often the worker was told to end.
    """

    def __init__(self, on_end: Callable[[], None]) -> None:
        self.failure: BaseException | None = None
        self.stops_asked = 0
        self._on_end = on_end

    @property
    def ending(self) -> bool:
        return self.stops_asked > 0 or self.failure is not None

    def thread(self, name: str, run: Callable[[], None]) -> threading.Thread:
        """A thread that is not started yet; it does not keep the process alive."""
        return threading.Thread(target=self._run, args=(run,), name=name, daemon=True)

    def fail(self, error: BaseException) -> None:
        """End the worker as if a thread had failed with ``error``."""
        self.failure = self.failure or error
        self._on_end()

    def request_stop(self) -> None:
        """End the worker in order. May be called from a signal handler."""
        self.stops_asked += 1
        self._on_end()

    def wait_for(self, condition: Callable[[], bool]) -> bool:
        """Poll until ``condition`` holds; False if the worker is to end before that."""
        while not condition():
            if self.ending:
                return False
            time.sleep(POLL_S)
        return True

    def _run(self, run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:  # whatever it is, the requests must be handed back
            log.critical("thread failed", thread=threading.current_thread().name, **described(error))
            self.failure = self.failure or error
        finally:
            self._on_end()


def described(error: BaseException) -> dict[str, str]:
    """An exception for the log: its type and where it was raised; its text only if the error is ours: others may hold a user's."""
    detail = {"detail": error.message} if isinstance(error, HeadraceError) else {}
    return {"error": type(error).__name__, **detail, "traceback": "".join(traceback.format_tb(error.__traceback__))}
