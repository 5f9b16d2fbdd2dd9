"""Requests that a route puts into another tier than that of their stream."""

from __future__ import annotations

import pytest
import redis
from prometheus_client import Metric

from producer import Client
from producer.errors import InvalidRequest
from producer.keys import TIERS, Tier
from tests.fakes import FakeEngine
from tests.servers import Server
from tests.tiny_engine import tiny_engine
from tests.workers import QueueView, eventually, worker_thread
from worker.metrics import WorkerMetrics
from worker.registry import ActiveRequest
from worker.routing import Route

BATCH_SIZE = 2
ALLOWANCE = 2  # what may wait beside a full batch
OF_THE_STREAM = ("headrace:queue_", "headrace:num_requests_waiting")  # the latter until it is begun
COUNTED = (
    "prompt_tokens_total",
    "generation_tokens_total",
    "request_success_total",
    "request_failure_total",
    "time_to_first_token_seconds_count",
    "inter_token_latency_seconds_count",
    "e2e_request_latency_seconds_count",
    "request_queue_time_seconds_count",
    "request_prefill_time_seconds_count",
    "request_decode_time_seconds_count",
)


@pytest.mark.parametrize("stream", TIERS)
@pytest.mark.parametrize("other", [0, 1], ids=["its own tier", "the other tier"])
def test_no_worker_takes_more_than_it_has_room_for(server: Server, queue: str, raw: redis.Redis, stream: Tier, other: int) -> None:
    tier = TIERS[TIERS.index(stream) - other]
    held: list[int] = []

    def note(_: ActiveRequest, __: str) -> None:
        held.append(len(worker.registry))

    routes = (Route.parse(f"{tier}:source=nightly"),)
    options = {"max_tokens": 40, "ignore_eos": True, "tier": stream, "source": "nightly"}
    with Client(server.url, queue) as client:
        handles = client.submit_many([{"prompt": f"p{i}", **options} for i in range(30)])  # type: ignore[list-item]  # a map of options
        with worker_thread(server.url, queue, load=lambda _: tiny_engine(max_batch_size=BATCH_SIZE), routes=routes, on_end=note) as worker:
            assert {len(handle.result(60).token_ids) for handle in handles} == {40}
            assert max(held) <= BATCH_SIZE + BATCH_SIZE + (BATCH_SIZE + ALLOWANCE)  # that ended just now, run, and wait
            eventually(lambda: len(worker.registry) == 0, "idle")
    QueueView(raw, queue).assert_clean()


def above_zero(metrics: WorkerMetrics, tier: Tier) -> set[str]:
    """The series of a tier that are not empty."""
    families: list[Metric] = list(metrics.registry.collect())
    samples = [sample for family in families for sample in family.samples]
    return {sample.name for sample in samples if sample.labels.get("tier") == tier and sample.value > 0}


def test_one_request_is_counted_in_one_tier(server: Server, queue: str) -> None:
    metrics = WorkerMetrics("w")
    routes = (Route.parse("batch:source=nightly"),)
    engine = FakeEngine(step_s=0.01)
    with Client(server.url, queue) as client, worker_thread(server.url, queue, engine, metrics=metrics, routes=routes):
        endless = client.submit("on and on", max_tokens=50_000, source="nightly")
        eventually(lambda: "headrace:num_requests_running" in above_zero(metrics, "batch"), "it runs")
        eventually(lambda: "headrace:queue_pending" in above_zero(metrics, "realtime"), "it is on its stream")
        endless.cancel()
        client.submit_and_wait("hello", max_tokens=5, source="nightly", timeout=30)
        with pytest.raises(InvalidRequest):
            client.submit_and_wait(messages=[{"role": "user", "content": "no chat template"}], source="nightly", timeout=30)
    served = {tier: {name for name in above_zero(metrics, tier) if not name.startswith(OF_THE_STREAM)} for tier in TIERS}
    assert served["realtime"] == set()
    assert {f"headrace:{name}" for name in COUNTED} <= served["batch"]
