"""A worker whose Redis is in trouble waits it out, loses nothing, and says so once."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import redis
import structlog

from producer import Cancelled, Client, Result
from producer.keys import GROUP
from tests.fakes import FakeEngine, expected_tokens
from tests.integration.test_redis_rights import started
from tests.proxy import Proxy
from tests.servers import Server, free_port
from tests.workers import QueueView, eventually, worker_thread

Log = list[MutableMapping[str, Any]]


class Scene:
    """A server of its own, a worker on it, and callers that wait for it."""

    def __init__(self, server: Server, queue: str, folder: Path) -> None:
        self.server = server
        self.queue = queue
        self.trace = folder / "trace"
        self.stack = ExitStack()
        self.log: Log = self.stack.enter_context(structlog.testing.capture_logs())
        self.admin = self.stack.enter_context(server.client())
        self.view = QueueView(self.admin, queue)
        self.proxy = self.stack.enter_context(Proxy(server.port).running())  # between the worker and the server
        self.pool = self.stack.enter_context(ThreadPoolExecutor(64))
        self.calls: dict[str, Future[Result]] = {}

    def run_worker(self, **config: Any) -> None:
        engine = FakeEngine(step_s=0.01, trace=self.trace)
        worker = worker_thread(self.proxy.url, self.queue, engine, socket_timeout_s=1.0, **{"lease_s": 5.0} | config)
        self.worker = self.stack.enter_context(worker)

    def call(self, count: int = 16, max_tokens: int = 100) -> None:
        """Callers that block, until some tokens of each are published."""
        client = self.stack.enter_context(Client(self.server.url, queue=self.queue))
        for i in range(count):
            self.calls[f"p{i}"] = self.pool.submit(client.submit_and_wait, f"p{i}", max_tokens=max_tokens, timeout=60)
        eventually(lambda: self.worker.loop.num_tokens > 5 * count, "all under way")

    def assert_answered(self, max_tokens: int = 100) -> list[Result]:
        results = [call.result(60) for call in self.calls.values()]
        assert [result.token_ids for result in results] == [expected_tokens(prompt, max_tokens) for prompt in self.calls]
        eventually(lambda: self.view.length() == 0, "the streams are empty")
        self.view.assert_clean()
        return results

    def assert_told_once(self) -> None:
        """One line when the trouble began and one, with its length, when it was over."""
        told = eventually(lambda: [line for line in self.log if "trouble" in line["event"]][1::2], "told that it is over")
        assert [line["event"] for line in told] == ["redis trouble over"]
        assert told[0]["seconds"] > 0

    def generated_twice(self) -> int:
        return sum(count - 1 for count in Counter(self.trace.read_text().splitlines()).values())


@pytest.fixture
def make(queue: str, tmp_path: Path) -> Iterator[Callable[..., Scene]]:
    with ExitStack() as stack:

        def make(kind: str = "valkey", **config: str) -> Scene:
            scene = Scene(stack.enter_context(Server(kind, **config)), queue, tmp_path)
            stack.push(scene.stack)
            return scene

        yield make


@pytest.mark.parametrize("fsync", ["always", "everysec"])
def test_killed_server_that_comes_back_with_its_data(make: Callable[..., Scene], server_kind: str, fsync: str) -> None:
    scene = make(server_kind, appendonly="yes", appendfsync=fsync)
    scene.run_worker()
    scene.call(64)
    scene.server.kill()
    time.sleep(0.3)
    scene.server.start()
    scene.assert_answered()
    scene.assert_told_once()
    assert scene.generated_twice() == 0


@pytest.mark.parametrize("loss", ["FLUSHALL", "DEL", "XGROUP DESTROY"])
def test_data_lost_under_the_worker(make: Callable[..., Scene], server_kind: str, loss: str) -> None:
    scene = make(server_kind)
    scene.run_worker(checkpoint_s=0.1)
    scene.call()
    stream = scene.view.keys.stream("realtime")
    if loss == "FLUSHALL":
        scene.admin.flushall()
    elif loss == "DEL":
        scene.admin.delete(stream)
    else:
        scene.admin.xgroup_destroy(stream, GROUP)
    scene.assert_answered()
    if loss != "XGROUP DESTROY":  # then the entries are delivered again, and continue from their checkpoints
        assert scene.generated_twice() == 0


@contextmanager
def read_only(scene: Scene) -> Iterator[None]:
    scene.admin.replicaof("127.0.0.1", free_port())
    yield
    scene.admin.replicaof("NO", "ONE")


@contextmanager
def setting(scene: Scene, name: str, value: str) -> Iterator[None]:
    before = scene.admin.config_get(name)[name]
    scene.admin.config_set(name, value)
    yield
    scene.admin.config_set(name, before)


@contextmanager
def password(scene: Scene) -> Iterator[None]:
    with setting(scene, "requirepass", "secret"):
        scene.proxy.cut_all()
        yield


@contextmanager
def no_connections(scene: Scene) -> Iterator[None]:
    with setting(scene, "maxclients", "1"):
        scene.proxy.cut_all()
        yield


@contextmanager
def frozen(scene: Scene) -> Iterator[None]:
    scene.server.pause()
    yield
    scene.server.resume()


TROUBLES: dict[str, Callable[[Scene], Any]] = {
    "READONLY": read_only,
    "OOM": lambda scene: setting(scene, "maxmemory", "1"),
    "NOREPLICAS": lambda scene: setting(scene, "min-replicas-to-write", "1"),
    "NOAUTH": password,
    "maxclients": no_connections,
    "frozen": frozen,
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_server_that_refuses_for_a_while(make: Callable[..., Scene], server_kind: str, trouble: str) -> None:
    scene = make(server_kind)
    scene.run_worker(checkpoint_s=0.05)
    scene.call(8)
    with TROUBLES[trouble](scene):
        eventually(lambda: any("trouble" in line["event"] for line in scene.log), "noticed")
        time.sleep(0.3)
    scene.assert_answered()
    scene.assert_told_once()
    assert scene.generated_twice() == 0


def test_what_is_refused_holds_up_no_other_reply_and_no_drain(make: Callable[..., Scene], server_kind: str) -> None:
    scene = make(server_kind)
    scene.run_worker(drain_s=0.0)
    with Client(scene.server.url, queue=scene.queue) as client:
        streaming = client.submit("streamed", max_tokens=100_000 - 8, stream=True)
        calls = [client.submit(f"p{i}", max_tokens=300) for i in range(100)]
        eventually(lambda: len(scene.worker.registry) == 101, "all under way")
        scene.admin.config_set("maxmemory", "1")  # frames are refused, final replies are not
        assert [call.result(30).token_ids for call in calls] == [expected_tokens(f"p{i}", 300) for i in range(100)]
        scene.worker.request_stop()
        eventually(lambda: streaming.status() == "queued", "handed back")


def test_reply_that_redis_never_takes_holds_up_no_other(make: Callable[..., Scene]) -> None:
    scene = make()
    scene.run_worker(drain_s=0.0)
    replies = [scene.view.keys.reply(f"stuck{i}") for i in range(70)]
    for i, reply in enumerate(replies):
        scene.admin.xadd(reply, {"type": "tokens", "tokens": 0}, id=f"{2**64 - 1}-{2**64 - 1}")  # nothing can follow this id
        scene.admin.xadd(scene.view.keys.stream("realtime"), {"id": f"stuck{i}", "json": '{"prompt":"s","max_tokens":2}'})
    eventually(lambda: any(line["event"] == "redis trouble" for line in scene.log), "refused")
    with Client(scene.server.url, queue=scene.queue) as client:
        for i in range(3):
            assert client.submit_and_wait(f"p{i}", max_tokens=5, timeout=20).token_ids == expected_tokens(f"p{i}", 5)
        chunks = list(client.submit("streamed", max_tokens=100, stream=True).stream(timeout=20))
    assert [token for chunk in chunks for token in chunk.token_ids] == expected_tokens("streamed", 100)
    assert len(chunks) > 10
    scene.admin.delete(*replies)
    eventually(lambda: all(scene.view.finals(f"stuck{i}") == 1 for i in range(70)), "taken in the end")
    scene.assert_told_once()


def test_replica_is_not_taken_for_a_server_that_refuses_large_replies(
    make: Callable[..., Scene], server_kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.reply_writer.LEAST_BULK_BYTES", 100)
    monkeypatch.setattr("worker.reply_writer.LARGE_TRIES", 2)
    scene = make(server_kind)
    scene.run_worker()
    scene.call(4)
    with read_only(scene):
        eventually(lambda: scene.worker.loop.stats.running_realtime == 0, "all are due to be answered")
        refused = scene.server.num_refusals("READONLY")
        eventually(lambda: scene.server.num_refusals("READONLY") > refused + 40, "the worker tries")
    scene.assert_answered()


def test_no_hot_loop_while_the_server_refuses(make: Callable[..., Scene]) -> None:
    scene = make()
    scene.run_worker(checkpoint_s=0.05)
    scene.call(8)
    with read_only(scene):
        eventually(lambda: any("trouble" in line["event"] for line in scene.log), "noticed")
        time.sleep(0.5)  # the pauses have grown
        before = scene.admin.info("commandstats")
        time.sleep(1.0)
        after = scene.admin.info("commandstats")
    calls = {name: after[name]["calls"] - before.get(name, {"calls": 0})["calls"] for name in after}
    ours = {name: count for name, count in calls.items() if name.removeprefix("cmdstat_") in ("xreadgroup", "evalsha", "xread")}
    assert sum(ours.values()) < 40, ours
    scene.assert_answered()


def test_group_is_made_anew_when_an_idle_worker_finds_it_gone(make: Callable[..., Scene]) -> None:
    scene = make()
    scene.run_worker()
    scene.call(1, max_tokens=10)
    scene.assert_answered(10)
    scene.admin.flushall()
    scene.call(4)
    scene.assert_answered()


def test_worker_that_starts_before_its_server(queue: str) -> None:
    server = Server("valkey", port=free_port())
    with ThreadPoolExecutor(1) as pool, worker_thread(server.url, queue), server, Client(server.url, queue=queue) as client:
        answer = pool.submit(client.submit_and_wait, "hello", max_tokens=5, timeout=60)
        assert answer.result(60).token_ids == expected_tokens("hello", 5)


def test_lost_replies_of_the_server_are_asked_for_again(make: Callable[..., Scene]) -> None:
    scene = make()
    scene.run_worker(checkpoint_s=0.02)
    scene.call(16, max_tokens=300)
    for _ in range(40):
        scene.proxy.cut_replies = 1
        time.sleep(0.03)
    results = scene.assert_answered(300)
    assert {result.attempt for result in results} == {1}
    assert scene.generated_twice() == 0


def test_connections_cut_at_random(make: Callable[..., Scene]) -> None:
    scene, chance = make(), random.Random(7)
    scene.run_worker(checkpoint_s=0.02)
    scene.call(32, max_tokens=200)
    for _ in range(30):
        time.sleep(chance.uniform(0.0, 0.1))
        scene.proxy.cut_all()
    results = scene.assert_answered(200)
    assert {result.attempt for result in results} == {1}
    assert scene.generated_twice() == 0


def test_connections_that_fall_silent(make: Callable[..., Scene]) -> None:
    scene = make()
    scene.run_worker(checkpoint_s=0.05)
    scene.call(8, max_tokens=150)
    scene.proxy.silent = True
    time.sleep(0.5)
    scene.proxy.silent = False  # for new connections
    scene.assert_answered(150)
    scene.assert_told_once()


def test_entry_whose_delivery_was_lost_on_its_way_does_not_wait_for_a_lease(make: Callable[..., Scene]) -> None:
    scene = make()
    scene.run_worker(lease_s=3600.0)
    eventually(lambda: scene.worker.state == "running", "running")
    with Client(scene.server.url, queue=scene.queue) as client:
        for i in range(10):
            scene.proxy.cut_replies = 1
            result = client.submit_and_wait(f"p{i}", max_tokens=3, timeout=20)
            assert (result.token_ids, result.attempt) == (expected_tokens(f"p{i}", 3), 1)
    scene.proxy.cut_replies = 0


def test_order_to_end_what_was_lost_does_not_end_its_next_delivery_to_the_same_worker(server: Server, queue: str) -> None:
    with worker_thread(server.url, queue, FakeEngine(step_s=0.01), lease_s=0.3) as worker, Client(server.url, queue=queue) as client:
        handle = client.submit("hello", max_tokens=200)
        lost = eventually(lambda: worker.registry.get(handle.id), "taken")
        eventually(lambda: lost.outputs is not None, "it runs")
        worker._publisher.lose(lost)
        again = eventually(lambda: worker.registry.get(handle.id), "taken again, its lease being over")
        eventually(lambda: again.outputs is not None, "it runs")
        worker._publisher.end(lost, Cancelled("too late"))
        assert handle.result(timeout=30).token_ids == expected_tokens("hello", 200)


def test_drain_while_redis_is_away_ends_and_its_requests_are_taken_over(make: Callable[..., Scene]) -> None:
    scene = make(appendonly="yes", appendfsync="always")
    scene.run_worker(drain_s=0.1, lease_s=1.0, checkpoint_s=0.05)
    scene.call(8, max_tokens=300)
    scene.server.kill()
    scene.worker.request_stop()
    eventually(lambda: any(line["event"] == "worker ended" for line in scene.log), "ended")
    scene.server.start()
    with worker_thread(scene.server.url, scene.queue, lease_s=1.0):
        results = scene.assert_answered(300)
    assert {result.attempt for result in results} == {2}


def test_evicting_server_is_complained_about(make: Callable[..., Scene]) -> None:
    scene = make(maxmemory_policy="allkeys-lru")
    scene.run_worker()
    (line,) = eventually(lambda: [line for line in scene.log if line.get("maxmemory_policy")], "complained")
    assert (line["log_level"], line["maxmemory_policy"]) == ("error", "allkeys-lru")


def test_worker_does_all_it_can_with_exactly_its_rights(server_kind: str, queue: str, tmp_path: Path) -> None:
    with started(server_kind, tmp_path) as guarded, Client(guarded.url("producer"), queue=queue) as client:
        with suppress(redis.RedisError), worker_thread(guarded.url("worker"), queue, FakeEngine(step_s=0.01), lease_s=0.5) as worker:
            assert client.submit_and_wait("hello", max_tokens=100, timeout=20).token_ids == expected_tokens("hello", 100)
            endless = client.submit("hello", max_tokens=10_000)
            eventually(lambda: endless.status() == "running", "running")
            endless.cancel()
            client.submit("handed back", max_tokens=10_000)
            eventually(lambda: len(worker.registry) == 1, "running")
            worker.request_stop()
            worker.request_stop()
        assert guarded.refusals() == []


@pytest.mark.parametrize("how", ["master killed", "failover asked for"])
def test_failover_to_a_replica(queue: str, how: str) -> None:
    with Server() as master, Server(replicaof=f"127.0.0.1 {master.port}") as replica:
        monitor = {"monitor": f"main 127.0.0.1 {master.port} 1"}
        monitor |= {"down-after-milliseconds": "main 500", "failover-timeout": "main 2000"}
        with replica.client() as looking:
            eventually(lambda: looking.info("replication")["master_link_status"] == "up", "the replica follows")
        with Server(sentinel=True, **monitor) as sentinel, sentinel.client() as watching, ThreadPoolExecutor(8) as pool:
            eventually(lambda: watching.execute_command("SENTINEL", "REPLICAS", "main"), "the sentinel knows the replica")
            url = f"redis+sentinel://127.0.0.1:{sentinel.port}/main/0"
            with worker_thread(url, queue, FakeEngine(step_s=0.01), checkpoint_s=0.05) as worker, Client(url, queue) as client:
                calls = [pool.submit(client.submit_and_wait, f"p{i}", max_tokens=200, timeout=60) for i in range(8)]
                eventually(lambda: worker.loop.num_tokens > 100, "all under way")
                if how == "master killed":
                    master.kill()
                else:
                    watching.execute_command("SENTINEL", "FAILOVER", "main")
                assert [call.result(60).token_ids for call in calls] == [expected_tokens(f"p{i}", 200) for i in range(8)]
