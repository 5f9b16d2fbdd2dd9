from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis

from producer import scripts
from producer.calls import STATE_TTL_MS
from producer.codec import decode_error, decode_frame, decode_result, encode_body
from producer.connection import connect
from producer.dead import letters, replay
from producer.errors import Cancelled, DeadlineExceeded, Poisoned
from producer.keys import GROUP
from producer.wire import Chunk, Result
from tests.ledgers import BODY, LedgerPair, begin, finish, publish, settle
from tests.servers import Server
from worker.stream.consumer import Consumer
from worker.stream.delivery import Delivery
from worker.stream.ledger import Settled


def test_bare_entry_gets_a_state_when_it_is_begun(pair: LedgerPair) -> None:
    entry = pair.put("x1")
    (delivery,) = pair.read()
    begun = begin(pair.one, delivery)
    assert (begun.verdict, begun.published, begun.streamed, delivery.attempt) == ("run", 0, False, 1)
    assert begun.enqueued_ms == int(entry.split("-")[0])
    state = pair.view.state("x1")
    assert state | {"started_ms": ""} == {
        "status": "running",
        "tier": "realtime",
        "entry": entry,
        "encoding": "json",
        "attempt": "1",
        "worker": "one",
        "enqueued_ms": entry.split("-")[0],
        "started_ms": "",
    }


@pytest.mark.parametrize("verdict", ["run", "held", "cancelled", "expired", "suspect", "poisoned"])
def test_state_that_is_made_for_a_bare_entry_expires_even_if_nobody_ends_it(pair: LedgerPair, verdict: str) -> None:
    if verdict == "cancelled":
        pair.client.hset(pair.keys.state("x1"), "cancel", "1")
    pair.put(**({"deadline_ms": 1} if verdict == "expired" else {}))
    (delivery,) = pair.read()
    count = {"suspect": 3, "poisoned": 4}.get(verdict, 1)
    pair.client.xclaim(pair.keys.stream("realtime"), GROUP, "one", 0, [delivery.entry.id], retrycount=count)
    (begun,) = (pair.one.hold if verdict == "held" else pair.one.begin)([delivery])
    assert begun.verdict == verdict
    assert 0 < pair.client.pttl(pair.keys.state("x1")) <= STATE_TTL_MS


def test_lifetime_of_a_state_that_has_one_is_left_alone(pair: LedgerPair) -> None:
    pair.client.hset(pair.keys.state("x1"), "status", "queued")
    pair.client.pexpire(pair.keys.state("x1"), 100_000)
    pair.begun()
    assert 0 < pair.client.pttl(pair.keys.state("x1")) <= 100_000


def test_state_keeps_when_it_was_first_begun_and_had_its_first_token(pair: LedgerPair) -> None:
    delivery = pair.begun()
    assert (delivery.started_ms, delivery.first_token_ms) == (int(pair.view.state("x1")["started_ms"]), None)
    pair.client.hset(pair.keys.state("x1"), "started_ms", 1000)
    delivery.first_token_ms = 2000
    publish(pair.one, delivery, 0, 1)
    later = pair.stolen_by("two", delivery)
    begin(pair.two, later)
    assert (later.started_ms, later.first_token_ms) == (1000, 2000)
    later.first_token_ms = 3000
    publish(pair.two, later, 1, 2)
    finish(pair.two, later)
    state = pair.view.state("x1")
    assert (state["started_ms"], state["first_token_ms"]) == ("1000", "2000")


def test_state_tells_whose_vocabulary_the_first_frame_is_of(pair: LedgerPair) -> None:
    delivery = pair.begun()
    assert delivery.vocabulary is None
    delivery.vocabulary = "one's"
    publish(pair.one, delivery, 0, 1)
    later = pair.stolen_by("two", delivery)
    begin(pair.two, later)
    assert later.vocabulary == "one's"
    later.vocabulary = "another's"
    publish(pair.two, later, 1, 2)
    assert pair.view.state("x1")["vocabulary"] == "one's"


