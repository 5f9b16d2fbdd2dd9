"""Giving up: timeouts, interrupts and cancellations, in every state of a request."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from producer import (
    Cancelled,
    Client,
    WaitTimeout,
    calls,
)
from producer.keys import Keys
from tests.responder import Held, Responder, entries
from tests.servers import Server

T_S = 20.0  # far more than anything here takes


@pytest.fixture
def client(any_client: Client) -> Client:
    return any_client


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


def test_caller_of_a_known_id_that_times_out_leaves_the_request_to_whoever_put_it(
    client: Client, any_server: Server, queue: str, respond: Callable[..., Responder]
) -> None:
    held = Held()
    respond(held)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(client.submit_and_wait, "hi", id="order-7", timeout=T_S)
        taken = held.next()
        with Client(any_server.url, queue) as another, pytest.raises(WaitTimeout):
            another.submit_and_wait("hi", id="order-7", timeout=0.2)
        assert (client.get("order-7").status(), another.submit("hi", id="order-7").is_new) == ("running", False)
        assert client.redis.hget(client.keys.state("order-7"), "cancel") is None
        taken.final("hi")
        assert first.result().text == "hi"
    with pytest.raises(WaitTimeout):
        client.submit_and_wait("hi", id="order-8", timeout=0.2)
    assert client.redis.hget(client.keys.state("order-8"), "cancel") == b"1"


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
    code = f"from producer import Client; Client({any_server.url!r}, {queue!r}).submit_and_wait('hi')"
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) as caller:
        request_id = held.next().request.id
        caller.send_signal(signal.SIGINT)
        _, stderr = caller.communicate(timeout=T_S)
    assert stderr.rstrip().endswith("KeyboardInterrupt")
    with Client(any_server.url, queue) as client:
        assert client.redis.hget(client.keys.state(request_id), "cancel") == b"1"
        assert [fields for _, fields in entries(client.redis, client.keys.control)] == [{b"op": b"cancel", b"id": request_id.encode()}]


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
        [[_, fields]] = entries(client.redis, client.keys.reply(handle.id))
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
