"""The written contract, followed to the letter with raw commands, as a client in another language would."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import producer
from producer import Client, calls
from producer.errors import BY_CODE
from producer.keys import CONTROL_LENGTH, Keys
from producer.sampling import FIELD_NAMES
from producer.scripts import load
from producer.wire import MAX_BODY_BYTES, PROTOCOL_VERSION
from tests.responder import Responder, entries

PAGE = (Path(producer.__file__).parent / "PROTOCOL.md").read_text(encoding="utf-8")
CANCELLED = '{"code":"CANCELLED","message":"cancelled","retryable":false}'
T_S = 20.0


@pytest.fixture
def client(any_client: Client) -> Client:
    return any_client


def enqueue(client: Client, keys: Keys, request_id: str, *, limit: object = "", deadline: str = "") -> list[Any]:
    names = (keys.stream("realtime"), keys.reply(request_id), keys.state(request_id), keys.limits)
    ttls = (604800000, 3600000, 86400000)
    fields = ("id", request_id, "v", 1, "json", '{"prompt":"Hi"}', "user", "u")
    reply: Any = client.redis.eval(load("enqueue").source, 4, *names, "realtime", limit, deadline, *ttls, "json", CANCELLED, 0, *fields)  # type: ignore[arg-type]  # redis-py types these as str
    return list(reply)


def test_enqueue_script_answers_as_written(client: Client, keys: Keys, respond: Callable[..., Responder]) -> None:
    outcome, enqueued_ms, deadline_ms = enqueue(client, keys, "x1", deadline="+60000")
    assert (outcome, int(deadline_ms) - int(enqueued_ms)) == (b"queued", 60000)
    assert enqueue(client, keys, "x1") == [b"exists", b"queued"]
    assert enqueue(client, keys, "x2", limit=1) == [b"full", 1, b"1"]
    assert enqueue(client, keys, "x3", deadline=deadline_ms.decode())[2] == deadline_ms
    client.redis.hset(keys.state("x4"), "cancel", 1)
    assert enqueue(client, keys, "x4") == [b"cancelled"]
    [[_, frame]] = entries(client.redis, keys.reply("x4"))
    assert frame == {b"type": b"error", b"attempt": b"1", b"json": CANCELLED.encode()}
    responder = respond()
    assert client.get("x1").result(timeout=T_S).text == "Hi"
    assert (responder.seen[0].user, responder.seen[0].deadline_ms) == ("u", int(deadline_ms))


def test_cancel_and_stream_scripts_answer_as_written(client: Client, keys: Keys) -> None:
    def cancel(request_id: str) -> Any:
        names = (keys.reply(request_id), keys.state(request_id), keys.control)
        return client.redis.eval(load("cancel").source, 3, *names, request_id, b"\x80", CANCELLED, 3600000, 86400000, 10000)

    def stream(request_id: str) -> Any:
        return client.redis.eval(load("stream").source, 2, keys.state(request_id), keys.control, request_id, 10000)

    enqueue(client, keys, "x1")
    assert (stream("x1"), stream("x1"), stream("nobody")) == (b"queued", b"queued", b"unknown")
    assert [cancel("x1"), cancel("x1"), cancel("nobody")] == [b"cancelled", b"finished", b"unknown"]
    client.redis.hset(keys.state("x2"), "status", "running")
    assert cancel("x2") == b"cancelling"
    orders = [(fields[b"op"], fields[b"id"]) for _, fields in entries(client.redis, keys.control)]
    assert orders == [(b"stream", b"x1"), (b"cancel", b"nobody"), (b"cancel", b"x2")]


def test_frames_are_read_as_written(client: Client, keys: Keys, respond: Callable[..., Responder]) -> None:
    respond()
    body = json.dumps({"prompt": "abc", "stream": True})
    client.redis.execute_command("XADD", keys.stream("realtime"), "*", "id", "x1", "json", body)
    last = "0-0"
    frames: list[dict[bytes, bytes]] = []
    while not frames or frames[-1][b"type"] not in (b"final", b"error"):
        for entry_id, fields in client.redis.execute_command("XREAD", "BLOCK", 10_000, "STREAMS", keys.reply("x1"), last)[0][1]:
            last = entry_id.decode()
            frames.append(fields)
    bodies = [json.loads(frame[b"json"]) for frame in frames]
    assert [(body["index"], body["text"], body["token_ids"]) for body in bodies[:-1]] == [(0, "a", [0]), (1, "b", [1]), (2, "c", [2])]
    assert (bodies[-1]["text"], bodies[-1]["finish_reason"]) == ("abc", "stop")
    assert 0 < client.redis.pttl(keys.reply("x1")) <= 3600000


def test_page_lists_every_error_with_its_retryability() -> None:
    listed = dict(re.findall(r"^\| `([A-Z_]+)` \| (yes|no) \|", PAGE, re.MULTILINE))
    never_sent = {"WAIT_TIMEOUT", "REPLY_EXPIRED", "UNKNOWN_REQUEST", "REDIS_UNAVAILABLE"}
    assert listed == {code: "yes" if cls.retryable else "no" for code, cls in BY_CODE.items() if code not in never_sent}
    assert all(f"`{code}`" in PAGE for code in never_sent)


def test_page_lists_every_field_key_and_number() -> None:
    body = PAGE[PAGE.index("### The body") : PAGE.index("## Putting a request")]
    assert [name for name in FIELD_NAMES if f"`{name}`" not in body] == []
    keys = Keys("q")
    fixed = (keys.stream("realtime"), keys.stream("batch"), keys.workers, keys.dead, keys.control, keys.admin, keys.limits)
    of_one = [key("x").removesuffix("x") for key in (keys.reply, keys.state, keys.worker)]
    assert [key for key in (*fixed, *of_one) if f"`{key}" not in PAGE] == []
    assert f"version {PROTOCOL_VERSION}" in PAGE
    assert f"{MAX_BODY_BYTES // 1024**2} MiB" in PAGE
    assert all(str(number) in PAGE for number in (calls.STATE_TTL_MS, calls.REPLY_TTL_MS, calls.FINISHED_STATE_TTL_MS, CONTROL_LENGTH))