def test_publishing_makes_no_state_that_would_never_expire(pair: LedgerPair) -> None:
    delivery = pair.begun()
    pair.client.delete(pair.keys.state("x1"))
    delivery.first_token_ms, delivery.attempt, delivery.vocabulary = 2000, 2, "one's"
    assert publish(pair.one, delivery, 0, 1) == 1
    assert pair.view.state("x1") == {}


def test_final_reply_acks_deletes_and_expires_in_one_go(pair: LedgerPair) -> None:
    delivery = pair.begun()
    assert finish(pair.one, delivery).outcome == "written"
    (frame,) = pair.view.frames("x1")
    assert decode_result(decode_frame(frame)).text == "ok"
    assert (pair.view.length(), pair.view.pending()) == (0, [])
    assert 0 < pair.client.pttl(pair.keys.reply("x1")) <= 3_600_000
    assert 0 < pair.client.pttl(pair.keys.state("x1")) <= 86_400_000
    assert pair.view.state("x1")["status"] == "done"


def test_every_round_trip_is_timed_whatever_it_is_for(pair: LedgerPair) -> None:
    pair.put("x1")
    (delivery,) = pair.read()
    acts: list[Callable[[], object]] = [
        lambda: begin(pair.one, delivery),
        lambda: publish(pair.one, delivery, 0, 1),
        lambda: pair.one.renew([delivery]),
        lambda: finish(pair.one, delivery),
        lambda: pair.one.release([delivery]),
    ]
    for count, act in enumerate(acts, start=1):
        act()
        assert len(pair.round_trips) == count
    assert min(pair.round_trips) > 0


def test_a_call_sent_twice_writes_once(pair: LedgerPair) -> None:
    delivery = pair.begun()
    assert [publish(pair.one, delivery, 0, 1, 2) for _ in range(2)] == [2, 2]
    assert [finish(pair.one, delivery).outcome for _ in range(2)] == ["written", "written"]
    assert [frame[b"type"] for frame in pair.view.frames("x1")] == [b"tokens", b"final"]


@pytest.mark.parametrize("act", ["publish", "finish", "renew", "release", "begin"])
def test_whoever_lost_the_entry_changes_nothing(pair: LedgerPair, act: str) -> None:
    delivery = pair.begun()
    other = pair.stolen_by("two", delivery)
    begin(pair.two, other)
    before = pair.client.xlen(pair.keys.control), pair.view.state("x1")
    outcome: Callable[[], Any] = {
        "publish": lambda: publish(pair.one, delivery, 0, 1),
        "finish": lambda: finish(pair.one, delivery).outcome,
        "renew": lambda: pair.one.renew([delivery]) == [delivery],
        "release": lambda: pair.one.release([delivery]),
        "begin": lambda: begin(pair.one, delivery).verdict,
    }[act]
    assert outcome() == {"publish": None, "finish": "lost", "renew": True, "release": 0, "begin": "lost"}[act]
    assert pair.view.frames("x1") == []
    assert (pair.client.xlen(pair.keys.control), pair.view.state("x1")) == before
    (pending,) = pair.view.pending()
    assert (pending["consumer"], pending["times_delivered"]) == (b"two", 2)
    assert finish(pair.two, other).outcome == "written"


def test_frames_continue_over_attempts_and_come_back_in_order(pair: LedgerPair) -> None:
    delivery = pair.begun()
    publish(pair.one, delivery, 0, 1, 2)
    publish(pair.one, delivery, 2, 3)
    other = pair.stolen_by("two", delivery)
    assert begin(pair.two, other).published == 3
    assert other.attempt == 2
    assert publish(pair.two, other, 3, 4) == 4
    chunks = pair.two.published(other)
    assert [(chunk.index, chunk.token_ids, chunk.attempt) for chunk in chunks] == [(0, [1, 2], 1), (2, [3], 1), (3, [4], 2)]
    assert "".join(chunk.text for chunk in chunks) == " 1 2 3 4"


