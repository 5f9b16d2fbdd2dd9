"""Waiting Redis trouble out, step by step and without Redis."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from redis import exceptions as redis_errors

from producer.errors import RedisUnavailable
from producer.exchange import Batch, Patience, Pause, client_outage, exchange, one
from producer.scripts import load

PING = ("PING",)


def patience(timeout_s: float | None) -> Patience:
    return Patience(timeout_s, client_outage())


def test_reply_is_returned() -> None:
    call = one(PING, patience(None))
    assert next(call) == Batch((PING,))
    with pytest.raises(StopIteration) as end:
        call.send([b"PONG"])
    assert end.value.value == b"PONG"


@pytest.mark.parametrize(
    "trouble",
    [
        redis_errors.ConnectionError("refused"),
        redis_errors.TimeoutError("no reply"),
        redis_errors.BusyLoadingError("loading"),
    ],
)
def test_broken_connection_is_tried_again_after_a_pause(trouble: Exception) -> None:
    call = one(PING, patience(5))
    next(call)
    pause = call.throw(trouble)
    assert isinstance(pause, Pause)
    assert 0 < pause.seconds <= 0.05
    assert isinstance(call.send(None), Batch)


@pytest.mark.parametrize(
    "refusal",
    [
        redis_errors.ReadOnlyError("You can't write against a read only replica."),
        redis_errors.OutOfMemoryError("command not allowed when used memory > 'maxmemory'."),
        redis_errors.MasterDownError("Link with MASTER is down"),
        redis_errors.ResponseError("MISCONF Redis is configured to save RDB snapshots"),
        redis_errors.ResponseError("UNBLOCKED force unblock from blocking operation"),
        redis_errors.ResponseError("BUSY Redis is busy running a script."),
    ],
)
def test_passing_refusal_is_tried_again_after_a_pause(refusal: Exception) -> None:
    call = one(PING, patience(5))
    next(call)
    assert isinstance(call.send([refusal]), Pause)
    assert isinstance(call.send(None), Batch)


@pytest.mark.parametrize(
    "refusal",
    [
        redis_errors.NoPermissionError("this user has no permissions to run the 'xadd' command"),
        redis_errors.ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value"),
        redis_errors.ResponseError("unknown command 'WAITAOF'"),
    ],
)
def test_lasting_refusal_is_raised_at_once(refusal: Exception) -> None:
    call = one(PING, patience(None))
    next(call)
    with pytest.raises(RedisUnavailable, match="refuses") as raised:
        call.send([refusal])
    assert raised.value.__cause__ is refusal


def test_wrong_password_is_raised_at_once() -> None:
    call = one(PING, patience(None))
    next(call)
    with pytest.raises(RedisUnavailable, match="refuses"):
        call.throw(redis_errors.AuthenticationError("invalid username-password pair"))


def test_lasting_refusal_outweighs_a_passing_one_beside_it() -> None:
    call = exchange(lambda: Batch((PING, PING)), patience(None))
    next(call)
    with pytest.raises(RedisUnavailable, match="refuses: no"):
        call.send([redis_errors.ReadOnlyError("replica"), redis_errors.NoPermissionError("no")])


def test_trouble_beyond_the_timeout_is_raised() -> None:
    call = one(PING, patience(0))
    assert isinstance(next(call), Batch)
    with pytest.raises(RedisUnavailable, match="timeout of 0 s"):
        call.throw(redis_errors.ConnectionError("refused"))


def test_pauses_grow_to_a_limit_and_never_pass_the_deadline() -> None:
    long = patience(100)
    pauses = [long.pause(redis_errors.ConnectionError("x")).seconds for _ in range(12)]
    assert pauses[0] <= 0.05
    assert 1.0 <= pauses[-1] <= 2.0
    assert patience(0.01).pause(redis_errors.ConnectionError("x")).seconds <= 0.01


def test_reading_limit_never_passes_the_deadline_by_more_than_the_grace() -> None:
    batch = next(one(PING, patience(0)))
    assert isinstance(batch, Batch)
    assert batch.limit_s <= 0.5
    assert batch.connect_limit_s <= 0.5


def test_outage_is_logged_at_its_start_and_at_its_end_however_many_wait(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="headrace")
    outage = client_outage()
    calls = [one(PING, Patience(None, outage)) for _ in range(5)]
    for call in calls:
        next(call)
        for _ in range(3):
            call.throw(redis_errors.ConnectionError("refused"))
            call.send(None)
    for call in calls:
        with pytest.raises(StopIteration):
            call.send([b"PONG"])
    assert [record.message.partition(",")[0].partition(" after")[0] for record in caplog.records] == [
        "Redis is unavailable",
        "Redis is available again",
    ]


def test_script_that_the_server_does_not_know_is_loaded_and_run_again() -> None:
    script = load("stream")
    call: Any = one(script.command(("k",), ("a",)), patience(None), script)
    assert next(call).commands == (("EVALSHA", script.sha, 1, "k", "a"),)
    assert call.send([redis_errors.NoScriptError("No matching script.")]).commands[0] == ("SCRIPT", "LOAD", script.source)
    with pytest.raises(StopIteration) as end:
        call.send([script.sha.encode(), b"queued"])
    assert end.value.value == b"queued"


def test_refusal_of_a_judged_command_is_returned() -> None:
    refusal = redis_errors.ResponseError("no")
    call = exchange(lambda: Batch((PING, PING)), patience(None), judge_last=True)
    next(call)
    with pytest.raises(StopIteration) as end:
        call.send([b"PONG", refusal])
    assert end.value.value == [b"PONG", refusal]
