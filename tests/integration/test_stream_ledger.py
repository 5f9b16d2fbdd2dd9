from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis

from producer import scripts
from producer.codec import decode_error, decode_frame, decode_result, encode_body
from producer.connection import connect
from producer.errors import Cancelled, DeadlineExceeded, Poisoned
from producer.keys import GROUP
from producer.wire import Chunk, Result
from tests.ledgers import BODY, Bench, begin, finish, publish, settle
from tests.servers import Server
from worker.stream.consumer import Consumer
from worker.stream.delivery import Delivery
from worker.stream.ledger import Settled


def test_bare_entry_gets_a_state_when_it_is_begun(bench: Bench) -> None:
    entry = bench.put("x1")
    (delivery,) = bench.read()
    begun = begin(bench.one, delivery)
    assert (begun.verdict, begun.published, begun.streamed, delivery.attempt) == ("run", 0, False, 1)
    assert begun.enqueued_ms == int(entry.split("-")[0])
    state = bench.view.state("x1")
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


def test_state_keeps_when_it_was_first_begun_and_had_its_first_token(bench: Bench) -> None:
    delivery = bench.begun()
    assert (delivery.started_ms, delivery.first_token_ms) == (int(bench.view.state("x1")["started_ms"]), None)
    bench.client.hset(bench.keys.state("x1"), "started_ms", 1000)
    delivery.first_token_ms = 2000
    publish(bench.one, delivery, 0, 1)
    later = bench.stolen_by("two", delivery)
    begin(bench.two, later)
    assert (later.started_ms, later.first_token_ms) == (1000, 2000)
    later.first_token_ms = 3000
    publish(bench.two, later, 1, 2)
    finish(bench.two, later)
    state = bench.view.state("x1")
    assert (state["started_ms"], state["first_token_ms"]) == ("1000", "2000")


def test_publishing_makes_no_state_that_would_never_expire(bench: Bench) -> None:
    delivery = bench.begun()
    bench.client.delete(bench.keys.state("x1"))
    delivery.first_token_ms = 2000
    assert publish(bench.one, delivery, 0, 1) == 1
    assert bench.view.state("x1") == {}


def test_final_reply_acks_deletes_and_expires_in_one_go(bench: Bench) -> None:
    delivery = bench.begun()
    assert finish(bench.one, delivery).outcome == "written"
    (frame,) = bench.view.frames("x1")
    assert decode_result(decode_frame(frame)).text == "ok"
    assert (bench.view.length(), bench.view.pending()) == (0, [])
    assert 0 < bench.client.pttl(bench.keys.reply("x1")) <= 3_600_000
    assert 0 < bench.client.pttl(bench.keys.state("x1")) <= 86_400_000
    assert bench.view.state("x1")["status"] == "done"


def test_every_round_trip_is_timed_whatever_it_is_for(bench: Bench) -> None:
    bench.put("x1")
    (delivery,) = bench.read()
    acts: list[Callable[[], object]] = [
        lambda: begin(bench.one, delivery),
        lambda: publish(bench.one, delivery, 0, 1),
        lambda: bench.one.renew([delivery]),
        lambda: finish(bench.one, delivery),
        lambda: bench.one.release([delivery]),
    ]
    for count, act in enumerate(acts, start=1):
        act()
        assert len(bench.round_trips) == count
    assert min(bench.round_trips) > 0


def test_a_call_sent_twice_writes_once(bench: Bench) -> None:
    delivery = bench.begun()
    assert [publish(bench.one, delivery, 0, 1, 2) for _ in range(2)] == [2, 2]
    assert [finish(bench.one, delivery).outcome for _ in range(2)] == ["written", "written"]
    assert [frame[b"type"] for frame in bench.view.frames("x1")] == [b"tokens", b"final"]


