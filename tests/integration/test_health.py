from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from worker.health import Finding, HealthServer, Progress, Wedge
from worker.metrics import WorkerMetrics


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Worker:
    """The parts of a worker that the pages read, to be put in any state."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.progress = Progress(limit_s=60, clock=self.clock)
        self.loaded = self.draining = False
        self.ping: Callable[[], Finding] = lambda: Finding(True, "0.2 ms")
        self.metrics = WorkerMetrics("gpu0")
        self.server = HealthServer(
            self.metrics.registry,
            started={"model": self.check_model},
            alive={"engine": self.progress.check},
            ready={"engine": self.progress.check, "model": self.check_model, "redis": self.check_redis, "drain": self.check_drain},
            host="127.0.0.1",
        )

    def check_model(self) -> Finding:
        return Finding(self.loaded, "" if self.loaded else "loading")

    def check_redis(self) -> Finding:
        return self.ping()

    def check_drain(self) -> Finding:
        return Finding(not self.draining, "draining since SIGTERM" if self.draining else "")

    def get(self, path: str, method: str = "GET", **headers: str) -> tuple[int, str, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=10)
        try:
            connection.request(method, path, headers=headers)
            response = connection.getresponse()
            return response.status, response.headers["Content-Type"], response.read()
        finally:
            connection.close()

    def page(self, path: str) -> tuple[int, dict[str, Any]]:
        status, content_type, body = self.get(path)
        assert content_type.startswith("application/json")
        return status, json.loads(body)


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker()
    worker.server.start()
    yield worker
    worker.server.close()


def test_running_worker_is_healthy_and_ready(worker: Worker) -> None:
    worker.loaded = True
    worker.progress.turn(3)
    status, page = worker.page("/readyz")
    assert (status, page["status"]) == (200, "ok")
    assert page["checks"]["engine"] == {"ok": True, "detail": "3 requests held, last step 0.0 s ago"}
    assert worker.page("/healthz")[0] == 200


def test_loading_worker_is_healthy_but_not_ready(worker: Worker) -> None:
    status, page = worker.page("/readyz")
    assert (status, page["status"]) == (503, "failing")
    assert page["checks"]["model"] == {"ok": False, "detail": "loading"}
    assert worker.page("/healthz")[0] == 200


def test_started_is_what_has_its_model_whatever_redis_does(worker: Worker) -> None:
    worker.ping = lambda: Finding(False, "away")
    assert worker.page("/startupz") == (503, {"status": "failing", "checks": {"model": {"ok": False, "detail": "loading"}}})
    worker.loaded = True
    assert worker.page("/startupz")[0] == 200
    assert worker.page("/readyz")[0] == 503


def test_draining_worker_is_healthy_but_not_ready(worker: Worker) -> None:
    worker.loaded = worker.draining = True
    status, page = worker.page("/readyz")
    assert status == 503
    assert page["checks"]["drain"]["detail"] == "draining since SIGTERM"
    assert worker.page("/healthz")[0] == 200


def test_redis_down_makes_it_unready_with_the_reason_and_keeps_it_healthy(worker: Worker) -> None:
    def refuse() -> Finding:
        raise ConnectionRefusedError("redis at 127.0.0.1:6379")

    worker.loaded = True
    worker.ping = refuse
    status, page = worker.page("/readyz")
    assert status == 503
    assert page["checks"]["redis"] == {"ok": False, "detail": "ConnectionRefusedError: redis at 127.0.0.1:6379"}
    assert worker.page("/healthz")[0] == 200


def test_wedged_engine_is_neither_healthy_nor_ready(worker: Worker) -> None:
    worker.loaded = True
    worker.progress.turn(12)
    worker.clock.now += 61
    for path in ("/healthz", "/readyz"):
        status, page = worker.page(path)
        assert status == 503
        assert page["checks"]["engine"]["detail"] == "no step for 61.0 s (limit 60 s), 12 requests held"


def test_engine_that_never_takes_up_its_first_work_is_found_wedged(worker: Worker) -> None:
    worker.clock.now += 3600
    worker.progress.work_arrived()
    assert worker.page("/healthz")[0] == 200
    worker.clock.now += 30
    worker.progress.work_arrived()
    worker.clock.now += 31
    assert worker.page("/healthz")[0] == 503


def test_wedge_is_measured_by_observations_and_not_by_a_time_in_which_the_process_was_stopped() -> None:
    clock = Clock()
    wedge = Wedge(longest_gap_s=1.0, clock=clock)
    seen = []
    for gap_s, wedged in ((0.5, False), (0.5, True), (0.5, True), (3600.0, True), (0.5, False), (0.5, True)):
        clock.now += gap_s
        seen.append(wedge.observe(wedged))
    assert seen == [0.0, 0.0, 0.5, 1.5, 0.0, 0.0]


def test_idle_engine_stays_healthy_however_long(worker: Worker) -> None:
    worker.progress.work_arrived()
    worker.progress.turn(1)
    worker.progress.turn(0)
    worker.clock.now += 86400
    status, page = worker.page("/healthz")
    assert (status, page["checks"]["engine"]["detail"]) == (200, "idle")


def test_engine_out_of_memory_says_so_and_stays_failed(worker: Worker) -> None:
    worker.progress.fail("out of memory: device refused 2.0 GiB")
    worker.progress.fail("a later one")
    worker.progress.turn(0)
    status, page = worker.page("/healthz")
    assert (status, page["checks"]["engine"]["detail"]) == (503, "out of memory: device refused 2.0 GiB")


def test_metrics_are_served_as_text_and_as_openmetrics(worker: Worker) -> None:
    worker.metrics.inter_token("realtime", 0.03, 7)
    status, content_type, body = worker.get("/metrics")
    assert status == 200
    assert content_type.startswith("text/plain")
    assert b'headrace:inter_token_latency_seconds_count{tier="realtime",worker="gpu0"} 7.0' in body
    status, content_type, body = worker.get("/metrics?x=1", Accept="application/openmetrics-text; version=1.0.0")
    assert status == 200
    assert content_type.startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")


def test_head_gives_the_status_without_a_body_and_other_paths_name_the_right_ones(worker: Worker) -> None:
    assert worker.get("/healthz", method="HEAD")[::2] == (200, b"")
    status, page = worker.page("/")
    assert (status, page["paths"]) == (404, ["/healthz", "/metrics", "/readyz", "/startupz"])


def test_a_stuck_check_holds_up_neither_other_pages_nor_the_end(worker: Worker) -> None:
    stuck, release = threading.Event(), threading.Event()

    def hang() -> Finding:
        stuck.set()
        release.wait(60)
        return Finding(True)

    worker.ping = hang
    with socket.create_connection(("127.0.0.1", worker.server.port)) as probe:
        probe.sendall(b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert stuck.wait(10)
        assert worker.page("/healthz")[0] == 200
        worker.server.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", worker.server.port))
    release.set()


def test_a_taken_port_is_an_error_at_the_start(worker: Worker) -> None:
    with pytest.raises(OSError, match="in use"):
        HealthServer(worker.metrics.registry, started={}, alive={}, ready={}, host="127.0.0.1", port=worker.server.port)
