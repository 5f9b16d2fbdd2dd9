"""Joins the two halves: requests come in from Redis, the engine runs them, replies go back.

Four threads, each of which owns what it works on. All except the engine's talk to Redis, through one client and its connection pool:

    intake      streams -> registry -> engine       (worker/intake.py)
    engine      batch, KV cache, device             (worker/engine_loop.py)
    publisher   tokens -> text -> frames, replies   (worker/publisher.py)
    keeper      orders, leases, deadlines, beat     (worker/keeper.py)
"""

from __future__ import annotations

import time
from queue import SimpleQueue

import structlog

from producer.connection import connect, redact
from producer.keys import Keys
from worker.config import WorkerConfig
from worker.context import WorkerContext
from worker.engine.scheduler import SchedulerStats
from worker.engine.step import StepStats
from worker.engine_loop import EngineLoop, OnStep
from worker.guard import Guard, described
from worker.intake import Intake
from worker.keeper import Keeper
from worker.metrics import WorkerMetrics
from worker.publisher import OnEnd, Publisher
from worker.registry import Registry
from worker.reload import CheckModel, LoadModel, Reload, Reloader
from worker.stream.consumer import Consumer
from worker.stream.control import Control
from worker.stream.heartbeat import Heartbeat, eviction_policy
from worker.stream.ledger import Ledger
from worker.stream.trouble import TROUBLE, worker_outage

ENGINE_STOP_S = 5.0  # how long to wait for the last step before the requests are handed back without it
BEATS_MISSED = 3

log = structlog.get_logger("headrace.worker")


