"""One client among threads, forks and interrupts; its connections; durable requests."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis

from producer import (
    Client,
    HeadraceError,
    InvalidRequest,
    RedisUnavailable,
)
from producer.options import BatchItem
from tests.proxy import Proxy
from tests.responder import Held, Responder, Taken, echo
from tests.servers import Server

T_S = 20.0  # far more than anything here takes


@pytest.fixture
def client(any_client: Client) -> Client:
    return any_client


def test_two_hundred_threads_each_get_their_own_answer(client: Client, respond: Callable[..., Responder]) -> None:
    held = Held()
    respond(held)
    with ThreadPoolExecutor(200) as pool:
        answers = [pool.submit(client.submit_and_wait, f"prompt {i}", timeout=60) for i in range(200)]
        taken = [held.next() for _ in range(200)]  # all of them block at the same time
        for item in reversed(taken):
            echo(item)
        assert [answer.result().text for answer in answers] == [f"prompt {i}" for i in range(200)]
    assert client.redis.xlen(client.keys.stream("realtime")) == 0


class Alarm(Exception):
    """Stands for whatever may interrupt a caller at any instant."""


def test_interrupted_caller_never_leaves_its_reply_to_another(client: Client, respond: Callable[..., Responder]) -> None:
    def interrupt(*_: object) -> None:
        raise Alarm

    def slowly(taken: Taken) -> None:
        time.sleep(0.001)
        echo(taken)

    respond(slowly)
    previous = signal.signal(signal.SIGALRM, interrupt)
    interrupted = 0
    try:
        for i in range(150):
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0002 + (i % 40) * 0.0002)
                result = client.submit_and_wait(f"prompt {i}", timeout=T_S)
                signal.setitimer(signal.ITIMER_REAL, 0)
                assert result.text == f"prompt {i}"
            except Alarm:
                interrupted += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert interrupted > 10
    assert [client.submit_and_wait(f"after {i}", timeout=T_S).text for i in range(10)] == [f"after {i}" for i in range(10)]


def test_connection_interrupted_between_send_and_read_is_closed(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    client.redis.set("other", "not yours")
    pool = client.redis.connection_pool
    connection = pool.get_connection()
    pool.release(connection)

    can_read = connection.can_read

    def interrupted(timeout: float = 0) -> bool:
        if timeout:  # the wait for the reply, not the pool's look at an idle connection
            raise KeyboardInterrupt
        return bool(can_read())

    monkeypatch.setattr(connection, "can_read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        client.get("x1").status()
    monkeypatch.undo()
    assert connection._sock is None
    assert client.get("x1").status() == "unknown"


FORKING = """
import os, sys, threading
from producer import Client
client = Client(sys.argv[1], sys.argv[2])
client.submit_and_wait("warm up", timeout=20)
blocked = client.submit("held")
waiting = threading.Thread(target=blocked.result, args=(20,))
waiting.start()
children = []
for i in range(4):
    pid = os.fork()
    if pid == 0:
        texts = [client.submit_and_wait(f"child {i} {j}", timeout=20).text for j in range(5)]
        os._exit(0 if texts == [f"child {i} {j}" for j in range(5)] and client.get(blocked.id).status() == "running" else 1)
    children.append(pid)