@pytest.mark.parametrize("act", ["publish", "finish", "renew", "release", "begin"])
def test_whoever_lost_the_entry_changes_nothing(bench: Bench, act: str) -> None:
    delivery = bench.begun()
    other = bench.stolen_by("two", delivery)
    begin(bench.two, other)
    before = bench.client.xlen(bench.keys.control), bench.view.state("x1")
    outcome: Callable[[], Any] = {
        "publish": lambda: publish(bench.one, delivery, 0, 1),
        "finish": lambda: finish(bench.one, delivery).outcome,
        "renew": lambda: bench.one.renew([delivery]) == [delivery],
        "release": lambda: bench.one.release([delivery]),
        "begin": lambda: begin(bench.one, delivery).verdict,
    }[act]
    assert outcome() == {"publish": None, "finish": "lost", "renew": True, "release": 0, "begin": "lost"}[act]
    assert bench.view.frames("x1") == []
    assert (bench.client.xlen(bench.keys.control), bench.view.state("x1")) == before
    (pending,) = bench.view.pending()
    assert (pending["consumer"], pending["times_delivered"]) == (b"two", 2)
    assert finish(bench.two, other).outcome == "written"


def test_frames_continue_over_attempts_and_come_back_in_order(bench: Bench) -> None:
    delivery = bench.begun()
    publish(bench.one, delivery, 0, 1, 2)
    publish(bench.one, delivery, 2, 3)
    other = bench.stolen_by("two", delivery)
    assert begin(bench.two, other).published == 3
    assert other.attempt == 2
    assert publish(bench.two, other, 3, 4) == 4
    chunks = bench.two.published(other)
    assert [(chunk.index, chunk.token_ids, chunk.attempt) for chunk in chunks] == [(0, [1, 2], 1), (2, [3], 1), (3, [4], 2)]
    assert "".join(chunk.text for chunk in chunks) == " 1 2 3 4"


def test_frame_that_does_not_continue_says_where_to_go_on(bench: Bench) -> None:
    delivery = bench.begun()
    publish(bench.one, delivery, 0, 1, 2)
    assert publish(bench.one, delivery, 5, 6) == 2  # Redis lost its last writes
    assert publish(bench.one, delivery, 0, 1) == 2  # our call's reply was lost
    assert len(bench.view.frames("x1")) == 1


def test_tail_is_written_with_the_final_frame_or_not_at_all(bench: Bench) -> None:
    delivery = bench.begun()
    publish(bench.one, delivery, 0, 1)
    result = Result(id="x1", text=" 1 2 3", token_ids=[1, 2, 3])
    settled = settle(bench.one, delivery.finish(result, delivery.publish(Chunk(" 3", [3], 2))))
    assert (settled.outcome, settled.published) == ("behind", 1)
    assert len(bench.view.pending()) == 1
    settled = settle(bench.one, delivery.finish(result, delivery.publish(Chunk(" 2 3", [2, 3], 1))))
    assert settled.outcome == "written"
    assert [frame[b"type"] for frame in bench.view.frames("x1")] == [b"tokens", b"tokens", b"final"]


@pytest.mark.parametrize("loss", ["flushall", "delete the stream", "delete the entry"])
def test_answer_is_written_when_nobody_else_can(bench: Bench, loss: str) -> None:
    delivery = bench.begun()
    if loss == "flushall":
        bench.client.flushall()
    elif loss == "delete the stream":
        bench.client.delete(bench.keys.stream("realtime"))
    else:
        bench.client.xdel(bench.keys.stream("realtime"), delivery.entry.id)
    assert bench.one.renew([delivery]) == []
    assert publish(bench.one, delivery, 0, 1) == 1
    assert finish(bench.one, delivery).outcome == "written"
    assert bench.view.finals("x1") == 1


