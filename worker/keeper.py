"""Maintenance thread: control messages, leases, deadlines, heartbeat, reaping."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

import structlog

from producer import __version__
from producer.errors import Cancelled, DeadlineExceeded, InternalError
from producer.keys import TIERS
from worker.context import WorkerContext
from worker.engine_api import kernel_names
from worker.health import Wedge
from worker.intake import Intake
from worker.publisher import Publisher
from worker.reload import Reload, Reloader
from worker.stream.control import Control, Order
from worker.stream.heartbeat import Heartbeat
from worker.stream.ledger import Ledger
from worker.stream.trouble import TROUBLE, Trouble

SLICE_S = 0.25  # how late a deadline or a stop may be noticed
MAX_BEAT_S = 1.0
WEDGED_LEASES = 3  # leases without a step until the worker ends: by then its leases have lapsed, and the others have claimed its requests

log = structlog.get_logger("headrace.worker")


class Keeper:
    """Renews what the worker holds while the engine makes progress: a wedged engine loses its leases, a slow one does not.

    Args:
        state: the worker's state, for the heartbeat.
        intake: is told when other workers have handed requests back, or ask for some.
        reloader: is given orders to load another model; the heartbeat reports their outcome.
    """

    def __init__(
        self,
        context: WorkerContext,
        control: Control,
        heartbeat: Heartbeat,
        ledger: Ledger,
        *,
        state: Callable[[], str],
        publisher: Publisher,
        intake: Intake,
        reloader: Reloader,
    ) -> None:
        self._config = config = context.config
        self._guard = context.guard
        self._registry = context.registry
        self._loop = context.loop
        self._publisher = publisher
        self._metrics = context.metrics
        self._trouble = Trouble(context.outage)
        self._control = control
        self._heartbeat = heartbeat
        self._ledger = ledger
        self._state = state
        self._intake = intake
        self._reloader = reloader
        self._stopping = threading.Event()
        self._started = threading.Event()
        self._renew_at_s = self._beat_at_s = 0.0
        self._reap_at_s = time.monotonic() + config.lease_s
        self._since_s = time.monotonic()
        self._rate = Rate()
        self._wedge = Wedge(longest_gap_s=config.redis_timeout_s + SLICE_S)
        self._thread = context.guard.thread("keeper", self._run)

    def start(self) -> None:
        self._thread.start()

    def await_start(self, timeout_s: float) -> bool:
        """Wait until orders are read and the heartbeat is written; only then may requests be fetched."""
        return self._started.wait(timeout_s)

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def beat_soon(self) -> None:
        """The worker's state has changed."""
        self._beat_at_s = 0.0

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._end_expired()
            self._end_wedged()
            self._metrics.scheduler(self._loop.stats, {tier: self._intake.num_ahead(tier) for tier in TIERS})
            if not self._trouble.ready:
                self._stopping.wait(min(self._trouble.pause_s, SLICE_S))
                continue
            try:
                self._round()
            except TROUBLE as error:
                self._trouble.hit(error)
                self._metrics.redis(up=False)
            else:
                self._trouble.clear()

    def _round(self) -> None:
        self._control.start()
        now_s = time.monotonic()
        if now_s >= self._renew_at_s:
            self._renew()
            self._renew_at_s = now_s + self._config.lease_s / 3
        if now_s >= self._beat_at_s:
            self._beat_at_s = now_s + min(MAX_BEAT_S, self._config.lease_s / 3)
            self._heartbeat.beat(self._fields())
            self._show_queue()
            self._started.set()
            self._ask_to_share()
        if now_s >= self._reap_at_s:
            self._reap_at_s = now_s + self._config.lease_s
            self._reap()
        for order in self._control.read(int(self._slice_s() * 1000)):
            self._obey(order)

    def _slice_s(self) -> float:
        now_s = time.monotonic()
        due_s = min(self._renew_at_s, self._beat_at_s, self._reap_at_s, self._registry.next_deadline_at_s())
        return min(SLICE_S, max(0.001, due_s - now_s))

    def _obey(self, order: Order) -> None:
        active = self._registry.get(order.request_id)
        if order.op == "cancel" and active is not None:
            self._publisher.end(active, Cancelled("cancelled while it ran"))
        elif order.op == "stream" and active is not None:
            active.streamed = True
            self._publisher.wake()
        elif order.op == "claim" and order.worker != self._config.name and order.recipient in ("", self._config.name):
            self._intake.claim_now()
        elif order.op == "share" and order.worker == self._config.name:
            self._intake.share(order.recipient)
        elif order.op == "reload" and order.worker in ("", self._config.name):
            self._reloader.ask(Reload(order.model, order.id))

    def _end_expired(self) -> None:
        for active in self._registry.expired(time.monotonic()):
            self._publisher.end(active, DeadlineExceeded("the deadline passed while it ran"))

    def _end_wedged(self) -> None:
        """End the worker: only a new process frees a thread that hangs, and not every deployment has a liveness probe."""
        wedged_s = self._wedge.observe(self._loop.stalled)
        if wedged_s > (WEDGED_LEASES - 1) * self._config.lease_s and self._guard.failure is None:
            log.critical("engine wedged", stalled_s=round(self._loop.progress.stalled_s, 1), traceback=self._loop.where())
            self._guard.fail(InternalError("the engine is wedged"))

    def _renew(self) -> None:
        if self._loop.stalled:
            return
        with self._registry.leases:
            held = self._registry.all()
            lost = {id(delivery) for delivery in self._ledger.renew([active.delivery for active in held])}
        self._metrics.lease_renewed(len(held) - len(lost))
        for active in held:
            if id(active.delivery) in lost:
                self._publisher.lose(active)

    def _ask_to_share(self) -> None:
        holder = self._heartbeat.holder_of_most() if self._intake.starving else ""
        if holder:
            self._control.ask_to_share(holder, self._config.name)

    def _show_queue(self) -> None:
        tiers = self._heartbeat.tiers()
        self._metrics.redis(up=True)
        for tier in tiers:
            self._metrics.queue(tier.tier, depth=tier.queued, pending=tier.running, oldest_age_seconds=tier.oldest_age_s or 0.0)

    def _reap(self) -> None:
        removed = self._ledger.reap(self._heartbeat.others_without_work())
        if removed:
            log.info("dead consumers removed", count=removed)

    def _fields(self) -> dict[str, str | int | float]:
        stats, now_s = self._loop.stats, time.monotonic()
        num_ahead = sum(map(self._intake.num_ahead, TIERS))
        engine = self._loop.engine if self._loop.ready else None
        code, at_ms = self._publisher.last_error or ("", 0)
        return {
            **self._reloader.fields,  # read first: a model is served before it is reported
            "state": self._state(),
            "model": engine.model_name if engine is not None else "",
            "device": engine.device_name if engine is not None else "",
            "dtype": engine.dtype_name if engine is not None else "",
            "kernels": kernel_names(engine) if engine is not None else "",
            "batch_size": stats.running_realtime + stats.running_batch,
            "max_batch_size": engine.config.max_batch_size if engine is not None else "",
            "waiting": stats.waiting_realtime + stats.waiting_batch + num_ahead,
            "ahead": num_ahead,
            "held": len(self._registry),
            "free_blocks": stats.free_blocks,
            "cached_blocks": stats.cached_blocks,
            "total_blocks": stats.total_blocks,
            "tokens_per_s": round(self._rate(self._loop.num_tokens, now_s), 1),
            "requests_done": self._publisher.requests_done,
            "last_error": code,
            "last_error_ms": at_ms,
            "uptime_s": round(now_s - self._since_s, 1),
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "lease_s": self._config.lease_s,
            "version": __version__,
        }


class Rate:
    """How fast a count grows, per second, over about the last five seconds."""

    def __init__(self, window_s: float = 5.0) -> None:
        self._window_s = window_s
        self._samples: deque[tuple[float, int]] = deque()

    def __call__(self, count: int, now_s: float) -> float:
        self._samples.append((now_s, count))
        while len(self._samples) > 2 and self._samples[1][0] <= now_s - self._window_s:
            self._samples.popleft()
        then_s, before = self._samples[0]
        seconds = now_s - then_s
        return (count - before) / seconds if seconds > 0 else 0.0