def test_frame_that_does_not_continue_says_where_to_go_on(pair: LedgerPair) -> None:
    delivery = pair.begun()
    publish(pair.one, delivery, 0, 1, 2)
    assert publish(pair.one, delivery, 5, 6) == 2  # Redis lost its last writes
    assert publish(pair.one, delivery, 0, 1) == 2  # our call's reply was lost
    assert len(pair.view.frames("x1")) == 1


def test_tail_is_written_with_the_final_frame_or_not_at_all(pair: LedgerPair) -> None:
    delivery = pair.begun()
    publish(pair.one, delivery, 0, 1)
    result = Result(id="x1", text=" 1 2 3", token_ids=[1, 2, 3])
    settled = settle(pair.one, delivery.success(result, delivery.tokens_frame(Chunk(" 3", [3], 2))))
    assert (settled.outcome, settled.published) == ("behind", 1)
    assert len(pair.view.pending()) == 1
    settled = settle(pair.one, delivery.success(result, delivery.tokens_frame(Chunk(" 2 3", [2, 3], 1))))
    assert settled.outcome == "written"
    assert [frame[b"type"] for frame in pair.view.frames("x1")] == [b"tokens", b"tokens", b"final"]


@pytest.mark.parametrize("loss", ["flushall", "delete the stream", "delete the entry"])
def test_answer_is_written_when_nobody_else_can(pair: LedgerPair, loss: str) -> None:
    delivery = pair.begun()
    if loss == "flushall":
        pair.client.flushall()
    elif loss == "delete the stream":
        pair.client.delete(pair.keys.stream("realtime"))
    else:
        pair.client.xdel(pair.keys.stream("realtime"), delivery.entry.id)
    assert pair.one.renew([delivery]) == []
    assert publish(pair.one, delivery, 0, 1) == 1
    assert finish(pair.one, delivery).outcome == "written"
    assert pair.view.finals("x1") == 1


def test_answer_is_left_to_the_next_owner_when_only_the_group_was_lost(pair: LedgerPair) -> None:
    delivery = pair.begun()
    pair.client.xgroup_destroy(pair.keys.stream("realtime"), GROUP)
    assert pair.one.renew([delivery]) == [delivery]
    assert finish(pair.one, delivery).outcome == "lost"
    Consumer(pair.client, pair.keys, "one", 1.0).ensure_groups()
    (again,) = pair.read("two")
    assert begin(pair.two, again).verdict == "run"


def test_an_id_that_has_its_final_reply_is_not_run_again(pair: LedgerPair) -> None:
    finish(pair.one, pair.begun())
    pair.put("x1")
    (again,) = pair.read()
    assert begin(pair.one, again).verdict == "settled"
    assert (pair.view.length(), pair.view.pending(), pair.view.finals("x1")) == (0, [], 1)


def test_an_id_put_twice_is_run_once(pair: LedgerPair) -> None:
    first = pair.begun()
    pair.put("x1", tier="batch")
    (second,) = pair.read("two")
    assert begin(pair.two, second).verdict == "duplicate"
    assert pair.view.length() == 1
    assert finish(pair.one, first).outcome == "written"


def test_an_id_put_again_after_its_first_entry_was_lost_is_run(pair: LedgerPair) -> None:
    first = pair.begun()
    pair.client.xdel(pair.keys.stream("realtime"), first.entry.id)
    pair.put("x1")
    (second,) = pair.read()
    assert begin(pair.one, second).verdict == "run"


def test_cancelled_request_is_not_run(pair: LedgerPair) -> None:
    pair.client.hset(pair.keys.state("x1"), "cancel", "1")
    pair.put("x1")
    (delivery,) = pair.read()
    assert begin(pair.one, delivery).verdict == "cancelled"
    settled = settle(pair.one, delivery.failure(Cancelled("cancelled")))
    assert settled.outcome == "written"
    assert pair.view.state("x1")["status"] == "cancelled"


