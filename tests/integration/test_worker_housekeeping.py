"""What a queue looks like after much has happened on it: as at the start."""

from __future__ import annotations

import pytest
import redis

from producer import Client
from producer.connection import connect
from producer.keys import GROUP, TIERS, Keys
from tests.fakes import FakeEngine
from tests.servers import Server
from tests.workers import QueueView, eventually, worker_thread
from worker.registry import ActiveRequest
from worker.stream.consumer import Consumer
from worker.stream.heartbeat import Heartbeat


def view_of(client: redis.Redis, queue: str) -> QueueView:
    return QueueView(client, queue)


def test_consumers_of_50_dead_workers_are_removed_but_for_those_that_still_hold_something(any_server: Server, queue: str) -> None:
    keys = Keys(queue)
    with connect(any_server.url) as client, Client(any_server.url, queue=queue) as caller:
        view = QueueView(client, queue)
        Consumer(client, keys, "first", 1.0).ensure_groups()
        handle = caller.submit("kept by a dead one", max_tokens=5)
        for i in range(50):
            for tier in TIERS:  # before 7.2 a read that brings nothing makes no consumer
                client.xgroup_createconsumer(keys.stream(tier), GROUP, f"dead-{i}")
            consumer = Consumer(client, keys, f"dead-{i}", 1.0)
            Heartbeat(client, keys, f"dead-{i}", 0.2).beat({"state": "running"})
            assert len(consumer.read({"realtime": 1, "batch": 1}, 1)) == (1 if i == 0 else 0)
        assert len(view.consumers()) == 50
        with worker_thread(any_server.url, queue, lease_s=0.5) as worker:
            assert handle.result(timeout=20).attempt == 2
            eventually(lambda: view.consumers() == {worker.config.name}, "all but the live one are gone")
            eventually(lambda: client.zrange(keys.workers, 0, -1) == [worker.config.name.encode()], "so are their names")
        assert (view.consumers(), view.workers(), client.exists(keys.workers)) == (set(), {}, 0)


def test_live_workers_without_requests_are_left_alone(server: Server, queue: str, raw: redis.Redis) -> None:
    view = QueueView(raw, queue)
    with worker_thread(server.url, queue, lease_s=0.4) as one, worker_thread(server.url, queue, lease_s=0.4) as two:
        names = {one.config.name, two.config.name}
        eventually(lambda: view.consumers() == names, "both read")
        for _ in range(20):
            assert view.consumers() == names
            assert set(view.workers()) == names
            eventually(lambda: float(view.workers()[one.config.name]["uptime_s"]) > 0, "beating")
            assert view.workers()[one.config.name]["max_batch_size"] == "100"


@pytest.mark.parametrize("ends", ["answered", "lost"])
def test_listener_that_fails_costs_the_worker_nothing(server: Server, queue: str, raw: redis.Redis, ends: str) -> None:
    """In the publisher's thread, and in the keeper's."""
    told: list[str] = []

    def fail(_: ActiveRequest, became: str) -> None:
        told.append(became)
        raise RuntimeError("of the tracer")

    engine = FakeEngine(step_s=0.002)
    with worker_thread(server.url, queue, engine, on_end=fail, lease_s=0.5) as worker, Client(server.url, queue) as caller:
        if ends == "lost":
            handle = caller.submit("taken away", max_tokens=10_000)
            eventually(lambda: handle.status() == "running", "running")
            stream = Keys(queue).stream("realtime")
            (pending,) = raw.xpending_range(stream, GROUP, "-", "+", 1)
            raw.xclaim(stream, GROUP, "another", 0, [pending["message_id"]])
            eventually(lambda: "lost" in told, "told")
            handle.cancel()
        assert caller.submit_and_wait("hello", max_tokens=3, timeout=20).finish_reason == "length"
        eventually(lambda: "written" in told, "told")
        assert worker.state == "running"


def test_keys_and_memory_return_to_the_start(queue: str) -> None:
    with Server("valkey") as server, server.client() as client, Client(server.url, queue=queue) as caller:
        with worker_thread(server.url, queue, FakeEngine(), reply_ttl_s=1.0, state_ttl_s=1.0) as worker:
            eventually(lambda: worker.state == "running", "running")
            caller.submit_and_wait("first", max_tokens=3, timeout=20)
            eventually(lambda: client.dbsize() <= 4, "only streams and heartbeat")
            keys, memory = client.dbsize(), int(client.info("memory")["used_memory_dataset"])
            for _ in range(5):
                handles = caller.submit_many([{"prompt": f"p{i}", "max_tokens": 3} for i in range(400)])
                for handle in handles:
                    handle.result(timeout=60)
            eventually(lambda: client.dbsize() <= keys, "expired")
            assert int(client.info("memory")["used_memory_dataset"]) < memory + 1_000_000
        QueueView(client, queue).assert_clean()
