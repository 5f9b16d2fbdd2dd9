from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from producer import scripts
from producer.codec import decode_error, decode_frame, decode_result, encode_body
from producer.connection import connect
from producer.errors import Cancelled, DeadlineExceeded, Poisoned
from producer.keys import GROUP, Keys
from producer.wire import Chunk, Result
from tests.servers import Server
from tests.workers import QueueView
from worker.stream.consumer import Consumer, Entry
from worker.stream.delivery import Delivery, Settlement
from worker.stream.ledger import Begun, Ledger, Settled

BODY = b'{"prompt":"hi"}'


class Bench:
    """A queue with two consumers on it."""

    def __init__(self, client: redis.Redis, queue: str) -> None:
        self.client = client
        self.keys = Keys(queue)
        self.view = QueueView(client, queue)
        self.one, self.two = (self.ledger(name) for name in ("one", "two"))
        Consumer(client, self.keys, "one", 1.0).ensure_groups()

    def ledger(self, name: str, **options: Any) -> Ledger:
        return Ledger(self.client, self.keys, name, **{"max_attempts": 3, "reply_ttl_s": 3600, "state_ttl_s": 86400} | options)

    def put(self, request_id: str = "x1", tier: str = "realtime", **fields: Any) -> str:
        entry: bytes = self.client.xadd(self.keys.prefix + tier, {"id": request_id, "json": BODY, **fields})
        return entry.decode()

    def read(self, name: str = "one", lease_s: float = 1.0) -> list[Delivery]:
        entries = Consumer(self.client, self.keys, name, lease_s).read({"realtime": 10, "batch": 10}, block_ms=1)
        return [Delivery(entry) for entry in entries]

    def begun(self, name: str = "one", **fields: Any) -> Delivery:
        """A request that consumer ``name`` has and runs."""
        self.put(**fields)
        (delivery,) = self.read(name)
        (begun,) = self.ledger(name).begin([delivery])
        assert begun.verdict == "run"
        return delivery

    def stolen_by(self, name: str, delivery: Delivery) -> Delivery:
        """The same entry as another consumer's, as if the lease had lapsed."""
        self.client.xclaim(self.keys.stream(delivery.tier), GROUP, name, 0, [delivery.entry.id])
        return Delivery(delivery.entry)

    def count(self, delivery: Delivery) -> int:
        (pending,) = self.client.xpending_range(self.keys.stream(delivery.tier), GROUP, delivery.entry.id, delivery.entry.id, 1)
        return int(pending["times_delivered"])


@pytest.fixture
def bench(any_server: Server, queue: str) -> Iterator[Bench]:
    with connect(any_server.url) as client:
        yield Bench(client, queue)


def settle(ledger: Ledger, settlement: Settlement) -> Settled:
    (settled,) = ledger.write([], [settlement]).settled
    assert isinstance(settled, Settled), settled
    return settled


def finish(ledger: Ledger, delivery: Delivery, text: str = "ok") -> Settled:
    return settle(ledger, delivery.finish(Result(id=delivery.request_id, text=text)))


def publish(ledger: Ledger, delivery: Delivery, index: int, *tokens: int) -> int | None:
    positions = ledger.write([delivery.publish(Chunk("".join(f" {t}" for t in tokens), list(tokens), index))], []).positions
    if isinstance(positions, redis.ResponseError):
        raise positions
    (position,) = positions
    return position


def begin(ledger: Ledger, delivery: Delivery) -> Begun:
    (begun,) = ledger.begin([delivery])
    return begun


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


def test_final_reply_acks_deletes_and_expires_in_one_go(bench: Bench) -> None:
    delivery = bench.begun()
    assert finish(bench.one, delivery).outcome == "written"
    (frame,) = bench.view.frames("x1")
    assert decode_result(decode_frame(frame)).text == "ok"
    assert (bench.view.length(), bench.view.pending()) == (0, [])
    assert 0 < bench.client.pttl(bench.keys.reply("x1")) <= 3_600_000
    assert 0 < bench.client.pttl(bench.keys.state("x1")) <= 86_400_000
    assert bench.view.state("x1")["status"] == "done"


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