texts = [client.submit_and_wait(f"parent {j}", timeout=20).text for j in range(5)]
codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
client.submit_and_wait("release", timeout=20)
waiting.join()
assert texts == [f"parent {j}" for j in range(5)], texts
assert codes == [0] * 4, codes
assert blocked.result().text == "held"
"""


def test_client_serves_forked_children_and_their_parent(any_server: Server, queue: str, respond: Callable[..., Responder]) -> None:
    held: list[Taken] = []

    def script(taken: Taken) -> None:
        if taken.request.prompt == "held":
            held.append(taken)
            return
        if taken.request.prompt == "release":
            echo(held.pop())
        echo(taken)

    respond(script)
    subprocess.run([sys.executable, "-c", FORKING, any_server.url, queue], check=True, timeout=60)


def test_connections_go_back_to_the_pool(client: Client, respond: Callable[..., Responder]) -> None:
    respond()
    for _ in range(20):
        client.submit_and_wait("hi", timeout=T_S)
    assert len(client.redis.connection_pool._available_connections) == 1
    client.close()
    assert client.submit_and_wait("again", timeout=T_S).text == "again"


def test_repr_and_errors_hold_no_secret(queue: str) -> None:
    client = Client("redis://user:secret@127.0.0.1:1/0?password=secret", queue, patience_s=0.05)
    assert "secret" not in repr(client)
    assert queue in repr(client.get("x1"))
    with pytest.raises(HeadraceError) as raised:
        client.submit("hi")
    assert "secret" not in str(raised.value)


def test_durable_needs_an_append_only_file(server_kind: str, queue: str) -> None:
    with Server(server_kind) as server, Client(server.url, queue) as client:
        client.submit("hi", id="known")
        for name, status in (("x1", "cancelled"), ("known", "queued")):
            with pytest.raises(InvalidRequest, match="durable"):
                client.submit("hi", id=name, durable=True)
            assert client.get(name).status() == status


def test_durable_request_is_on_disk(server_kind: str, queue: str) -> None:
    if server_kind == "redis7":
        pytest.skip("WAITAOF came with Redis 7.2")
    with Server(server_kind, appendonly="yes", appendfsync="everysec") as server, Client(server.url, queue) as client:
        handle = client.submit("hi", durable=True)
        server.restart()
        assert handle.status() == "queued"


@pytest.fixture
def unsynced(server_kind: str) -> Iterator[Server]:
    """A server that syncs nothing to its disk until it is told to."""
    if server_kind == "redis7":
        pytest.skip("WAITAOF came with Redis 7.2")
    with Server(server_kind, appendonly="yes", appendfsync="no") as server:
        yield server


@pytest.mark.parametrize("how", ["reply lost", "put before"])
def test_known_request_is_durable_only_once_it_is_on_disk(unsynced: Server, queue: str, how: str) -> None:
    with Proxy(unsynced.port).running() as proxy, Client(proxy.url, queue, patience_s=1.0) as client:
        if how == "reply lost":
            client.submit("warm-up")  # the server knows the script
            proxy.cut_replies = 1
        else:
            client.submit("hi", id="x1")
            proxy.cut_all()  # what it was put by is another connection
        with pytest.raises(RedisUnavailable, match="on disk") as raised:
            client.submit("hi", id="x1", durable=True)
        assert proxy.cut_replies == 0
        assert raised.value.retryable
        client.redis.config_set("appendfsync", "always")
        assert client.submit("hi", id="x1", durable=True).status() == "queued"


def test_request_whose_reply_was_lost_is_taken_back_where_nobody_else_can_know_its_id(unsynced: Server, queue: str) -> None:
    with Proxy(unsynced.port).running() as proxy, Client(proxy.url, queue, patience_s=1.0) as client:
        client.submit("warm-up", id="before")
        proxy.cut_replies = 1
        with pytest.raises(RedisUnavailable, match="cancelled") as raised:
            client.submit_and_wait("hi", timeout=1.0, durable=True)
        assert proxy.cut_replies == 0
        assert not raised.value.retryable
        states = [client.redis.hget(key, "status") for key in client.redis.keys(client.keys.state("*"))]
        assert sorted(states) == [b"cancelled", b"queued"]


def test_only_what_is_new_and_to_be_durable_is_cancelled_where_it_is_not(unsynced: Server, queue: str) -> None:
    with Client(unsynced.url, queue, patience_s=0.5, max_queue_depth=3) as client:
        client.submit("hi", id="known")
        items: list[BatchItem] = [{"prompt": "hi", "id": name, "durable": name != "beside"} for name in ("known", "new", "beside", "late")]
        with pytest.raises(RedisUnavailable, match="cancelled: put it again under another id") as raised:
            client.submit_many(items)
        assert not raised.value.retryable
        assert [client.get(str(item["id"])).status() for item in items] == ["queued", "cancelled", "queued", "unknown"]
        assert not client.redis.exists(client.keys.state("late")), "there was no room for it, and may be later"


def test_redis_replies_are_bytes_whatever_the_url_says(any_server: Server, queue: str, respond: Callable[..., Responder]) -> None:
    respond()
    with Client(f"{any_server.url}?decode_responses=true&socket_timeout=1", queue) as client:
        assert client.submit_and_wait("hi", timeout=T_S).text == "hi"
        assert isinstance(client.redis, redis.Redis)
