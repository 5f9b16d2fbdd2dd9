"""What callers get when Redis is in trouble: their answer when it is over, or a typed error within their timeout."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

import producer
from producer import Client, RedisUnavailable, WaitTimeout
from tests.proxy import Proxy
from tests.responder import Responder
from tests.servers import Server, free_port

T_S = 30.0
PAGE = (Path(producer.__file__).parent / "PROTOCOL.md").read_text(encoding="utf-8")


def until(condition: Callable[[], object], timeout_s: float = T_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


@contextmanager
def in_thread(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[Future[Any]]:
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(call, *args, **kwargs)


def blocked_clients(server: Server) -> int:
    with server.client() as client:
        return int(client.info("clients")["blocked_clients"])


def test_blocked_callers_survive_a_killed_server(server_kind: str, queue: str) -> None:
    with (
        Server(server_kind, appendonly="yes", appendfsync="always") as server,
        Client(server.url, queue) as client,
        ThreadPoolExecutor(32) as pool,
    ):
        answers = [pool.submit(client.submit_and_wait, f"prompt {i}", timeout=60) for i in range(32)]
        until(lambda: blocked_clients(server) == 32)
        server.restart()
        with Responder(server.url, queue).running():
            assert [answer.result().text for answer in answers] == [f"prompt {i}" for i in range(32)]


def test_blocked_callers_survive_a_server_that_lost_everything(server_kind: str, queue: str) -> None:
    with Server(server_kind) as server, Client(server.url, queue) as client, ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(client.submit_and_wait, f"prompt {i}", timeout=60) for i in range(8)]
        until(lambda: blocked_clients(server) == 8)
        server.restart()
        with Responder(server.url, queue).running():
            assert [answer.result().text for answer in answers] == [f"prompt {i}" for i in range(8)]


def test_reader_of_a_request_that_redis_lost_asks_for_every_step_again(server_kind: str, queue: str) -> None:
    with Server(server_kind) as server, Client(server.url, queue) as client:
        handle = client.submit("hi")
        with in_thread(lambda: [chunk.text for chunk in handle.stream(timeout=T_S)]) as texts:
            for _ in range(2):
                until(lambda: client.redis.hget(client.keys.state(handle.id), "stream") == b"1")
                client.redis.flushall()
            with Responder(server.url, queue).running():
                assert texts.result() == ["hi"]


def test_stream_goes_on_after_its_connection_was_cut(server: Server, queue: str) -> None:
    with Proxy(server.port).running() as proxy, Client(proxy.url, queue) as client:
        handle = client.submit("hi", stream=True)
        responder = Responder(server.url, queue)
        with server.client() as raw:
            [taken] = responder.take(raw)
            taken.tokens("a")
            chunks = handle.stream(timeout=T_S)
            texts = [next(chunks).text]
            for text in "bcd":
                with in_thread(next, chunks) as chunk:
                    proxy.cut_all()
                    taken.tokens(text)
                    texts.append(chunk.result().text)
            taken.final("abcd")
        assert texts + [chunk.text for chunk in chunks] == ["a", "b", "c", "d"]


def test_lost_reply_to_an_enqueue_neither_runs_nor_answers_twice(server: Server, queue: str) -> None:
    with Proxy(server.port).running() as proxy, Client(proxy.url, queue) as client, Responder(server.url, queue).running() as responder:
        client.get("warm-up").status()
        for i in range(5):
            proxy.cut_replies = 1
            assert client.submit_and_wait(f"prompt {i}", timeout=T_S).text == f"prompt {i}"
        assert proxy.cut_replies == 0
        assert [request.prompt for request in responder.seen] == [f"prompt {i}" for i in range(5)]


def test_request_with_a_given_id_counts_as_known_if_the_first_reply_was_lost(server: Server, queue: str) -> None:
    with Proxy(server.port).running() as proxy, Client(proxy.url, queue) as client:
        client.get("warm-up").status()
        for options, is_new in (({}, True), ({"id": "x1"}, False)):
            proxy.cut_replies = 1
            assert client.submit("hi", **options).is_new == is_new
        assert client.submit("hi", id="x2").is_new


def test_submit_waits_for_a_server_that_is_starting(queue: str) -> None:
    server = Server(port=free_port())
    with Client(server.url, queue, patience_s=T_S) as client, in_thread(client.submit, "hi") as handle, server:
        assert handle.result().status() == "queued"


def test_no_server_at_all_is_an_error_within_the_timeout(queue: str) -> None:
    with Client(f"redis://127.0.0.1:{free_port()}", queue, patience_s=0.3) as client:
        for call in (
            lambda: client.submit("hi"),
            lambda: client.submit_and_wait("hi", timeout=0.3),
            lambda: client.get("x").status(),
            lambda: client.get("x").result(timeout=0.3),
        ):
            started = time.monotonic()
            with pytest.raises(RedisUnavailable) as raised:
                call()
            assert raised.value.retryable
            assert time.monotonic() - started < 5


def test_stalled_server_is_an_error_soon_after_the_timeout(queue: str) -> None:
    with Server() as server, Client(server.url, queue) as client:
        handle = client.submit("hi")
        server.pause()
        started = time.monotonic()
        with pytest.raises(RedisUnavailable):
            handle.result(timeout=0.5)
        assert time.monotonic() - started < 5  # far less than any socket timeout
        server.resume()
        assert handle.status() == "queued"


def call_frozen(client: Client) -> None:
    """Each of these has half a second, an abandon one."""
    for call in (
        lambda: client.submit_and_wait("hi", timeout=0.5),
        lambda: client.submit("hi"),
        lambda: client.get("x").result(timeout=0.5),
        lambda: client.abandon("x"),
    ):
        started = time.monotonic()
        with pytest.raises(RedisUnavailable):
            call()
        assert time.monotonic() - started < 4  # far less than any socket timeout


@pytest.mark.parametrize("scheme", ["redis", "rediss", "unix"])
def test_timeout_bounds_connecting_to_a_server_that_answers_nothing(queue: str, scheme: str) -> None:
    with Server() as server:
        url = server.unix_url if scheme == "unix" else f"{scheme}://127.0.0.1:{server.port}"
        with Client(url, queue, patience_s=0.5) as client:
            server.pause()
            call_frozen(client)


def test_timeout_bounds_a_call_on_connections_that_were_idle_for_long(queue: str) -> None:
    with Server() as server, Client(server.url, queue, patience_s=0.5) as client:
        client.submit("hi")
        for connection in client.redis.connection_pool._available_connections:
            connection.next_health_check = 0.0  # as after a minute
        server.pause()
        call_frozen(client)


def test_timeout_bounds_asking_a_sentinel_that_answers_nothing(queue: str) -> None:
    with Server() as master, Server(sentinel=True, monitor=f"main 127.0.0.1 {master.port} 1") as sentinel:
        url = f"redis+sentinel://127.0.0.1:{sentinel.port}/main/0"
        with Client(url, queue, patience_s=0.5) as client:
            client.submit("hi")
            client.redis.connection_pool.disconnect()  # the one to the sentinel stays, and is asked again
            sentinel.pause()
            call_frozen(client)
        with Client(url, queue, patience_s=0.5) as client:
            call_frozen(client)


def test_wait_longer_than_the_socket_timeout_returns(server: Server, queue: str) -> None:
    with Client(f"{server.url}?socket_timeout=0.5", queue) as client, in_thread(client.submit_and_wait, "hi", timeout=T_S) as answer:
        with pytest.raises(TimeoutError):
            answer.result(timeout=1.5)
        with Responder(server.url, queue).running():
            assert answer.result().text == "hi"


@pytest.mark.parametrize(
    "url", ["redis://:wrong@127.0.0.1:{port}/0", "redis://nobody:right@127.0.0.1:{port}/0", "redis://127.0.0.1:{port}/0"]
)
def test_wrong_password_is_an_error_at_once(server_kind: str, queue: str, url: str) -> None:
    with Server(server_kind, requirepass="right") as server:
        with (
            Client(url.format(port=server.port), queue, patience_s=3600) as client,
            pytest.raises(RedisUnavailable, match="refuses") as raised,
        ):
            client.submit_and_wait("hi")
        assert "right" not in str(raised.value)
        with Client(f"redis://:right@127.0.0.1:{server.port}/0", queue) as client:
            client.submit("hi")


@pytest.mark.parametrize("missing", ["-evalsha", "-xadd"])
def test_missing_permission_is_an_error_at_once(server_kind: str, queue: str, missing: str) -> None:
    reason = f"{missing[1:]}|can't run this command"  # Redis 7.0 does not name the one that a script may not run
    with Server(server_kind) as server, server.client() as admin:
        admin.execute_command("ACL", "SETUSER", "limited", "on", ">pw", "~*", "+@all", missing)
        url = f"redis://limited:pw@127.0.0.1:{server.port}/0"
        with Client(url, queue, patience_s=3600) as client, pytest.raises(RedisUnavailable, match=reason):
            client.submit_and_wait("hi")


def test_caller_needs_few_permissions(server_kind: str, queue: str) -> None:
    """As the protocol's page lists them; an operator's orders are not among them."""
    [command] = [line for line in PAGE.splitlines() if line.startswith("ACL SETUSER")]
    with Server(server_kind) as server, server.client() as admin:
        admin.execute_command(*command.replace("{default}", f"{{{queue}}}").split())
        with Client(f"redis://caller:secret@127.0.0.1:{server.port}/0", queue) as client, Responder(server.url, queue).running():
            assert client.submit_and_wait("hi", timeout=T_S).text == "hi"
            handle = client.submit("there", deadline_s=50)
            assert "".join(chunk.text for chunk in handle.stream(timeout=T_S)) == "there"
            assert (handle.status(), handle.cancel()) == ("done", "finished")
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.redis.xadd(client.keys.admin, {"op": "reload"})


def test_full_memory_is_waited_out(server_kind: str, queue: str) -> None:
    with Server(server_kind, maxmemory="1") as server, server.client() as admin:
        with Client(server.url, queue, patience_s=0.2) as client, pytest.raises(RedisUnavailable, match="memory"):
            client.submit("hi")
        with Client(server.url, queue, patience_s=T_S) as client, in_thread(client.submit, "hi") as handle:
            admin.config_set("maxmemory", 0)
            assert handle.result().status() == "queued"


@pytest.mark.parametrize("obstacle", [("maxmemory", 1), ("min-replicas-to-write", 1)], ids=lambda obstacle: obstacle[0])
def test_known_id_is_told_where_nothing_can_be_written(server_kind: str, queue: str, obstacle: tuple[str, int]) -> None:
    with Server(server_kind) as server, server.client() as admin, Client(server.url, queue, patience_s=0.2) as client:
        client.submit("hi", id="known")
        admin.config_set(*obstacle)
        with pytest.raises(RedisUnavailable):
            client.submit("hi", id="new")
        assert client.submit("hi", id="known").status() == "queued"


def test_cancelling_works_when_memory_is_full(server_kind: str, queue: str) -> None:
    with Server(server_kind) as server, server.client() as admin, Client(server.url, queue) as client:
        handle = client.submit("hi")
        admin.config_set("maxmemory", 1)
        assert handle.cancel() == "cancelled"


def test_replica_is_waited_out_until_it_is_master(server_kind: str, queue: str) -> None:
    with Server(server_kind) as server, server.client() as admin, Client(server.url, queue, patience_s=T_S) as client:
        admin.execute_command("REPLICAOF", "127.0.0.1", free_port())
        with in_thread(client.submit, "hi") as handle:
            until(lambda: int(admin.info("errorstats").get("errorstat_READONLY", {"count": 0})["count"]) > 0)
            admin.execute_command("REPLICAOF", "NO", "ONE")
            assert handle.result().status() == "queued"


def test_too_many_connections_are_waited_out(queue: str) -> None:
    with Server(maxclients="4") as server, Client(server.url, queue, patience_s=T_S) as client:
        others = [server.client() for _ in range(4)]
        for other in others:
            other.ping()
        with in_thread(client.submit, "hi") as handle:
            until(lambda: int(others[0].info("stats")["rejected_connections"]) > 0)
            for other in others:
                other.close()
            assert handle.result().status() == "queued"


def test_sentinel_failover_is_waited_out(queue: str) -> None:
    with Server() as master, Server(replicaof=f"127.0.0.1 {master.port}") as replica:
        monitor: dict[str, Any] = {"monitor": f"main 127.0.0.1 {master.port} 1"}
        monitor |= {"down-after-milliseconds": "main 500", "failover-timeout": "main 2000"}
        with replica.client() as looking:
            until(lambda: looking.info("replication")["master_link_status"] == "up")
        with Server(sentinel=True, **monitor) as sentinel, sentinel.client() as watching:
            until(lambda: watching.execute_command("SENTINEL", "REPLICAS", "main"))
            url = f"redis+sentinel://127.0.0.1:{sentinel.port}/main/0"
            with Client(url, queue) as client, in_thread(client.submit_and_wait, "hi", timeout=60) as answer:
                until(lambda: blocked_clients(master) == 1)
                master.kill()
                with Responder(replica.url, queue).running():
                    assert answer.result().text == "hi"


def test_healthy_server_with_no_worker_is_a_wait_timeout(server: Server, queue: str) -> None:
    with Client(server.url, queue) as client, pytest.raises(WaitTimeout):
        client.submit_and_wait("hi", timeout=0.1)


def test_key_of_another_type_is_an_error_at_once(server: Server, queue: str) -> None:
    with Client(server.url, queue, patience_s=3600) as client:
        client.redis.set(client.keys.stream("realtime"), "in the way")
        with pytest.raises(RedisUnavailable, match="WRONGTYPE"):
            client.submit("hi")
        assert isinstance(client.redis, redis.Redis)