def test_answer_is_left_to_the_next_owner_when_only_the_group_was_lost(bench: Bench) -> None:
    delivery = bench.begun()
    bench.client.xgroup_destroy(bench.keys.stream("realtime"), GROUP)
    assert bench.one.renew([delivery]) == [delivery]
    assert finish(bench.one, delivery).outcome == "lost"
    Consumer(bench.client, bench.keys, "one", 1.0).ensure_groups()
    (again,) = bench.read("two")
    assert begin(bench.two, again).verdict == "run"


def test_an_id_that_has_its_final_reply_is_not_run_again(bench: Bench) -> None:
    finish(bench.one, bench.begun())
    bench.put("x1")
    (again,) = bench.read()
    assert begin(bench.one, again).verdict == "settled"
    assert (bench.view.length(), bench.view.pending(), bench.view.finals("x1")) == (0, [], 1)


def test_an_id_put_twice_is_run_once(bench: Bench) -> None:
    first = bench.begun()
    bench.put("x1", tier="batch")
    (second,) = bench.read("two")
    assert begin(bench.two, second).verdict == "duplicate"
    assert bench.view.length() == 1
    assert finish(bench.one, first).outcome == "written"


def test_an_id_put_again_after_its_first_entry_was_lost_is_run(bench: Bench) -> None:
    first = bench.begun()
    bench.client.xdel(bench.keys.stream("realtime"), first.entry.id)
    bench.put("x1")
    (second,) = bench.read()
    assert begin(bench.one, second).verdict == "run"


def test_cancelled_request_is_not_run(bench: Bench) -> None:
    bench.client.hset(bench.keys.state("x1"), "cancel", "1")
    bench.put("x1")
    (delivery,) = bench.read()
    assert begin(bench.one, delivery).verdict == "cancelled"
    settled = settle(bench.one, delivery.fail(Cancelled("cancelled")))
    assert settled.outcome == "written"
    assert bench.view.state("x1")["status"] == "cancelled"


def test_request_cancelled_while_queued_is_discarded(bench: Bench) -> None:
    entry = bench.put("x1")
    bench.client.hset(bench.keys.state("x1"), mapping={"status": "queued", "entry": entry, "tier": "realtime"})
    body = encode_body({"code": "CANCELLED"}, "json")
    script_keys = (bench.keys.state("x1"), bench.keys.reply("x1"), bench.keys.control)
    assert scripts.load("cancel")(bench.client, script_keys, ("x1", body, body, 1000, 1000)) == b"cancelled"
    (delivery,) = bench.read()
    assert begin(bench.one, delivery).verdict == "settled"
    assert (bench.view.length(), bench.view.finals("x1")) == (0, 1)


def test_deadline_that_passed_in_the_queue_is_told_by_redis_time(bench: Bench) -> None:
    seconds, _ = bench.client.time()
    bench.put("late", deadline_ms=seconds * 1000 - 1000)
    bench.put("early", deadline_ms=seconds * 1000 + 60_000)
    late, early = bench.read()
    assert [begun.verdict for begun in bench.one.begin([late, early])] == ["expired", "run"]
    settled = settle(bench.one, late.fail(DeadlineExceeded("late")))
    assert settled.outcome == "written"
    assert bench.view.state("late")["code"] == "DEADLINE_EXCEEDED"


def test_poisoned_request_is_answered_and_dead_lettered(bench: Bench) -> None:
    delivery = bench.begun(source="nightly")
    for name in ("two", "one", "two"):
        last = bench.stolen_by(name, delivery)
    assert begin(bench.two, last).verdict == "poisoned"
    settled = settle(bench.two, last.fail(Poisoned("given up")))
    assert settled.outcome == "written"
    (frame,) = bench.view.frames("x1")
    assert decode_error(decode_frame(frame)).code == "POISONED"
    ((_, letter),) = bench.client.xrange(bench.keys.dead)
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
    assert (bench.view.length(), bench.view.pending()) == (0, [])


