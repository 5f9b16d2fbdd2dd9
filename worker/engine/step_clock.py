"""Where the engine's thread spends its steps."""

from __future__ import annotations

import time
from typing import Literal, get_args

Phase = Literal["schedule", "inputs", "model", "sample", "wait", "update"]
PHASES: tuple[Phase, ...] = get_args(Phase)


class StepClock:
    """Sums the host's time by phase; for one thread.

    ``schedule`` plans the step and queues its swap copies, ``inputs`` fills its tensors, ``model`` computes, ``sample`` chooses tokens,
    ``wait`` is for tokens that the device has not chosen yet, ``update`` takes them in. With asynchronous scheduling (`run_ahead`)
    ``model`` and ``sample`` are their launches. Greedy choices that the model makes itself are in ``model``.
    """

    def __init__(self) -> None:
        self._spent_s: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self._last_s = time.monotonic()

    def start(self) -> None:
        """Begin: the time before belongs to no phase."""
        self._last_s = time.monotonic()

    def lap(self, phase: Phase) -> None:
        """End ``phase``, which began with the last call of this or of `start`."""
        now_s = time.monotonic()
        self._spent_s[phase] += now_s - self._last_s
        self._last_s = now_s

    def take(self) -> dict[str, float]:
        """Seconds by phase since the last call."""
        spent_s, self._spent_s = self._spent_s, dict.fromkeys(PHASES, 0.0)
        return spent_s