def test_request_cancelled_while_queued_is_discarded(pair: LedgerPair) -> None:
    entry = pair.put("x1")
    pair.client.hset(pair.keys.state("x1"), mapping={"status": "queued", "entry": entry, "tier": "realtime"})
    body = encode_body({"code": "CANCELLED"}, "json")
    script_keys = (pair.keys.reply("x1"), pair.keys.state("x1"), pair.keys.control)
    assert scripts.load("cancel")(pair.client, script_keys, ("x1", body, body, 1000, 1000, 1000)) == b"cancelled"
    (delivery,) = pair.read()
    assert begin(pair.one, delivery).verdict == "settled"
    assert (pair.view.length(), pair.view.finals("x1")) == (0, 1)


def test_deadline_that_passed_in_the_queue_is_told_by_redis_time(pair: LedgerPair) -> None:
    seconds, _ = pair.client.time()
    pair.put("late", deadline_ms=seconds * 1000 - 1000)
    pair.put("early", deadline_ms=seconds * 1000 + 60_000)
    late, early = pair.read()
    assert [begun.verdict for begun in pair.one.begin([late, early])] == ["expired", "run"]
    settled = settle(pair.one, late.failure(DeadlineExceeded("late")))
    assert settled.outcome == "written"
    assert pair.view.state("late")["code"] == "DEADLINE_EXCEEDED"


def test_poisoned_request_is_answered_and_dead_lettered(pair: LedgerPair) -> None:
    delivery = pair.begun(source="nightly")
    for name in ("two", "one", "two"):
        last = pair.stolen_by(name, delivery)
    assert begin(pair.two, last).verdict == "poisoned"
    settled = settle(pair.two, last.failure(Poisoned("given up")))
    assert settled.outcome == "written"
    (frame,) = pair.view.frames("x1")
    assert decode_error(decode_frame(frame)).code == "POISONED"
    ((_, letter),) = pair.client.xrange(pair.keys.dead)
    assert {name: letter[name] for name in (b"id", b"json", b"source")} == {b"id": b"x1", b"json": BODY, b"source": b"nightly"}
    assert {name: value for name, value in letter.items() if name.startswith(b"dead_")} == {
        b"dead_code": b"POISONED",
        b"dead_message": b"given up",
        b"dead_tier": b"realtime",
        b"dead_attempts": b"3",
        b"dead_worker": b"one",
        b"dead_ms": letter[b"dead_ms"],
        b"dead_entry": delivery.entry.id.encode(),
    }
    assert (pair.view.length(), pair.view.pending()) == (0, [])


def test_dead_letter_is_replayed_where_its_own_error_stands_and_not_where_another_reply_does(pair: LedgerPair) -> None:
    def replayed() -> str:
        (letter,) = letters(pair.client, pair.keys)
        return replay(pair.client, pair.keys, letter)

    settle(pair.one, pair.begun().failure(Poisoned("given up")))
    assert replayed() == "queued"
    (again,) = pair.read()
    begin(pair.one, again)
    settle(pair.one, again.failure(Poisoned("given up again")))
    pair.client.delete(pair.keys.state("x1"), pair.keys.reply("x1"))  # as when they expire
    finish(pair.one, pair.begun(), "good")
    assert replayed() == "answered"
    (frame,) = pair.view.frames("x1")
    assert decode_result(decode_frame(frame)).text == "good"


