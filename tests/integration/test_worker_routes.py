"""Requests that a route puts into another tier than that of their stream."""

from __future__ import annotations

import pytest
import redis

from producer import Client
from producer.keys import TIERS, Tier
from tests.servers import Server
from tests.tiny_engine import tiny_engine
from tests.workers import QueueView, eventually, worker_thread
from worker.registry import ActiveRequest
from worker.routing import Route

BATCH_SIZE = 2
ALLOWANCE = 2  # what may wait beside a full batch


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
