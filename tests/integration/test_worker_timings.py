"""Where a request's time went, by its result, its state and the worker's histograms."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from producer import Client
from tests.fakes import FakeEngine
from tests.servers import Server
from tests.workers import QueueView, eventually, worker_thread
from worker.worker import Worker

PARTS = ("time_to_first_token", "request_queue_time", "request_prefill_time", "request_decode_time")


@pytest.fixture
def client(server: Server, queue: str) -> Iterator[Client]:
    with Client(server.url, queue=queue) as client:
        yield client


def sample(worker: Worker, name: str) -> float | None:
    labels = {"worker": worker.config.name, "tier": "realtime"}
    return worker._metrics.registry.get_sample_value(f"headrace:{name}", labels)


def counts(worker: Worker) -> list[float | None]:
    """Observations of each part of a request's life."""
    return [sample(worker, f"{part}_seconds_count") for part in PARTS]


def test_resumed_request_tells_of_its_first_start_and_token_and_is_no_sample_of_the_workers(
    server: Server, queue: str, client: Client, view: QueueView
) -> None:
    handle = client.submit("hello", max_tokens=60, stream=True)
    with worker_thread(server.url, queue, FakeEngine(step_s=0.02), drain_s=0.0):
        eventually(lambda: view.frames(handle.id), "under way")
    begun = view.state(handle.id)
    with worker_thread(server.url, queue, FakeEngine()) as second:
        result = handle.result(timeout=30)
        eventually(lambda: sample(second, "e2e_request_latency_seconds_count") == 1, "counted")
        assert counts(second) == [0, 0, 0, 0]
    enqueued_ms, started_ms, first_token_ms = (int(begun[name]) for name in ("enqueued_ms", "started_ms", "first_token_ms"))
    assert (result.timings.queue_ms, result.timings.ttft_ms) == (started_ms - enqueued_ms, first_token_ms - enqueued_ms)
    state = view.state(handle.id)
    assert (state["started_ms"], state["first_token_ms"]) == (begun["started_ms"], begun["first_token_ms"])
    assert first_token_ms < int(state["finished_ms"])


def test_request_that_nobody_streams_has_its_first_token_timed_all_the_same(
    server: Server, queue: str, client: Client, view: QueueView
) -> None:
    with worker_thread(server.url, queue, FakeEngine(step_s=0.01)) as worker:
        result = client.submit("hello", max_tokens=30).result(timeout=30)
        eventually(lambda: counts(worker) == [1, 1, 1, 1], "counted")
    state = view.state(result.id)
    ttft_ms = int(state["first_token_ms"]) - int(state["enqueued_ms"])
    assert ttft_ms == pytest.approx(result.timings.ttft_ms, abs=1)
    assert result.timings.queue_ms <= result.timings.ttft_ms < result.timings.total_ms


def test_handed_back_before_its_first_token_it_is_timed_as_if_it_had_waited(server: Server, queue: str, client: Client) -> None:
    with worker_thread(server.url, queue, FakeEngine(max_batch_size=1, step_s=0.01), drain_s=0.0) as first:
        handles = [client.submit(prompt, max_tokens=1000, stream=True) for prompt in ("runs", "waits")]
        eventually(lambda: first.loop.stats.waiting_realtime == 1, "one waits in the engine")
    handles[0].cancel()
    with worker_thread(server.url, queue, FakeEngine()) as second:
        result = handles[1].result(timeout=30)
        eventually(lambda: counts(second) == [1, 1, 1, 1], "counted")
    assert 0 < result.timings.queue_ms <= result.timings.ttft_ms


def test_wait_within_the_engine_is_part_of_the_queue_and_not_of_the_prefill(
    server: Server, queue: str, client: Client, view: QueueView
) -> None:
    with worker_thread(server.url, queue, FakeEngine(max_batch_size=1, step_s=0.02)) as worker:
        first, second = (client.submit(prompt, max_tokens=20, stream=True) for prompt in ("first", "second"))
        eventually(lambda: worker.loop.stats.waiting_realtime == 1, "one waits in the engine")
        results = [handle.result(timeout=30) for handle in (first, second)]
        eventually(lambda: sample(worker, "request_queue_time_seconds_count") == 2, "counted")
    first_token_ms = int(view.state(first.id)["first_token_ms"])
    assert int(view.state(second.id)["enqueued_ms"]) + results[1].timings.queue_ms > first_token_ms
    queued_s = sum(result.timings.queue_ms for result in results) / 1000
    assert sample(worker, "request_queue_time_seconds_sum") == pytest.approx(queued_s)
