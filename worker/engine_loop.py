"""The thread that owns the engine: takes arrivals and aborts, runs a step, passes the outputs on, waits when idle."""

from __future__ import annotations

import gc
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog

from producer.errors import HeadraceError
from producer.keys import TIERS, Tier
from worker.engine.request import Request
from worker.engine.scheduler import SchedulerStats
from worker.engine.step import StepOutput, StepStats
from worker.engine_api import EngineLike
from worker.guard import Guard
from worker.health import Progress

IDLE_S = 1.0  # how long an idle engine sleeps when nothing wakes it

log = structlog.get_logger("headrace.worker")


@dataclass(frozen=True, slots=True)
class Refusal:
    """The engine refused requests that share a reply."""

    requests: Sequence[Request]
    error: HeadraceError


@dataclass(slots=True)
class Replacement:
    """Another engine that is to take over. Once ``done`` is set it has done so, or ``failure`` says why it could not be made.

    The error itself is not kept: its traceback would keep what was loaded of the model in memory.
    """

    load: Callable[[], EngineLike]
    done: threading.Event = field(default_factory=threading.Event)
    failure: str = ""


Emit = Callable[[list[StepOutput] | Refusal], None]
OnStep = Callable[[StepStats, SchedulerStats], None]


class EngineLoop:
    """Runs an engine in a thread of its own; its methods may be called from any other.

    Args:
        load: makes the engine; called in the thread, so that the thread owns the device from the first moment on.
        stall_s: how long a turn of the loop may take before the engine counts as wedged.
        on_step: called in the thread after each step, with what the scheduler then holds; must not block.
    """

    def __init__(self, load: Callable[[], EngineLike], guard: Guard, *, stall_s: float, on_step: OnStep) -> None:
        self.progress = Progress(stall_s)
        self.stats = SchedulerStats()
        self.num_tokens = 0
        self.num_turns = 0
        self._load = load
        self._emit: Emit = _ignore
        self._on_step = on_step
        self._engine: EngineLike | None = None
        self._ready = threading.Event()
        self._turned = threading.Condition()
        self._inbox: list[Sequence[Request] | str] = []  # arrivals, and ids to abort, in the order they were given
        self._room: dict[Tier, int] = dict.fromkeys(TIERS, 0)
        self._replacement: Replacement | None = None
        self._stopping = False
        self._thread = guard.thread("engine", self._run)

    @property
    def engine(self) -> EngineLike:
        assert self._engine is not None, "asked for before it was ready"
        return self._engine

    @property
    def ready(self) -> bool:
        return self._ready.is_set()

    @property
    def alive(self) -> bool:
        """Whether its thread still runs, whether in a step or loading a model."""
        return self._thread.is_alive()

    @property
    def stalled(self) -> bool:
        """Whether it has work but has made no progress for too long."""
        return not self.progress.check().ok

    def where(self) -> str:
        """The calls in which its thread is now, for the log when it hangs."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "".join(traceback.format_stack(frame)) if frame is not None else ""

    def start(self, emit: Emit) -> None:
        """Load the engine and run it; ``emit`` takes each step's outputs, and must not block."""
        self._emit = emit
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """End after the current step; False if that does not happen in time."""
        with self._turned:
            self._stopping = True
            self._turned.notify_all()
        self._thread.join(timeout_s)
        return not self.alive

    def add(self, requests: Sequence[Request]) -> None:
        """Give the engine the requests made of one wire request."""
        with self._turned:
            self._inbox.append(requests)
            self.progress.work_arrived()
            self._turned.notify_all()

    def abort(self, request_id: str) -> None:
        with self._turned:
            self._inbox.append(request_id)
            self._turned.notify_all()

    def room(self) -> dict[Tier, int]:
        """How many further requests of each tier are worth fetching now."""
        with self._turned:
            waiting = [request.tier for item in self._inbox if not isinstance(item, str) for request in item]
            return {tier: max(0, self._room[tier] - waiting.count(tier)) for tier in TIERS}

    def replace(self, load: Callable[[], EngineLike]) -> Replacement:
        """Have the thread load another engine once the present one has no work, and continue with that."""
        with self._turned:
            self._replacement = replacement = Replacement(load)
            self._turned.notify_all()
        return replacement

    def await_turn(self, after: int, timeout_s: float) -> None:
        """Wait until the loop has made more turns than ``after``, an earlier `num_turns`: room appears when it turns."""
        with self._turned:
            self._turned.wait_for(lambda: self.num_turns > after, timeout_s)

    def _run(self) -> None:
        try:
            self._engine = self._loaded()
            self._publish_stats(self._engine)
            self._ready.set()
            while self._turn(self._engine):
                self._replace_engine()
        except BaseException as error:
            self.progress.fail(f"{type(error).__name__}: {error}")
            raise

    def _loaded(self) -> EngineLike:
        try:
            return self._load()
        except Exception as error:  # there is no user text yet, so all of the error may be logged
            log.critical("engine could not be loaded", error=type(error).__name__, detail=str(error))
            raise

    def _turn(self, engine: EngineLike) -> bool:
        for item in self._take(wait=not engine.has_work()):
            if isinstance(item, str):
                engine.abort(item)
            else:
                self._add(engine, item)
        if self._stopping:
            return False
        before = engine.last_step
        if engine.has_work():
            outputs = engine.step()
            self.num_tokens += sum(len(output.token_ids) for output in outputs)
            if outputs:
                self._emit(outputs)
        self._publish_stats(engine)
        if engine.last_step is not None and engine.last_step is not before:
            self._on_step(engine.last_step, self.stats)
        return True

    def _replace_engine(self) -> None:
        """Replace our engine if that was asked for; if the other cannot be made, ours stays.

        Ours frees its KV cache for the time of loading. Whichever engine then serves makes its cache when the other is gone.
        """
        replacement = self._replacement
        if replacement is None or self.engine.has_work():
            return
        self._replacement = None
        self.engine.release_cache()
        try:
            self._engine = replacement.load()
        except Exception as error:  # whatever is wrong with the new model, the old one can continue
            replacement.failure = reason_of(error)
        gc.collect()  # a model holds itself in reference cycles, and its memory is needed
        self.engine.restore_cache()
        self._publish_stats(self.engine)
        replacement.done.set()

    def _take(self, *, wait: bool) -> list[Sequence[Request] | str]:
        with self._turned:
            if wait and not (self._inbox or self._stopping or self._replacement):
                self._turned.wait(IDLE_S)
            taken, self._inbox = self._inbox, []
            for item in taken:  # until the engine counts them itself
                if not isinstance(item, str):
                    self._room[item[0].tier] -= len(item)
            return taken

    def _add(self, engine: EngineLike, requests: Sequence[Request]) -> None:
        try:
            engine.add_all(requests)
        except HeadraceError as error:
            self._emit(Refusal(requests, error))

    def _publish_stats(self, engine: EngineLike) -> None:
        stats = engine.stats()
        self.progress.turn(stats.num_held)
        with self._turned:
            self.stats = stats
            self._room = {tier: engine.room(tier) for tier in TIERS}
            if any(not isinstance(item, str) for item in self._inbox):
                self.progress.work_arrived()
            self.num_turns += 1
            self._turned.notify_all()


def reason_of(error: Exception) -> str:
    """Why a model could not be loaded, for operators."""
    return error.message if isinstance(error, HeadraceError) else f"{type(error).__name__}: {error}"


def _ignore(_: list[StepOutput] | Refusal) -> None:
    """Used until `start` sets a listener."""