@pytest.mark.parametrize(("crashed", "attempt"), [(False, 1), (True, 2)])
def test_released_request_is_claimable_at_once(bench: Bench, crashed: bool, attempt: int) -> None:
    delivery = bench.begun()
    assert bench.one.release([delivery], crashed=crashed) == 1
    assert bench.view.state("x1")["status"] == "queued"
    ((_, order),) = bench.client.xrange(bench.keys.control)
    assert order == {b"op": b"claim", b"worker": b"one", b"for": b""}
    (entry,) = Consumer(bench.client, bench.keys, "two", 3600.0).claim("realtime", 10)
    assert bench.two.hold([taken := Delivery(entry)])[0].verdict == "held"
    assert taken.attempt == attempt


def test_consumer_is_removed_only_without_heartbeat_and_pending_entries(bench: Bench) -> None:
    delivery = bench.begun()
    assert bench.two.reap(["one"]) == 1  # it has nothing on the batch stream
    finish(bench.one, delivery)
    bench.client.hset(bench.keys.worker("one"), "state", "running")
    assert bench.two.reap(["one"]) == 0
    bench.client.delete(bench.keys.worker("one"))
    bench.two.reap(["one"])
    assert "one" not in bench.view.consumers()


def test_what_is_refused_keeps_nothing_else_back(bench: Bench) -> None:
    refused, taken = bench.begun(request_id="x1"), bench.begun(request_id="x2")
    last_id = f"{2**64 - 1}-{2**64 - 1}"
    bench.client.xadd(bench.keys.reply("x1"), {"type": "tokens", "tokens": 0}, id=last_id)  # nothing can follow it
    frames = [delivery.publish(Chunk(" 1", [1], 0)) for delivery in (refused, taken)]
    written = bench.one.write(frames, [delivery.finish(Result(id=delivery.request_id)) for delivery in (refused, taken)])
    assert isinstance(written.positions, redis.ResponseError)
    error, settled = written.settled
    assert isinstance(error, redis.ResponseError)
    assert settled == Settled("written", 0)
    assert [entry["message_id"].decode() for entry in bench.view.pending()] == [refused.entry.id]


def test_dead_letters_key_of_another_type_is_not_in_the_way(bench: Bench) -> None:
    bench.client.set(bench.keys.dead, "not a stream")
    assert settle(bench.one, bench.begun().fail(Poisoned("given up"))).outcome == "written"
    assert bench.client.xlen(bench.keys.dead) == 1


def test_key_of_another_type_is_not_in_the_way(bench: Bench) -> None:
    delivery = bench.begun()
    bench.client.set(bench.keys.reply("x1"), "not a stream")
    bench.client.delete(bench.keys.state("x1"))
    bench.client.set(bench.keys.state("x1"), "not a hash")
    assert finish(bench.one, delivery).outcome == "written"
    assert bench.view.finals("x1") == 1


def test_scripts_survive_a_server_that_forgot_them(bench: Bench) -> None:
    delivery = bench.begun()
    bench.client.script_flush()
    frame = delivery.publish(Chunk(" 1", [1], 0))
    written = bench.one.write([frame], [delivery.finish(Result(id="x1"))])
    assert (written.positions, written.settled) == ([1], [Settled("written", 1)])
    assert [frame[b"type"] for frame in bench.view.frames("x1")] == [b"tokens", b"final"]


def test_entry_without_usable_id_is_answered_under_its_own(bench: Bench) -> None:
    bench.client.xadd(bench.keys.stream("realtime"), {"json": BODY})
    (delivery,) = bench.read()
    assert delivery.request_id == delivery.entry.id
    assert begin(bench.one, delivery).verdict == "run"


def test_final_reply_is_written_when_memory_is_full(server_kind: str, queue: str) -> None:
    with Server(server_kind) as server, connect(server.url) as client:
        bench = Bench(client, queue)
        delivery = bench.begun()
        client.config_set("maxmemory", "1")
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            publish(bench.one, delivery, 0, 1)
        assert bench.one.renew([delivery]) == []
        assert finish(bench.one, delivery).outcome == "written"
