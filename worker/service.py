"""From a worker's options to its exit code: logging, signals, health pages, the step log, the worker itself."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from functools import partial
from io import RawIOBase
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import structlog

from producer.connection import connect
from producer.keys import Keys
from worker.config import WorkerConfig
from worker.device_memory import device_bytes
from worker.engine.config import EngineConfig
from worker.engine.scheduler import SchedulerStats
from worker.engine.step import StepStats
from worker.engine_api import EngineLike
from worker.health import Finding, HealthServer
from worker.metrics import WorkerMetrics
from worker.reload import Reload
from worker.stream.ledger import check_writable
from worker.tracing import exporting_to
from worker.worker import Worker

log = structlog.get_logger("headrace.worker")

_PROBE_TIMEOUT_S = 1.0  # of the readiness check; a probe waits for it


def serve(
    *,
    metrics_port: int | None,
    metrics_sources: Sequence[str],
    step_log: Path | None,
    otlp_traces_endpoint: str | None,
    log_level: str,
    log_format: str,
    unknown_variables: Sequence[str],
    **options: Any,
) -> int:
    """Run a worker until it is told to stop; returns the process's exit code.

    Args:
        metrics_port: of ``/metrics``, ``/startupz``, ``/healthz`` and ``/readyz``; None serves none.
        metrics_sources: labels of requests that are counted by name.
        step_log: file that gets one JSON line per step.
        otlp_traces_endpoint: URL that gets one trace per request.
        unknown_variables: environment variables that look like options but belong to none; they are logged.
        options: the fields of `WorkerConfig` and `EngineConfig`; None takes the default.

    Raises:
        TypeError: neither has one of the ``options``.
        ValueError: an option is out of its bounds, or what it names is not available.
    """
    _check_known(options)
    configure_logging(log_level, log_format)
    if unknown_variables:
        log.warning("environment variables that no option reads", names=unknown_variables)
    config = WorkerConfig(**_fields_of(WorkerConfig, options))
    engine_config = EngineConfig(**_fields_of(EngineConfig, options))
    metrics = WorkerMetrics(config.name, metrics_sources)
    with ExitStack() as stack:
        steps = stack.enter_context(StepLog.opened(step_log)) if step_log is not None else None
        tracer = stack.enter_context(exporting_to(otlp_traces_endpoint, config)) if otlp_traces_endpoint is not None else None
        worker = Worker(
            config,
            partial(_load_engine, engine_config),
            metrics,
            on_step=steps.write if steps is not None else None,
            on_end=tracer.record if tracer is not None else None,
            check_model=partial(_check_model, engine_config),
        )
        _install_signals(worker)
        if metrics_port is not None:
            stack.enter_context(health_pages(worker, metrics, port=metrics_port))
        exit_code = worker.run()
    if worker.loop.alive:
        _exit_at_once(exit_code)
    return exit_code


def _config_of(config: EngineConfig, model: str) -> EngineConfig:
    """The configuration for another model; '' is the worker's own."""
    return replace(config, model=model) if model else config


def _load_engine(config: EngineConfig, model: str) -> EngineLike:
    from worker.engine.engine import Engine

    return Engine(_config_of(config, model))


def _check_model(config: EngineConfig, model: str) -> None:
    from worker.engine.model_loader import check_model

    check_model(_config_of(config, model))


class StepLog:
    """One JSON line per step, written at once: when it ended (Unix time), how long it took, how long the device had idled before it,
    where the host's time went (`StepClock`), its size, and the KV cache after it (`SchedulerStats.kv_usage`, `kv_waste`). The log ends
    with the first line that cannot be written.
    """

    def __init__(self, file: RawIOBase) -> None:
        self._file = file
        self._ended = False

    @classmethod
    @contextmanager
    def opened(cls, path: Path) -> Iterator[StepLog]:
        try:
            file = path.open("wb", buffering=0)
        except OSError as error:
            raise ValueError(f"step_log cannot be written: {error.strerror}") from None
        with file:
            yield cls(file)

    def write(self, step: StepStats, stats: SchedulerStats) -> None:
        if self._ended:
            return
        try:
            self._file.write(self._line(step, stats))
        except OSError as error:
            self._ended = True
            log.error("step log ended", error=type(error).__name__, detail=str(error))

    def _line(self, step: StepStats, stats: SchedulerStats) -> bytes:
        line = {
            "time_s": round(time.time(), 4),
            "step_ms": round(1000 * step.seconds, 3),
            "idle_ms": round(1000 * step.idle_seconds, 3),
            "phase_ms": {phase: round(1000 * seconds, 3) for phase, seconds in step.phase_seconds.items()},
            "batch_size": step.batch_size,
            "num_tokens": step.num_tokens,
            "kv_usage": round(stats.kv_usage, 4),
            "kv_waste": round(stats.kv_waste, 4),
        }
        return json.dumps(line).encode() + b"\n"


def configure_logging(level: str, form: str) -> None:
    """Log to stderr, one line per event: JSON for machines, or text for a console. Libraries' warnings take the same form."""
    renderer: Any = structlog.dev.ConsoleRenderer() if form == "console" else structlog.processors.JSONRenderer()
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    finish = [structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer]
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(processors=finish, foreign_pre_chain=shared))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)


def _install_signals(worker: Worker) -> None:
    """SIGTERM and SIGINT stop a worker; SIGHUP makes it load its model again."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        worker.request_stop()

    def reload(_number: int, _frame: FrameType | None) -> None:
        worker.request_reload(Reload())

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGHUP, reload)


@contextmanager
def health_pages(worker: Worker, metrics: WorkerMetrics, *, port: int = 0) -> Iterator[HealthServer]:
    """Serve a worker's pages until the end of the ``with``.

    Raises:
        ValueError: the port is taken, or not permitted.
    """
    config, timeout_s = worker.config, _PROBE_TIMEOUT_S
    client = connect(config.redis_url, queue=config.queue, socket_timeout=timeout_s, socket_connect_timeout=timeout_s)

    def serving() -> Finding:
        return Finding(worker.state == "running", worker.state)

    def redis_writable() -> Finding:
        check_writable(client, Keys(config.queue))
        return Finding(True, "takes writes")

    def loaded() -> Finding:
        return Finding(worker.loop.ready, "loaded" if worker.loop.ready else "loading")

    engine = worker.loop.progress.check
    try:
        server = HealthServer(
            metrics.registry,
            started={"engine": engine, "model": loaded},
            alive={"engine": engine},
            ready={"engine": engine, "worker": serving, "redis": redis_writable},
            port=port,
        )
    except OSError as error:
        raise ValueError(f"metrics_port {port} cannot be listened on: {error.strerror}") from None
    metrics.watch_memory(lambda kind: device_bytes(worker.loop.engine.device_name if worker.loop.ready else "cpu", kind))
    server.start()
    try:
        yield server
    finally:
        server.close()
        client.close()


def _exit_at_once(exit_code: int) -> NoReturn:
    """For when a thread is still in the model's code: Python's normal exit would then crash the process with a signal."""
    logging.shutdown()
    sys.stderr.flush()
    os._exit(exit_code)


def _fields_of(config: type, options: dict[str, Any]) -> dict[str, Any]:
    return {field.name: options[field.name] for field in fields(config) if options.get(field.name) is not None}


def _check_known(options: Iterable[str]) -> None:
    known = {field.name for config in (WorkerConfig, EngineConfig) for field in fields(config)}
    if unknown := sorted(set(options) - known):
        raise TypeError(f"unknown options of a worker: {', '.join(unknown)}")
