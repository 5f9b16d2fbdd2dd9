"""Replaces the model that is served, without losing a request."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import structlog

from worker.context import WorkerContext
from worker.engine_api import EngineLike
from worker.engine_loop import reason_of
from worker.intake import Intake
from worker.publisher import Publisher

LoadModel = Callable[[str], EngineLike]
CheckModel = Callable[[str], None]

log = structlog.get_logger("headrace.worker")


@dataclass(frozen=True, slots=True)
class Reload:
    """An order to serve ``model``, or, if it is '', to load the present one again; ``id`` is '' for a signal."""

    model: str = ""
    id: str = ""


class Reloader:
    """Carries out one order at a time, in the thread that calls `run`.

    A model that ``check`` refuses changes nothing. Otherwise fetching stops, running requests have the time of a drain to finish, and
    the rest is handed back. Then the engine's thread loads the new model beside the weights of the old one, which continues to serve
    if that fails. Queued requests wait meanwhile. The end of the worker ends a reload too.

    Args:
        check: raises if the model of a name cannot be loaded, as far as that can be known while another serves.
        load: makes an engine with the model of a name; '' names the worker's own. Called in the engine's thread.
        wake: makes the thread that calls `run` call it again soon.
    """

    def __init__(
        self,
        context: WorkerContext,
        publisher: Publisher,
        intake: Intake,
        *,
        check: CheckModel,
        load: LoadModel,
        wake: Callable[[], None],
    ) -> None:
        self.active = False
        self._context = context
        self._guard = context.guard
        self._publisher = publisher
        self._intake = intake
        self._check = check
        self._load = load
        self._wake = wake
        self._model = ""
        self._asked: SimpleQueue[Reload] = SimpleQueue()  # safe to use in a signal handler
        self._done_id = ""
        self._error = ""

    def ask(self, order: Reload) -> None:
        """Have a later `run` carry out ``order``, after earlier orders. May be called from a signal handler and from any thread."""
        self._asked.put(order)
        self._wake()

    @property
    def fields(self) -> Mapping[str, str]:
        """For the heartbeat: the last order from the queue, and why the last order's model, a signal's too, is not served ('' if it is)."""
        return {"reload": self._done_id, "reload_error": self._error}

    def run(self) -> bool:
        """Carry out the next order; False if there is none."""
        try:
            order = self._asked.get_nowait()
        except Empty:
            return False
        model = order.model or self._model
        log.info("reloading", model=model or "its own")
        if refusal := self._refusal(model):
            self._fail(model, refusal)
        elif not self._guard.ending:
            self._exchange(model)
        if not self._guard.ending:
            self._done_id = order.id or self._done_id
        return True

    def _refusal(self, model: str) -> str:
        """Why ``model`` would not load; '' if no reason is known."""
        try:
            self._check(model)
        except Exception as error:  # as in the engine's thread: the old model can serve
            return reason_of(error)
        return ""

    def _exchange(self, model: str) -> None:
        self.active = True
        self._intake.pause()
        self._empty()
        if not self._guard.ending:
            self._swap(model)
        self.active = False
        if not self._guard.ending:
            self._intake.resume()

    def _empty(self) -> None:
        """Finish what runs while there is time, and hand the rest back."""
        deadline_at_s = time.monotonic() + self._context.config.drain_s
        self._guard.wait_for(lambda: not self._context.registry.running or time.monotonic() >= deadline_at_s)
        if self._context.registry.running and not self._guard.ending:
            self._guard.wait_for(self._publisher.hand_back_running().is_set)

    def _swap(self, model: str) -> None:
        loop = self._context.loop
        blocks_before = loop.stats.total_blocks
        replacement = loop.replace(lambda: self._load(model))
        if not self._guard.wait_for(replacement.done.is_set):
            return
        blocks = {"blocks": loop.stats.total_blocks, "blocks_before": blocks_before}
        if replacement.failure:
            self._fail(model, replacement.failure, **blocks)
            return
        self._model, self._error = model, ""
        engine = loop.engine
        self._context.metrics.serving(engine.model_name, engine.device_name, engine.dtype_name)
        log.info("reloaded", model=engine.model_name, device=engine.device_name, dtype=engine.dtype_name, **engine.kernels, **blocks)

    def _fail(self, model: str, reason: str, **blocks: int) -> None:
        self._error = reason
        log.error("model could not be loaded, the old one continues to serve", model=model, error=reason, **blocks)
