"""Requests in whose attempts two workers died: each is run alone, so that a third crash names the culprit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from worker.registry import ActiveRequest, Registry

WAIT_S = 0.1


class Suspects:
    """The suspects that this worker holds, in order of arrival; used by one thread."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._waiting: list[ActiveRequest] = []
        self._alone: ActiveRequest | None = None  # runs now

    def add(self, active: ActiveRequest) -> None:
        self._waiting.append(active)

    def run_next(self, begin: Callable[[Sequence[ActiveRequest]], None]) -> bool:
        """Call ``begin`` on the next one if nothing else runs, or wait a while.

        Returns:
            False if there are none, so that anything may be fetched.
        """
        self._waiting = [active for active in self._waiting if self._is_held(active) and active.end is None]
        if self._alone is not None and not self._is_held(self._alone):
            self._alone = None
        if self._alone is None and not self._waiting:
            return False
        if self._alone is not None or self._registry.running:
            self._registry.await_change(WAIT_S)
        else:
            begin(self._waiting[:1])
            self._alone = self._waiting.pop(0)
        return True

    def _is_held(self, active: ActiveRequest) -> bool:
        return self._registry.knows(active.delivery.tier, active.delivery.entry.id)