class Worker:
    """One worker: serves one queue with one engine until it is told to stop.

    Args:
        load_engine: makes the engine with the model of a name, or with the worker's own if that is ''. Called in the
            engine's own thread, while the heartbeat already says ``starting`` or ``reloading``.
        metrics: where to count; None makes a registry of its own.
        on_step: called in the engine's thread after each step, with what the scheduler then holds; must not block.
        on_end: called in the publisher's thread after each request's end, with what became of its reply; must not block.
        check_model: raises if a reload to the model of a name is sure to fail; called while another model serves.

    Example::

        worker = Worker(WorkerConfig(queue="default"), lambda model: Engine(EngineConfig(model=model or "demo")))
        signal.signal(signal.SIGTERM, lambda *_: worker.request_stop())
        sys.exit(worker.run())
    """

    def __init__(
        self,
        config: WorkerConfig,
        load_engine: LoadModel,
        metrics: WorkerMetrics | None = None,
        on_step: OnStep | None = None,
        on_end: OnEnd | None = None,
        check_model: CheckModel = lambda _: None,
    ) -> None:
        self.config = config
        self.registry = Registry()
        self._on_step = on_step
        self._guard = Guard(on_end=self._wake)
        self.loop = EngineLoop(lambda: load_engine(""), self._guard, stall_s=config.lease_s, on_step=self._count_step)
        self._keys = Keys(config.queue)
        timeout_s = config.redis_timeout_s
        self._client = connect(config.redis_url, queue=config.queue, socket_timeout=timeout_s, socket_connect_timeout=timeout_s)
        self._draining = False
        self._wakes: SimpleQueue[None] = SimpleQueue()  # unlike an event, safe to use in a signal handler
        outage = worker_outage()
        self._metrics = metrics if metrics is not None else WorkerMetrics(config.name)
        self._metrics.watch_stall(lambda: self.loop.progress.stalled_s)
        self._ledger = self._make_ledger()
        context = WorkerContext(config, self._guard, self.registry, self.loop, outage, self._metrics)
        self._publisher = Publisher(context, self._ledger, on_end)
        consumer = Consumer(self._client, self._keys, config.name, config.lease_s)
        self._intake = Intake(context, self._publisher, consumer, self._ledger)
        self._reloader = Reloader(context, self._publisher, self._intake, check=check_model, load=load_engine, wake=self._wake)
        self._heartbeat = Heartbeat(self._client, self._keys, config.name, BEATS_MISSED * max(1.0, config.lease_s / 3))
        control = Control(self._client, self._keys)
        self._keeper = Keeper(
            context,
            control,
            self._heartbeat,
            self._ledger,
            state=lambda: self.state,
            publisher=self._publisher,
            intake=self._intake,
            reloader=self._reloader,
        )

    @property
    def state(self) -> str:
        """``starting``, ``running``, ``reloading`` (it reads nothing until that is done), ``draining``, ``wedged`` or ``failed``."""
        if self._guard.failure is not None:
            return "failed"
        if self._draining:
            return "draining"
        if not self.loop.ready:
            return "starting"
        if self.loop.stalled:
            return "wedged"
        return "reloading" if self._reloader.active else "running"

    def request_stop(self) -> None:
        """Drain; on a second call, hand everything back now. May be called from a signal handler."""
        self._guard.request_stop()

    def request_reload(self, order: Reload) -> None:
        """Serve another model, or load the same one again, without losing a request. May be called from a signal handler."""
        self._reloader.ask(order)

    def run(self) -> int:
        """Serve until told to stop, or until the engine or another thread fails.

        Returns:
            The process's exit code: 0 after a drain, 1 after a failure (all requests were handed back).
        """
        log.info("worker starting", name=self.config.name, queue=self.config.queue, redis=redact(self.config.redis_url))
        if self.config.log_prompts:
            log.warning("USER TEXT GOES TO THE LOG: prompts and outputs, as --log-prompts asks")
        self._keeper.start()
        self._publisher.start()
        self.loop.start(self._publisher.put)
        self._serve()
        self._drain()
        self._end()
        failure = self._guard.failure
        log.info("worker ended", requests_done=self._publisher.requests_done, failure=type(failure).__name__ if failure else None)
        return 0 if failure is None else 1

    def _serve(self) -> None:
        """Serve until the first order to stop."""
        if self._guard.wait_for(lambda: self.loop.ready and self._keeper.await_start(0.0)) and not self._guard.ending:
            self._warn_of_eviction()
            self._tell_model()
            self._intake.start()
        while not self._guard.ending:
            self._wakes.get()
            if not self._guard.ending and self._reloader.run():
                self._keeper.beat_soon()

    def _tell_model(self) -> None:
        engine = self.loop.engine  # not in `_serve`, whose variables would outlive this engine after a reload
        self._metrics.serving(engine.model_name, engine.device_name, engine.dtype_name)
        log.info("worker running", model=engine.model_name, device=engine.device_name, dtype=engine.dtype_name, **engine.kernels)

    def _count_step(self, step: StepStats, stats: SchedulerStats) -> None:
        self._metrics.step(step)
        if self._on_step is not None:
            self._on_step(step, stats)

    def _wake(self) -> None:
        self._wakes.put(None)

    def _drain(self) -> None:
        """Finish what runs while there is time."""
        self._intake.stop()
        self._draining = True
        self._keeper.beat_soon()
        deadline_at_s = time.monotonic() + self.config.drain_s
        while self._guard.stops_asked == 1 and self._guard.failure is None and self.registry.running and time.monotonic() < deadline_at_s:
            self.registry.await_change(0.1)

    def _end(self) -> None:
        if not self.loop.stop(ENGINE_STOP_S):
            log.warning("the engine is in a step and is left behind")
        self._keeper.stop()  # a lease renewed after its request was handed back would be ours again
        try:
            self._publisher.stop(crashed=self._guard.failure is not None)
            self._heartbeat.stop()
            self._ledger.reap([self.config.name])
        except TROUBLE as error:
            log.warning("heartbeat left to expire", error=type(error).__name__)
        except Exception as error:  # what made the publisher fail may do so again; the leases will lapse
            log.error("requests could not be handed back", **described(error))
        self._client.close()

    def _make_ledger(self) -> Ledger:
        config = self.config
        return Ledger(
            self._client,
            self._keys,
            config.name,
            max_attempts=config.max_attempts,
            reply_ttl_s=config.reply_ttl_s,
            state_ttl_s=config.state_ttl_s,
            on_round_trip=self._metrics.redis_round_trip,
        )

    def _warn_of_eviction(self) -> None:
        try:
            policy = eviction_policy(self._client)
        except TROUBLE:
            return
        if policy not in ("", "noeviction"):
            log.error("REDIS MAY DROP REQUESTS AND REPLIES: set maxmemory-policy to noeviction", maxmemory_policy=policy)