@pytest.mark.parametrize(("crashed", "attempt"), [(False, 1), (True, 2)])
def test_released_request_is_claimable_at_once(pair: LedgerPair, crashed: bool, attempt: int) -> None:
    delivery = pair.begun()
    assert pair.one.release([delivery], crashed=crashed) == 1
    assert pair.view.state("x1")["status"] == "queued"
    ((_, order),) = pair.client.xrange(pair.keys.control)
    assert order == {b"op": b"claim", b"worker": b"one", b"for": b""}
    (entry,) = Consumer(pair.client, pair.keys, "two", 3600.0).claim("realtime", 10)
    assert pair.two.hold([taken := Delivery(entry)])[0].verdict == "held"
    assert taken.attempt == attempt


def test_consumer_is_removed_only_without_heartbeat_and_pending_entries(pair: LedgerPair) -> None:
    delivery = pair.begun()
    assert pair.two.reap(["one"]) == 1  # it has nothing on the batch stream
    finish(pair.one, delivery)
    pair.client.hset(pair.keys.worker("one"), "state", "running")
    assert pair.two.reap(["one"]) == 0
    pair.client.delete(pair.keys.worker("one"))
    pair.two.reap(["one"])
    assert "one" not in pair.view.consumers()


def test_what_is_refused_keeps_nothing_else_back(pair: LedgerPair) -> None:
    refused, taken = pair.begun(request_id="x1"), pair.begun(request_id="x2")
    last_id = f"{2**64 - 1}-{2**64 - 1}"
    pair.client.xadd(pair.keys.reply("x1"), {"type": "tokens", "tokens": 0}, id=last_id)  # nothing can follow it
    frames = [delivery.tokens_frame(Chunk(" 1", [1], 0)) for delivery in (refused, taken)]
    written = pair.one.write(frames, [delivery.success(Result(id=delivery.request_id)) for delivery in (refused, taken)])
    assert isinstance(written.positions, redis.ResponseError)
    error, settled = written.settled
    assert isinstance(error, redis.ResponseError)
    assert settled == Settled("written", 0)
    assert [entry["message_id"].decode() for entry in pair.view.pending()] == [refused.entry.id]


def test_dead_letters_key_of_another_type_is_not_in_the_way(pair: LedgerPair) -> None:
    pair.client.set(pair.keys.dead, "not a stream")
    assert settle(pair.one, pair.begun().failure(Poisoned("given up"))).outcome == "written"
    assert pair.client.xlen(pair.keys.dead) == 1


def test_key_of_another_type_is_not_in_the_way(pair: LedgerPair) -> None:
    delivery = pair.begun()
    pair.client.set(pair.keys.reply("x1"), "not a stream")
    pair.client.delete(pair.keys.state("x1"))
    pair.client.set(pair.keys.state("x1"), "not a hash")
    assert finish(pair.one, delivery).outcome == "written"
    assert pair.view.finals("x1") == 1


def test_scripts_survive_a_server_that_forgot_them(pair: LedgerPair) -> None:
    delivery = pair.begun()
    pair.client.script_flush()
    frame = delivery.tokens_frame(Chunk(" 1", [1], 0))
    written = pair.one.write([frame], [delivery.success(Result(id="x1"))])
    assert (written.positions, written.settled) == ([1], [Settled("written", 1)])
    assert [frame[b"type"] for frame in pair.view.frames("x1")] == [b"tokens", b"final"]


def test_entry_without_usable_id_is_answered_under_its_own(pair: LedgerPair) -> None:
    pair.client.xadd(pair.keys.stream("realtime"), {"json": BODY})
    (delivery,) = pair.read()
    assert delivery.request_id == delivery.entry.id
    assert begin(pair.one, delivery).verdict == "run"


def test_final_reply_is_written_when_memory_is_full(server_kind: str, queue: str) -> None:
    with Server(server_kind) as server, connect(server.url) as client:
        pair = LedgerPair(client, queue)
        delivery = pair.begun()
        client.config_set("maxmemory", "1")
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            publish(pair.one, delivery, 0, 1)
        assert pair.one.renew([delivery]) == []
        assert finish(pair.one, delivery).outcome == "written"
