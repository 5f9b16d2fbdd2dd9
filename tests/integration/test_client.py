"""The blocking client against a real server and a scripted answerer."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import redis

from producer import (
    BatchFailed,
    Cancelled,
    Client,
    HeadraceError,
    InvalidRequest,
    QueueFull,
    ReplyExpired,
    SamplingParams,
    UnknownRequest,
    WaitTimeout,
    calls,
)
from producer.keys import Keys
from tests.responder import Responder, Taken, echo
from tests.servers import Server

T_S = 20.0  # far more than anything here takes


@pytest.fixture
def client(any_server: Server, queue: str) -> Iterator[Client]:
    with Client(any_server.url, queue=queue) as client:
        yield client


@pytest.fixture
def keys(queue: str) -> Keys:
    return Keys(queue)


@pytest.fixture
def respond(any_server: Server, queue: str) -> Iterator[Callable[..., Responder]]:
    """Starts an answerer that runs a script on each request."""
    with ExitStack() as stack:
        yield lambda script=echo: stack.enter_context(Responder(any_server.url, queue, script).running())


def entries(client: Client, key: str) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """All of a stream."""
    found: Any = client.redis.xrange(key)
    return list(found)


class Held:
    """A script that holds each request until the test says how to go on."""

    def __init__(self) -> None:
        self.taken: list[Taken] = []
        self.arrived = threading.Semaphore(0)

    def __call__(self, taken: Taken) -> None:
        self.taken.append(taken)
        self.arrived.release()

    def next(self) -> Taken:
        assert self.arrived.acquire(timeout=T_S)
        return self.taken.pop(0)


def test_submit_and_wait_returns_the_result(client: Client, respond: Callable[..., Responder]) -> None:
    responder = respond()
    result = client.submit_and_wait("hello", max_tokens=8, user="u", timeout=T_S)
    assert (result.text, result.finish_reason, result.attempt, result.worker) == ("hello", "stop", 1, "responder")
    assert responder.seen[0].id == result.id
    assert (responder.seen[0].params, responder.seen[0].user) == (SamplingParams(max_tokens=8), "u")


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
def test_reply_comes_in_the_encoding_of_the_request(
    any_server: Server, queue: str, keys: Keys, encoding: str, respond: Callable[..., Responder]
) -> None:
    respond()
    with Client(any_server.url, queue=queue, encoding=encoding) as client:  # type: ignore[arg-type]  # a literal by parametrisation
        result = client.submit_and_wait("hi", timeout=T_S)
        [[_, fields]] = entries(client, keys.reply(result.id))
    assert set(fields) == {b"type", b"attempt", encoding.encode()}


def test_bare_xadd_is_answered_like_any_other(client: Client, keys: Keys, respond: Callable[..., Responder]) -> None:
    client.redis.execute_command("XADD", keys.stream("realtime"), "*", "id", "x1", "json", '{"prompt":"Hi","max_tokens":8}')
    respond()
    [[_, [[_, fields]]]] = client.redis.execute_command("XREAD", "BLOCK", 10_000, "STREAMS", keys.reply("x1"), "0-0")
    assert json.loads(fields[b"json"])["text"] == "Hi"
    assert client.get("x1").result(timeout=T_S).text == "Hi"


def test_stream_yields_each_chunk_when_it_is_there(client: Client, respond: Callable[..., Responder]) -> None:
    held = Held()
    respond(held)
    handle = client.submit("hi", stream=True)
    taken = held.next()
    chunks = handle.stream(timeout=T_S)
    for text in ("Par", "is", "."):
        taken.tokens(text)
        assert next(chunks).text == text
    taken.final("Paris.")
    assert list(chunks) == []


def test_stream_of_a_request_submitted_without_asks_the_worker_to_publish(
    client: Client, keys: Keys, respond: Callable[..., Responder]
) -> None:
    held = Held()
    respond(held)
    handle = client.submit("hi")
    taken = held.next()
    taken.tokens("a", "b")
    chunks = handle.stream(timeout=T_S)
    assert next(chunks).text == "a"
    assert client.redis.hget(keys.state(handle.id), "stream") == b"1"
    assert [fields for _, fields in entries(client, keys.control)] == [{b"op": b"stream", b"id": handle.id.encode()}]
    taken.final("abc", [0, 1, 2])
    assert "".join(chunk.text for chunk in chunks) == "bc"
    assert client.redis.hget(keys.state(handle.id), "status") == b"done"
    assert len(list(client.get(handle.id).stream(timeout=T_S))) == 3
    assert client.redis.xlen(keys.control) == 1


def test_stream_raises_the_error_behind_the_chunks(client: Client, respond: Callable[..., Responder]) -> None:
    def fail(taken: Taken) -> None:
        taken.tokens("a")
        taken.error(BatchFailed("the step failed", partial_text="a", partial_token_ids=[0]))

    respond(fail)
    chunks = client.submit("hi", stream=True).stream(timeout=T_S)
    assert next(chunks).text == "a"
    with pytest.raises(BatchFailed) as raised:
        next(chunks)
    assert (raised.value.partial_text, raised.value.retryable) == ("a", True)


def test_result_can_be_asked_for_again_and_streamed_afterwards(client: Client, respond: Callable[..., Responder]) -> None:
    respond()
    handle = client.submit("hello")
    first = handle.result(timeout=T_S)
    client.redis.delete(client.keys.reply(handle.id))
    assert handle.result() == first
    assert [chunk.text for chunk in handle.stream()] == ["hello"]


def test_another_process_can_attach(client: Client, any_server: Server, queue: str, respond: Callable[..., Responder]) -> None:
    respond()
    handle = client.submit("hello")
    code = f"from producer import Client; print(Client({any_server.url!r}, {queue!r}).get({handle.id!r}).result(timeout=20).text)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout == "hello\n"


def test_many_are_submitted_at_once_and_answered_each(client: Client, respond: Callable[..., Responder]) -> None:
    respond()
    items = [f"p{i}" if i % 2 else {"prompt": f"p{i}", "tier": "batch", "max_tokens": 4} for i in range(calls.PIPELINE + 44)]
    handles = client.submit_many(items)  # type: ignore[arg-type]  # mypy joins the two kinds of item to object
    assert [handle.result(timeout=T_S).text for handle in handles] == [f"p{i}" for i in range(len(items))]


def test_nothing_is_sent_where_one_of_many_is_invalid(client: Client, keys: Keys) -> None:
    with pytest.raises(InvalidRequest, match=r"\[1\]\.top_p"):
        client.submit_many(["a", {"prompt": "b", "top_p": 3.0}])
    assert client.redis.keys(f"{keys.prefix}*") == []


def test_score_and_embed_say_what_they_want(client: Client, respond: Callable[..., Responder]) -> None:
    responder = respond(lambda taken: taken.final("", []))
    client.score("a", ["b", "c"], timeout=T_S)
    client.embed("d", timeout=T_S, tier="batch")
    assert [(r.kind, r.prompt, r.continuations, r.tier) for r in responder.seen] == [
        ("score", "a", ["b", "c"], "realtime"),
        ("embed", "d", None, "batch"),
    ]


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


# -- giving up, cancelling


def test_wait_timeout_leaves_the_request_running(client: Client) -> None:
    handle = client.submit("hi")
    started = time.monotonic()
    with pytest.raises(WaitTimeout) as raised:
        handle.result(timeout=0.2)
    assert time.monotonic() - started >= 0.2
    assert raised.value.request_id == handle.id
    assert handle.status() == "queued"


def test_result_with_no_time_at_all_looks_once(client: Client, respond: Callable[..., Responder]) -> None:
    handle = client.submit("hi")
    with pytest.raises(WaitTimeout):
        handle.result(timeout=0)
    respond()
    handle.result(timeout=T_S)
    assert client.get(handle.id).result(timeout=0).text == "hi"


def test_submit_and_wait_that_times_out_cancels_its_request(client: Client, keys: Keys) -> None:
    with pytest.raises(WaitTimeout) as raised:
        client.submit_and_wait("hi", timeout=0.2)
    assert raised.value.request_id is not None
    assert client.get(raised.value.request_id).status() == "cancelled"
    assert client.redis.xlen(keys.stream("realtime")) == 1  # an undelivered entry is never deleted: a worker discards it


def test_submit_and_wait_gives_the_request_a_deadline(client: Client, keys: Keys, respond: Callable[..., Responder]) -> None:
    responder = respond()
    client.submit_and_wait("hi", timeout=T_S)
    client.submit_and_wait("hi", timeout=T_S, deadline_s=1000)
    client.submit_and_wait("hi")
    lifetimes = [r.deadline_ms and r.enqueued_ms and r.deadline_ms - r.enqueued_ms for r in responder.seen]
    assert lifetimes == [(T_S + 5) * 1000, 1_000_000, None]


def test_interrupted_submit_and_wait_cancels_its_request(any_server: Server, queue: str, respond: Callable[..., Responder]) -> None:
    held = Held()
    respond(held)
    code = f"from producer import Client; Client({any_server.url!r}, {queue!r}).submit_and_wait('hi', id='x1')"
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) as caller:
        held.next()
        caller.send_signal(signal.SIGINT)
        _, stderr = caller.communicate(timeout=T_S)
    assert stderr.rstrip().endswith("KeyboardInterrupt")
    with Client(any_server.url, queue) as client:
        assert client.redis.hget(client.keys.state("x1"), "cancel") == b"1"
        assert [fields for _, fields in entries(client, client.keys.control)] == [{b"op": b"cancel", b"id": b"x1"}]


def test_cancel_of_a_queued_request_answers_it_at_once(client: Client, keys: Keys, respond: Callable[..., Responder]) -> None:
    handle = client.submit("hi")
    assert handle.cancel() == "cancelled"
    with pytest.raises(Cancelled):
        handle.result(timeout=T_S)
    assert handle.status() == "cancelled"
    assert 0 < client.redis.pttl(keys.reply(handle.id)) <= calls.REPLY_TTL_MS
    assert 0 < client.redis.pttl(keys.state(handle.id)) <= calls.FINISHED_STATE_TTL_MS
    responder = respond()
    assert client.submit_and_wait("next", timeout=T_S).text == "next"
    assert [request.prompt for request in responder.seen] == ["next"]


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
def test_cancellation_is_answered_in_the_encoding_of_the_request(any_server: Server, queue: str, encoding: str) -> None:
    with Client(any_server.url, queue=queue, encoding=encoding) as client:  # type: ignore[arg-type]  # a literal by parametrisation
        handle = client.submit("hi")
        handle.cancel()
        [[_, fields]] = entries(client, client.keys.reply(handle.id))
    assert encoding.encode() in fields


def test_cancel_of_a_running_request_orders_its_worker_to(client: Client, keys: Keys, respond: Callable[..., Responder]) -> None:
    held = Held()
    respond(held)
    handle = client.submit("hi")
    taken = held.next()
    assert handle.cancel() == "cancelling"
    assert client.redis.hget(keys.state(handle.id), "cancel") == b"1"
    taken.error(Cancelled("as ordered"))
    with pytest.raises(Cancelled):
        handle.result(timeout=T_S)


def test_cancel_of_a_finished_request_has_no_effect(client: Client, keys: Keys, respond: Callable[..., Responder]) -> None:
    respond()
    handle = client.submit("hi")
    handle.result(timeout=T_S)
    assert handle.cancel() == "finished"
    assert client.redis.xlen(keys.control) == 0
    assert client.get(handle.id).result(timeout=T_S).text == "hi"


def test_cancellation_that_comes_first_stops_the_request(client: Client, keys: Keys) -> None:
    assert client.get("x1").cancel() == "unknown"
    assert 0 < client.redis.pttl(keys.state("x1")) <= calls.FINISHED_STATE_TTL_MS
    with pytest.raises(Cancelled):
        client.submit_and_wait("hi", id="x1", timeout=T_S)
    assert client.redis.xlen(keys.stream("realtime")) == 0


def test_cancel_storm_leaves_no_key_without_a_lifetime(client: Client, keys: Keys) -> None:
    handles = client.submit_many([f"p{i}" for i in range(300)])
    assert {handle.cancel() for handle in handles} == {"cancelled"}
    lasting = {key for key in client.redis.scan_iter(f"{keys.prefix}*", count=1000) if client.redis.ttl(key) < 0}
    assert lasting == {keys.stream("realtime").encode()}


# -- once per id, and limits


def test_known_id_is_not_put_again(client: Client, keys: Keys, respond: Callable[..., Responder]) -> None:
    first, second = client.submit("one", id="x1"), client.submit("two", id="x1")
    assert client.redis.xlen(keys.stream("realtime")) == 1
    responder = respond()
    assert first.result(timeout=T_S).text == second.result(timeout=T_S).text == "one"
    assert client.submit("three", id="x1").result(timeout=T_S).text == "one"
    assert len(responder.seen) == 1


def test_full_queue_refuses_and_writes_nothing(any_server: Server, queue: str, keys: Keys) -> None:
    with Client(any_server.url, queue, max_queue_depth=100) as client:
        client.submit_many(["p"] * 100)
        before = client.redis.dbsize()
        with pytest.raises(QueueFull, match="100") as refused:
            client.submit("p")
        assert refused.value.retryable
        with pytest.raises(QueueFull):
            client.submit_and_wait("p", timeout=T_S)
        assert client.redis.dbsize() == before
        assert client.redis.xlen(keys.stream("realtime")) == 100
        client.submit("p", tier="batch")


def test_limit_of_the_queue_outranks_the_clients(any_server: Server, queue: str, keys: Keys) -> None:
    with Client(any_server.url, queue, max_queue_depth=1) as client:
        client.redis.hset(keys.limits, "max_depth:realtime", 2)
        handles = client.submit_many(["a", "b", "c"])
        with pytest.raises(QueueFull):
            handles[2].result(timeout=T_S)
        assert [handle.status() for handle in handles] == ["queued", "queued", "unknown"]


def test_state_holds_what_the_protocol_says(client: Client, keys: Keys) -> None:
    handle = client.submit("hi", tier="batch", deadline_s=1.5)
    state = client.redis.hgetall(keys.state(handle.id))
    [[entry_id, fields]] = entries(client, keys.stream("batch"))
    assert set(state) == {b"status", b"tier", b"entry", b"encoding", b"enqueued_ms", b"deadline_ms"}
    assert (state[b"status"], state[b"tier"], state[b"entry"], state[b"encoding"]) == (b"queued", b"batch", entry_id, b"msgpack")
    assert int(state[b"deadline_ms"]) - int(state[b"enqueued_ms"]) == 1500
    assert (fields[b"enqueued_ms"], fields[b"deadline_ms"]) == (state[b"enqueued_ms"], state[b"deadline_ms"])
    seconds, _ = client.redis.time()
    assert abs(int(state[b"enqueued_ms"]) / 1000 - seconds) < 60
    assert 0 < client.redis.pttl(keys.state(handle.id)) <= calls.STATE_TTL_MS


def test_scripts_are_sent_again_to_a_server_that_forgot_them(client: Client, respond: Callable[..., Responder]) -> None:
    respond()
    for _ in range(2):
        client.redis.script_flush()
        handles = client.submit_many(["a", "b"])
        assert [handle.result(timeout=T_S).text for handle in handles] == ["a", "b"]
        client.redis.script_flush()
        assert handles[0].cancel() == "finished"


def test_invalid_request_sends_nothing(client: Client, keys: Keys) -> None:
    for bad in ({"top_p": 0.0}, {"id": "a:b"}, {"tier": "gold"}, {"colour": "red"}):
        with pytest.raises(InvalidRequest):
            client.submit("hi", **bad)
    for timeout in (-1, float("nan"), "1"):
        with pytest.raises(InvalidRequest, match="timeout"):
            client.submit_and_wait("hi", timeout=timeout)  # type: ignore[arg-type]  # wrong on purpose
    assert client.redis.keys(f"{keys.prefix}*") == []


# -- replies that are not there


def test_unknown_request_is_an_error(client: Client) -> None:
    handle = client.get("nobody")
    assert handle.status() == "unknown"
    with pytest.raises(UnknownRequest):
        handle.result(timeout=T_S)
    with pytest.raises(UnknownRequest):
        list(handle.stream(timeout=T_S))


def test_expired_reply_is_an_error(client: Client, keys: Keys, respond: Callable[..., Responder]) -> None:
    respond()
    client.submit("hi", id="x1").result(timeout=T_S)
    client.redis.delete(keys.reply("x1"))
    with pytest.raises(ReplyExpired):
        client.get("x1").result(timeout=T_S)


def test_frames_whose_ids_ran_backwards_are_found(client: Client, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a failover to a server whose clock is behind."""
    monkeypatch.setattr(calls, "BLOCK_S", 0.2)
    held = Held()
    handle = client.submit("hi", stream=True)
    with Responder(client._url, client.queue, held).running():
        taken = held.next()
        taken.tokens("a")
        chunks = handle.stream(timeout=T_S)
        assert next(chunks).text == "a"
        client.redis.delete(keys.reply(handle.id))
        taken.client.execute_command(
            "XADD", keys.reply(handle.id), "1-1", "type", "tokens", "attempt", 1, "json", '{"index":0,"text":"a","token_ids":[0]}'
        )
        body = json.dumps({"id": handle.id, "text": "ab", "token_ids": [0, 1], "finish_reason": "stop"})
        taken.client.execute_command("XADD", keys.reply(handle.id), "1-2", "type", "final", "attempt", 2, "json", body)
        taken.client.hset(keys.state(handle.id), "status", "done")
        assert [chunk.text for chunk in chunks] == ["b"]


