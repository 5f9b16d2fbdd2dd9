"""What `/metrics`, `/healthz` and `/readyz` of a whole worker say in each of its states."""

from __future__ import annotations

import http.client
import json
import math
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any, NoReturn

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from producer import Client
from tests.fakes import FakeEngine
from tests.servers import Server
from tests.tiny_engine import tiny_engine
from tests.workers import eventually
from worker.config import WorkerConfig
from worker.engine.failures import EXHAUSTED_AFTER
from worker.engine.step import StepOutput, StepPlan
from worker.metrics import WorkerMetrics
from worker.reload import LoadModel
from worker.service import health_pages
from worker.worker import Worker


class Stoppable(FakeEngine):
    """An engine whose steps can be made to hang."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.go.set()

    def step(self) -> list[StepOutput]:
        self.go.wait()
        return super().step()


class Scene:
    """A running worker and its pages."""

    def __init__(self, worker: Worker, engine: Stoppable, port: int) -> None:
        self.worker = worker
        self.engine = engine
        self._port = port

    def page(self, path: str) -> tuple[int, dict[str, Any]]:
        status, body = self._get(path)
        return status, json.loads(body)

    def statuses(self) -> tuple[int, int]:
        """Of /healthz and /readyz."""
        return self.page("/healthz")[0], self.page("/readyz")[0]

    def sample(self, name: str, **labels: str) -> float:
        text = self._get("/metrics")[1].decode()
        wanted = {"worker": self.worker.config.name, **labels}
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
        (value,) = (s.value for s in samples if s.name == "headrace:" + name and s.labels == wanted)
        return value

    def _get(self, path: str) -> tuple[int, bytes]:
        with closing(http.client.HTTPConnection("127.0.0.1", self._port, timeout=20)) as connection:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()


@contextmanager
def scene(url: str, queue: str, load: LoadModel | None = None, **config: Any) -> Iterator[Scene]:
    """A worker with `Scene.engine`, or with what ``load`` makes."""
    settings = WorkerConfig(redis_url=url, queue=queue, **{"lease_s": 1.0, "drain_s": 20.0} | config)
    metrics, engine = WorkerMetrics(settings.name), Stoppable()
    worker = Worker(settings, load or (lambda _: engine), metrics)
    thread = threading.Thread(target=worker.run, daemon=True)
    with health_pages(worker, metrics) as server:
        thread.start()
        try:
            running = Scene(worker, engine, server.port)
            eventually(lambda: running.statuses() == (200, 200), "the worker is ready")
            yield running
        finally:
            engine.go.set()
            worker.request_stop()
            thread.join(30)
    assert not thread.is_alive()


def test_running_worker_is_healthy_ready_and_counts(server: Server, queue: str) -> None:
    with scene(server.url, queue) as worker, Client(server.url, queue=queue) as client:
        client.submit_and_wait("one", max_tokens=5, timeout=20)
        client.submit_and_wait("two", max_tokens=7, tier="batch", timeout=20)
        assert worker.page("/readyz")[1]["status"] == "ok"
        eventually(lambda: worker.sample("request_success_total", tier="batch", finished_reason="length") == 1, "the count")
        assert worker.sample("request_success_total", tier="realtime", finished_reason="length") == 1
        assert worker.sample("generation_tokens_total", tier="realtime") == 5
        assert worker.sample("generation_tokens_total", tier="batch") == 7
        assert worker.sample("prompt_tokens_total", tier="realtime") == 3
        assert worker.sample("time_to_first_token_seconds_count", tier="batch") == 1
        assert worker.sample("e2e_request_latency_seconds_count", tier="realtime") == 1
        assert worker.sample("redis_round_trip_seconds_count") > 0
        assert worker.sample("device_memory_bytes", kind="total") > worker.sample("device_memory_bytes", kind="allocated") > 0


def test_queue_that_waits_is_shown_with_its_age(server: Server, queue: str) -> None:
    with scene(server.url, queue, lease_s=30.0) as worker, Client(server.url, queue=queue) as client:
        worker.engine.go.clear()
        handles = client.submit_many(["waits"] * 150)  # more than the engine has room for
        eventually(lambda: worker.sample("queue_depth", tier="realtime") > 0, "the depth")
        assert worker.sample("queue_pending", tier="realtime") > 0
        eventually(lambda: worker.sample("queue_oldest_age_seconds", tier="realtime") > 0, "the age")
        worker.engine.go.set()
        for handle in handles:
            handle.result(timeout=20)
        eventually(lambda: worker.sample("queue_depth", tier="realtime") == 0, "the depth")


def test_wedged_worker_is_neither_healthy_nor_ready_until_it_goes_on(server: Server, queue: str) -> None:
    with scene(server.url, queue, lease_s=3.0) as worker, Client(server.url, queue=queue) as client:
        worker.engine.go.clear()
        handle = client.submit("hello", max_tokens=3)
        eventually(lambda: worker.statuses() == (503, 503), "the wedge is seen")
        engine = worker.page("/healthz")[1]["checks"]["engine"]
        assert engine["detail"].startswith("no step for ")
        assert worker.page("/readyz")[1]["checks"]["worker"] == {"ok": False, "detail": "wedged"}
        worker.engine.go.set()
        handle.result(timeout=20)
        eventually(lambda: worker.statuses() == (200, 200), "it is well again")


def test_engine_that_hangs_in_its_first_step_is_shown_to_stall(server: Server, queue: str) -> None:
    with scene(server.url, queue, lease_s=30.0) as worker, Client(server.url, queue=queue) as client:
        assert worker.sample("engine_stalled_seconds") == 0
        worker.engine.go.clear()
        handle = client.submit("hello", max_tokens=3)
        eventually(lambda: worker.sample("engine_stalled_seconds") > 0.3, "the stall grows")
        worker.engine.go.set()
        handle.result(timeout=20)
        eventually(lambda: worker.sample("engine_stalled_seconds") == 0, "it goes on")


def test_draining_worker_is_healthy_but_not_ready(server: Server, queue: str) -> None:
    with scene(server.url, queue, lease_s=30.0) as worker, Client(server.url, queue=queue) as client:
        worker.engine.go.clear()
        handle = client.submit("hello", max_tokens=3)
        eventually(lambda: len(worker.worker.registry) == 1, "it is taken")
        worker.worker.request_stop()
        eventually(lambda: worker.statuses() == (200, 503), "the drain is seen")
        assert worker.page("/readyz")[1]["checks"]["worker"]["detail"] == "draining"
        worker.engine.go.set()
        handle.result(timeout=20)


def test_redis_down_makes_it_unready_and_a_restart_ready_again(queue: str) -> None:
    with Server("valkey", appendonly="yes") as server, scene(server.url, queue) as worker:
        server.kill()
        assert worker.statuses() == (200, 503)
        checks = worker.page("/readyz")[1]["checks"]
        assert checks["redis"]["detail"].startswith("ConnectionError: ")
        assert checks["engine"]["ok"]
        server.start()
        eventually(lambda: worker.statuses() == (200, 200), "it is ready again")


def test_during_an_outage_the_engine_is_shown_as_it_is_and_the_queue_as_unknown(queue: str) -> None:
    queue_gauges = ("queue_depth", "queue_pending", "queue_oldest_age_seconds")
    with Server("valkey", appendonly="yes") as server, scene(server.url, queue) as worker, Client(server.url, queue=queue) as client:
        eventually(lambda: worker.sample("redis_up") == 1, "the first heartbeat is written")  # ready may come before it
        worker.engine.step_s = 0.02
        handle = client.submit("hello", max_tokens=100)
        eventually(lambda: worker.sample("num_requests_running", tier="realtime") == 1, "it runs")
        server.kill()
        eventually(lambda: worker.sample("redis_up") == 0, "the outage is seen")
        assert all(math.isnan(worker.sample(name, tier="realtime")) for name in queue_gauges)
        eventually(lambda: worker.sample("num_requests_running", tier="realtime") == 0, "it has run")
        server.start()
        handle.result(timeout=20)
        eventually(lambda: worker.sample("queue_depth", tier="realtime") == 0, "it is known again")
        assert worker.sample("redis_up") == 1


def test_failed_engine_is_reported_with_its_reason(server: Server, queue: str) -> None:
    def out_of_memory() -> list[StepOutput]:
        raise MemoryError("no block left for 2.0 GiB")

    with scene(server.url, queue, lease_s=30.0) as worker, Client(server.url, queue=queue) as client:
        worker.engine.step = out_of_memory  # type: ignore[method-assign]  # one engine's, for this test
        client.submit("hello", max_tokens=3)
        eventually(lambda: worker.statuses() == (503, 503), "the failure is seen")
        assert worker.page("/healthz")[1]["checks"]["engine"]["detail"].startswith("MemoryError")


def test_device_without_memory_is_reported_and_ends_the_worker_instead_of_failing_all_that_comes(server: Server, queue: str) -> None:
    def run_out(_: StepPlan) -> NoReturn:
        raise torch.OutOfMemoryError("CUDA out of memory")

    engine = tiny_engine()
    engine.runner.run = run_out  # type: ignore[method-assign]  # one engine's, for this test
    with scene(server.url, queue, lambda _: engine) as worker, Client(server.url, queue=queue) as client:
        handles = client.submit_many(["hello"] * 40)
        eventually(lambda: worker.statuses() == (503, 503), "the failure is seen")
        assert worker.page("/healthz")[1]["checks"]["engine"]["detail"].startswith("FatalDeviceError: out of memory")
        eventually(lambda: len(worker.worker.registry) == 0, "all is handed back")
        assert sum(handle.status() == "queued" for handle in handles) > 40 - EXHAUSTED_AFTER


def test_worker_that_loads_without_redis_has_started_and_is_not_ready(queue: str) -> None:
    settings = WorkerConfig(redis_url="redis://127.0.0.1:1/0", queue=queue)
    may_load, metrics = threading.Event(), WorkerMetrics(settings.name)

    def load(_: str) -> FakeEngine:
        may_load.wait()
        return FakeEngine()

    worker = Worker(settings, load, metrics)
    thread = threading.Thread(target=worker.run, daemon=True)
    with health_pages(worker, metrics) as server:
        starting = Scene(worker, Stoppable(), server.port)
        thread.start()
        assert (starting.page("/startupz")[0], starting.statuses()) == (503, (200, 503))
        may_load.set()
        eventually(lambda: starting.page("/startupz")[0] == 200, "it has loaded")
        assert starting.statuses() == (200, 503)
        worker.request_stop()
        thread.join(30)
    assert not thread.is_alive()


@pytest.mark.parametrize("path", ["/startupz", "/healthz", "/readyz"])
def test_pages_are_json_that_names_every_check(server: Server, queue: str, path: str) -> None:
    with scene(server.url, queue) as worker:
        page = worker.page(path)[1]
    assert set(page) == {"status", "checks"}
    assert all(set(check) == {"ok", "detail"} for check in page["checks"].values())