def test_suspect_counts_only_once_it_runs_alone(bench: Bench) -> None:
    delivery = bench.begun()
    bench.stolen_by("two", delivery)
    suspect = bench.stolen_by("one", delivery)
    assert begin(bench.one, suspect).verdict == "suspect"
    assert suspect.attempt == 3
    suspect.count = 2
    bench.one.renew([suspect])
    assert bench.count(suspect) == 2
    assert bench.one.begin_held([suspect])[0].verdict == "run"
    assert (bench.count(suspect), suspect.attempt, bench.view.state("x1")["attempt"]) == (3, 3, "3")


def test_held_request_is_queued_and_counts_only_once_its_turn_comes(bench: Bench) -> None:
    bench.put()
    (first,) = bench.read()
    for name, take in (("one", lambda: first), ("two", lambda: bench.stolen_by("two", first))):
        ledger, delivery = bench.ledger(name), take()
        for _ in range(2):  # a call whose reply was lost is sent again
            (held,) = ledger.hold([delivery])
        assert (held.verdict, delivery.attempt, bench.view.state("x1")["status"]) == ("held", 1, "queued")
        delivery.count = 0
        assert ledger.renew([delivery]) == []
        assert bench.count(delivery) == 0
    assert [begun.verdict for _ in range(2) for begun in bench.two.begin_held([delivery])] == ["run", "run"]
    assert (bench.count(delivery), delivery.count, bench.view.state("x1")["status"]) == (1, 1, "running")


def test_held_request_that_is_cancelled_or_late_is_told_when_its_turn_comes(bench: Bench) -> None:
    seconds, _ = bench.client.time()
    bench.put("cancelled")
    bench.put("late")
    held = bench.read()
    assert [begun.verdict for begun in bench.one.hold(held)] == ["held", "held"]
    body = encode_body({"code": "CANCELLED"}, "json")
    script_keys = (bench.keys.state("cancelled"), bench.keys.reply("cancelled"), bench.keys.control)
    assert scripts.load("cancel")(bench.client, script_keys, ("cancelled", body, body, 1000, 1000)) == b"cancelled"
    bench.client.hset(bench.keys.state("late"), "deadline_ms", seconds * 1000 - 1)
    assert [begun.verdict for begun in bench.one.begin_held(held)] == ["settled", "expired"]


def test_request_held_after_two_crashes_is_a_suspect_and_after_more_is_given_up(bench: Bench) -> None:
    delivery = bench.begun()
    for name, verdict in (("two", "held"), ("one", "suspect"), ("two", "poisoned")):
        delivery = bench.stolen_by(name, delivery)
        assert bench.ledger(name).hold([delivery])[0].verdict == verdict


def test_crowd_is_renewed_and_handed_back_page_by_page(bench: Bench) -> None:
    for i in range(600):
        bench.put(f"x{i}")
    consumer = Consumer(bench.client, bench.keys, "one", 1.0)
    crowd = [Delivery(entry) for _ in range(6) for entry in consumer.read({"realtime": 100}, 1)]
    lost = bench.stolen_by("two", crowd[555])
    assert bench.one.renew(crowd) == [crowd[555]]
    assert bench.one.release(crowd, to="two") == 599
    assert {order[b"for"] for _, order in bench.client.xrange(bench.keys.control)} == {b"two"}
    assert bench.count(lost) == 2


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


def test_renewing_is_no_attempt(bench: Bench) -> None:
    delivery = bench.begun()
    bench.client.xclaim(bench.keys.stream("realtime"), GROUP, "one", 0, [delivery.entry.id])  # its own scan took it again
    for _ in range(3):
        assert bench.one.renew([delivery]) == []
    assert bench.count(delivery) == 1


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