def test_request_that_redis_lost_is_put_again(client: Client, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "BLOCK_S", 0.2)
    handle = client.submit("hello", deadline_s=100)
    before = client.redis.hget(keys.state(handle.id), "deadline_ms")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(handle.result, T_S)
        client.redis.delete(keys.stream("realtime"), keys.state(handle.id))  # what a FLUSHALL does to this queue
        with Responder(client._url, client.queue).running() as responder:
            assert answer.result().text == "hello"
    assert [request.id for request in responder.seen] == [handle.id]
    assert str(responder.seen[0].deadline_ms).encode() == before


# -- what is shared: threads, forks, connections


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
    assert not connection.is_connected
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
        with pytest.raises(InvalidRequest, match="durable"):
            client.submit("hi", id="x1", durable=True)
        assert client.get("x1").status() == "cancelled"


def test_durable_request_is_on_disk(server_kind: str, queue: str) -> None:
    if server_kind == "redis7":
        pytest.skip("WAITAOF came with Redis 7.2")
    with Server(server_kind, appendonly="yes", appendfsync="everysec") as server, Client(server.url, queue) as client:
        handle = client.submit("hi", durable=True)
        server.restart()
        assert handle.status() == "queued"


def test_redis_replies_are_bytes_whatever_the_url_says(any_server: Server, queue: str, respond: Callable[..., Responder]) -> None:
    respond()
    with Client(f"{any_server.url}?decode_responses=true&socket_timeout=1", queue) as client:
        assert client.submit_and_wait("hi", timeout=T_S).text == "hi"
        assert isinstance(client.redis, redis.Redis)
