"""The blocking client against a real server and a scripted answerer: submitting, streaming, limits, missing replies."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from producer import (
    BatchFailed,
    Client,
    InvalidRequest,
    QueueFull,
    ReplyExpired,
    SamplingParams,
    UnknownRequest,
    calls,
)
from producer.keys import Keys
from tests.responder import Held, Responder, Taken, entries
from tests.servers import Server

T_S = 20.0  # far more than anything here takes


@pytest.fixture
def client(any_client: Client) -> Client:
    return any_client


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
        [[_, fields]] = entries(client.redis, keys.reply(result.id))
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
    assert [fields for _, fields in entries(client.redis, keys.control)] == [{b"op": b"stream", b"id": handle.id.encode()}]
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
    [[entry_id, fields]] = entries(client.redis, keys.stream("batch"))
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
    for timeout in (-1, float("nan"), 1e300, "1"):
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
