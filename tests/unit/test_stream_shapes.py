"""What the stream side makes of the shapes that replies and entries come in."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from producer.errors import Cancelled, DeadlineExceeded, Poisoned
from producer.keys import TIERS, Keys
from worker.stream.consumer import Consumer, Entry
from worker.stream.delivery import Delivery
from worker.stream.scripts import load


class OneReply:
    """A client that has one reply to XREADGROUP."""

    def __init__(self, entries: list[Any]) -> None:
        self.reply = [[Keys("q").stream("realtime").encode(), entries]]

    def xreadgroup(self, *_: object, **__: object) -> list[Any]:
        return self.reply


def test_entries_that_were_deleted_while_pending_are_passed_over() -> None:
    entries = [(None, None), (b"5-0", None), None, (b"6-0", {b"id": b"x"})]
    consumer = Consumer(OneReply(entries), Keys("q"), "me", 1.0)  # type: ignore[arg-type]  # the one command it needs
    assert consumer.read({"realtime": 10}, 1) == [Entry("realtime", "6-0", {b"id": b"x"})]


@pytest.mark.parametrize(
    ("raw", "deadline_ms"), [(b"1700000000000", 1_700_000_000_000), (b"", None), (b"soon", None), (b"9" * 30, None), (b"-5", None)]
)
def test_deadline_of_an_entry_is_read_where_it_can_be(raw: bytes, deadline_ms: int | None) -> None:
    assert Delivery(Entry("realtime", "1-1", {b"id": b"x", b"deadline_ms": raw})).deadline_ms == deadline_ms


@pytest.mark.parametrize(
    ("fields", "request_id", "encoding"),
    [
        ({b"id": b"x", b"msgpack": b""}, "x", "msgpack"),
        ({b"id": b"x", b"json": b""}, "x", "json"),
        ({b"id": b"x", b"json": b"", b"msgpack": b""}, "x", "json"),
        ({b"json": b""}, "1-1", "json"),
        ({b"id": b"../other", b"msgpack": b""}, "1-1", "msgpack"),
    ],
)
def test_reply_goes_to_the_id_or_else_to_the_entrys_own(fields: dict[bytes, bytes], request_id: str, encoding: str) -> None:
    delivery = Delivery(Entry("realtime", "1-1", fields))
    assert (delivery.request_id, delivery.encoding) == (request_id, encoding)


def test_only_what_was_given_up_is_dead_lettered() -> None:
    delivery = Delivery(Entry("batch", "1-1", {b"id": b"x", b"json": b""}))
    ends = [delivery.failure(error) for error in (Cancelled("c"), DeadlineExceeded("d"), Poisoned("p"))]
    assert [(end.status, end.code, end.dead_letter) for end in ends] == [
        ("cancelled", "CANCELLED", ""),
        ("failed", "DEADLINE_EXCEEDED", ""),
        ("failed", "POISONED", "p"),
    ]


@pytest.mark.parametrize("name", ["beat", "begin", "finish", "publish", "reap", "release", "renew"])
def test_scripts_begin_with_their_flags_and_hold_the_fence(name: str) -> None:
    source = load(name).source
    assert source.startswith("#!lua")
    assert source.count("#!lua") == 1
    assert "local function standing" in source


def test_tiers_are_read_in_the_order_of_their_urgency() -> None:
    assert TIERS == ("realtime", "batch")


def test_stream_side_loads_no_torch() -> None:
    modules = ["consumer", "control", "delivery", "heartbeat", "ledger", "scripts", "trouble"]
    code = f"import sys; {'; '.join(f'import worker.stream.{m}' for m in modules)}; print({{'torch', 'transformers'}} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "set()"
