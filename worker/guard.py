"""Threads that a worker needs to run: when one fails, the worker hands everything back and ends."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable

import structlog

from producer.errors import HeadraceError

log = structlog.get_logger("headrace.worker")


class Guard:
    """Makes threads, and remembers the first failure of any of them.

    Args:
        on_end: called whenever one of them ends, for any reason.
    """

    def __init__(self, on_end: Callable[[], None]) -> None:
        self.failure: BaseException | None = None
        self._on_end = on_end

    def thread(self, name: str, run: Callable[[], None]) -> threading.Thread:
        """A thread that is not started yet; it does not keep the process alive."""
        return threading.Thread(target=self._run, args=(run,), name=name, daemon=True)

    def fail(self, error: BaseException) -> None:
        """End the worker as if a thread had failed with ``error``."""
        self.failure = self.failure or error
        self._on_end()

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