def test_own_pending_entries_keep_their_count_unless_their_process_died(bench: Bench) -> None:
    bench.put("a")
    bench.put("b", tier="batch")
    known, unknown = bench.read("one")
    consumer = Consumer(bench.client, bench.keys, "one", 1.0)

    def knows(tier: str, entry_id: str) -> bool:
        return (tier, entry_id) == (known.tier, known.entry.id)

    assert [entry.id for entry in consumer.own_pending(knows, crashed=False)] == [unknown.entry.id]
    assert bench.count(unknown) == 1
    restarted = [Delivery(entry) for entry in consumer.own_pending(lambda *_: False, crashed=True)]
    assert [begun.verdict for begun in bench.one.hold(restarted)] == ["held", "held"]
    assert [delivery.attempt for delivery in restarted] == [2, 2]
    assert (bench.count(known), bench.count(unknown)) == (1, 1)


def test_own_entry_that_was_handed_back_and_that_nobody_took_is_delivered_again(bench: Bench) -> None:
    delivery = bench.begun()
    bench.one.release([delivery])
    (again,) = Consumer(bench.client, bench.keys, "one", 1.0).own_pending(lambda *_: False, crashed=False)
    assert bench.one.hold([taken := Delivery(again)])[0].verdict == "held"
    assert taken.attempt == 1


def test_claiming_over_and_over_is_no_attempt_until_it_is_begun(bench: Bench) -> None:
    delivery = bench.begun()
    for name in ("two", "one", "two", "one", "two"):  # each dies before it comes to it
        (entry,) = Consumer(bench.client, bench.keys, name, 0.0).claim("realtime", 10)
    (begun,) = bench.two.hold([taken := Delivery(entry)])
    assert (begun.verdict, taken.attempt, bench.count(taken)) == ("held", 2, 1)
    bench.two.begin_held([taken])
    assert bench.count(delivery) == 2


def test_claiming_goes_round_a_pending_list_longer_than_a_page(bench: Bench) -> None:
    ids = {bench.put(f"x{i}") for i in range(25)}
    for _ in range(3):
        bench.read("one")
    consumer = Consumer(bench.client, bench.keys, "two", 0.0)
    claimed: list[Entry] = []
    while len(claimed) < 25:
        page = consumer.claim("realtime", 4)
        assert len(page) <= 4
        claimed += page
    assert {entry.id for entry in claimed} == ids


def test_entry_deleted_while_pending_is_dropped_by_the_claim(bench: Bench) -> None:
    entry = bench.put("x1")
    bench.read("one")
    bench.client.xdel(bench.keys.stream("realtime"), entry)
    assert Consumer(bench.client, bench.keys, "two", 0.0).claim("realtime", 10) == []
    assert bench.view.pending() == []


def test_realtime_is_read_first_and_alone_where_batch_has_no_room(bench: Bench) -> None:
    bench.put("b", tier="batch")
    bench.put("r")
    consumer = Consumer(bench.client, bench.keys, "one", 1.0)
    assert [entry.tier for entry in consumer.read({"realtime": 5, "batch": 0}, 1)] == ["realtime"]
    bench.put("r2")
    assert [entry.tier for entry in consumer.read({"realtime": 5, "batch": 5}, 1)] == ["realtime", "batch"]


def test_look_does_not_wait_and_does_not_count(bench: Bench) -> None:
    consumer = Consumer(bench.client, bench.keys, "one", 1.0)
    assert consumer.look({"realtime": 5, "batch": 5}) == []
    for tier in ("batch", "realtime"):
        bench.put(f"of-{tier}", tier=tier)
    entries = consumer.look({"realtime": 5, "batch": 5})
    assert [(entry.tier, entry.fields[b"id"]) for entry in entries] == [("realtime", b"of-realtime"), ("batch", b"of-batch")]
    assert [bench.count(Delivery(entry)) for entry in entries] == [0, 0]
    again = [Delivery(entry) for entry in consumer.own_pending(lambda *_: False, crashed=False)]  # the reply was lost
    for deliveries in ([Delivery(entry) for entry in entries], again):
        bench.one.hold(deliveries)
        assert [delivery.attempt for delivery in deliveries] == [1, 1]


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


def test_waiting_for_entries_ends_with_the_first(bench: Bench) -> None:
    consumer = Consumer(bench.client, bench.keys, "one", 1.0)
    started_s = time.monotonic()
    assert consumer.read({"realtime": 1}, block_ms=50) == []
    assert time.monotonic() - started_s >= 0.05
