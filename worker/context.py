"""What a worker's threads share."""

from __future__ import annotations

from dataclasses import dataclass

from producer.connection import Outage
from worker.config import WorkerConfig
from worker.engine_loop import EngineLoop
from worker.guard import Guard
from worker.metrics import WorkerMetrics
from worker.registry import Registry


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """One worker's settings, threads, requests and engine; each may be used from any thread."""

    config: WorkerConfig
    guard: Guard
    registry: Registry
    loop: EngineLoop
    outage: Outage
    metrics: WorkerMetrics
