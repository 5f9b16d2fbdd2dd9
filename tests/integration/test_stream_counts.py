"""Who is given which entry, and which deliveries count."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from producer import scripts
from producer.codec import encode_body
from producer.keys import GROUP
from tests.ledgers import LedgerPair, begin, publish
from worker.stream.consumer import Consumer, Entry
from worker.stream.delivery import Delivery


def test_suspect_counts_only_once_it_runs_alone(pair: LedgerPair) -> None:
    delivery = pair.begun()
    pair.stolen_by("two", delivery)
    suspect = pair.stolen_by("one", delivery)
    assert begin(pair.one, suspect).verdict == "suspect"
    assert (suspect.attempt, suspect.count) == (3, 2)
    pair.one.write_counts([suspect])
    assert pair.count(suspect) == 2
    assert pair.one.begin_held([suspect])[0].verdict == "run"
    assert (pair.count(suspect), suspect.attempt, pair.view.state("x1")["attempt"]) == (3, 3, "3")


def test_held_request_is_queued_and_counts_only_once_its_turn_comes(pair: LedgerPair) -> None:
    pair.put()
    (first,) = pair.read()
    for name, take in (("one", lambda: first), ("two", lambda: pair.stolen_by("two", first))):
        ledger, delivery = pair.ledger(name), take()
        for _ in range(2):  # a call whose reply was lost is sent again
            (held,) = ledger.hold([delivery])
        assert (held.verdict, delivery.attempt, pair.view.state("x1")["status"]) == ("held", 1, "queued")
        assert delivery.count == 0
        ledger.write_counts([delivery])
        assert pair.count(delivery) == 0
        ledger.hold([delivery])  # asked again, after trouble elsewhere
        assert delivery.attempt == 1
    assert [begun.verdict for _ in range(2) for begun in pair.two.begin_held([delivery])] == ["run", "run"]
    assert (pair.count(delivery), delivery.count, pair.view.state("x1")["status"]) == (1, 1, "running")


def test_held_request_that_is_cancelled_or_late_is_told_when_its_turn_comes(pair: LedgerPair) -> None:
    seconds, _ = pair.client.time()
    pair.put("cancelled")
    pair.put("late")
    held = pair.read()
    assert [begun.verdict for begun in pair.one.hold(held)] == ["held", "held"]
    body = encode_body({"code": "CANCELLED"}, "json")
    script_keys = (pair.keys.reply("cancelled"), pair.keys.state("cancelled"), pair.keys.control)
    assert scripts.load("cancel")(pair.client, script_keys, ("cancelled", body, body, 1000, 1000, 1000)) == b"cancelled"
    pair.client.hset(pair.keys.state("late"), "deadline_ms", seconds * 1000 - 1)
    assert [begun.verdict for begun in pair.one.begin_held(held)] == ["settled", "expired"]


def test_request_held_after_two_crashes_is_a_suspect_and_after_more_is_given_up(pair: LedgerPair) -> None:
    delivery = pair.begun()
    for name, verdict in (("two", "held"), ("one", "suspect"), ("two", "poisoned")):
        delivery = pair.stolen_by(name, delivery)
        assert pair.ledger(name).hold([delivery])[0].verdict == verdict


def test_only_deaths_since_the_last_progress_count(pair: LedgerPair) -> None:
    """A generation of hours on hosts that come and go dies often, but is not poison."""
    delivery = pair.begun()
    assert publish(pair.one, delivery, 0, 0) == 1
    for attempt in range(2, 9):
        delivery = pair.stolen_by("two", delivery)
        assert (begin(pair.two, delivery).verdict, delivery.attempt) == ("run", attempt)
        assert publish(pair.two, delivery, attempt - 1, attempt) == attempt
    assert pair.view.state("x1")["progress_attempt"] == "8"
    for attempt, verdict in enumerate(("run", "suspect", "poisoned"), start=9):
        delivery = pair.stolen_by("one", delivery)
        assert (begin(pair.one, delivery).verdict, delivery.attempt) == (verdict, attempt)
        publish(pair.one, delivery, 0, 0)  # which is published already: no progress


def test_progress_under_a_group_that_is_gone_forgives_no_death_under_the_new_one(pair: LedgerPair) -> None:
    delivery = pair.begun()
    pair.client.hset(pair.keys.state("x1"), "progress_attempt", 6)
    for verdict in ("run", "suspect", "poisoned"):
        delivery = pair.stolen_by("two", delivery)
        assert begin(pair.two, delivery).verdict == verdict


def test_crowd_is_renewed_and_handed_back_page_by_page(pair: LedgerPair) -> None:
    for i in range(600):
        pair.put(f"x{i}")
    consumer = Consumer(pair.client, pair.keys, "one", 1.0)
    crowd = [Delivery(entry) for _ in range(6) for entry in consumer.read({"realtime": 100}, 1)]
    lost = pair.stolen_by("two", crowd[555])
    assert pair.one.renew(crowd) == [crowd[555]]
    assert pair.one.release(crowd, to="two") == 599
    assert {order[b"for"] for _, order in pair.client.xrange(pair.keys.control)} == {b"two"}
    assert pair.count(lost) == 2


def test_renewing_is_no_attempt(pair: LedgerPair) -> None:
    delivery = pair.begun()
    pair.client.xclaim(pair.keys.stream("realtime"), GROUP, "one", 0, [delivery.entry.id])  # its own scan took it again
    for _ in range(3):
        assert pair.one.renew([delivery]) == []
    assert pair.count(delivery) == 1


def test_own_pending_entries_keep_their_count_unless_their_process_died(pair: LedgerPair) -> None:
    pair.put("a")
    pair.put("b", tier="batch")
    known, unknown = pair.read("one")
    consumer = Consumer(pair.client, pair.keys, "one", 1.0)

    def knows(tier: str, entry_id: str) -> bool:
        return (tier, entry_id) == (known.tier, known.entry.id)

    assert [entry.id for entry in consumer.own_pending(knows, crashed=False)] == [unknown.entry.id]
    assert pair.count(unknown) == 1
    restarted = [Delivery(entry) for entry in consumer.own_pending(lambda *_: False, crashed=True)]
    assert [begun.verdict for begun in pair.one.hold(restarted)] == ["held", "held"]
    assert [delivery.attempt for delivery in restarted] == [2, 2]
    assert (pair.count(known), pair.count(unknown)) == (1, 1)


def test_entry_that_another_claims_while_it_is_reread_is_left_to_it(pair: LedgerPair) -> None:
    delivery = pair.begun()
    pair.put("x2")
    pair.read()

    def claimed_by_another(_: str, entry_id: str) -> bool:  # called between reading the list and the claim
        if entry_id == delivery.entry.id:
            pair.stolen_by("two", delivery)
        return False

    reread = Consumer(pair.client, pair.keys, "one", 1.0).own_pending(claimed_by_another, crashed=False)
    assert [entry.fields[b"id"] for entry in reread] == [b"x2"]
    assert pair.two.renew([delivery]) == []


def test_own_entry_that_was_handed_back_and_that_nobody_took_is_delivered_again(pair: LedgerPair) -> None:
    delivery = pair.begun()
    pair.one.release([delivery])
    (again,) = Consumer(pair.client, pair.keys, "one", 1.0).own_pending(lambda *_: False, crashed=False)
    assert pair.one.hold([taken := Delivery(again)])[0].verdict == "held"
    assert taken.attempt == 1


def handed_back(pair: LedgerPair) -> None:
    pair.one.release([pair.begun()])


def read_reply_lost(pair: LedgerPair) -> None:
    pair.put()
    pair.read()


def read_now_reply_lost(pair: LedgerPair) -> None:
    pair.put()
    Consumer(pair.client, pair.keys, "one", 0.0).read_now({"realtime": 1})


def claim_reply_lost(pair: LedgerPair) -> None:
    delivery = pair.begun("two")
    pair.client.xclaim(pair.keys.stream("realtime"), GROUP, "two", 0, [delivery.entry.id])  # died, and was begun again
    Consumer(pair.client, pair.keys, "one", 0.0).claim("realtime", 1)


def claim_reply_lost_of_one_that_died_once(pair: LedgerPair) -> None:
    pair.begun("two")
    Consumer(pair.client, pair.keys, "one", 0.0).claim("realtime", 1)


def read_reply_lost_longer_ago_than_a_lease(pair: LedgerPair) -> None:
    pair.put()
    (delivery,) = pair.read()
    pair.client.xclaim(pair.keys.stream("realtime"), GROUP, "one", 0, [delivery.entry.id], idle=3_600_000, retrycount=1)


def process_died(pair: LedgerPair) -> None:
    pair.begun()


@pytest.mark.parametrize(
    ("before", "crashed", "attempt"),
    [
        (read_reply_lost, False, 1),
        (read_now_reply_lost, False, 1),
        (handed_back, False, 1),
        (process_died, True, 2),
        (claim_reply_lost, False, 3),
        (claim_reply_lost_of_one_that_died_once, False, 2),
        (read_reply_lost_longer_ago_than_a_lease, False, 1),
    ],
)
def test_what_a_worker_rereads_counts_once_however_often_it_asks(
    pair: LedgerPair, before: Callable[[LedgerPair], None], crashed: bool, attempt: int
) -> None:
    """Redis may be in trouble in between. What counts is that it is begun: a crash then is one."""
    before(pair)
    consumer = Consumer(pair.client, pair.keys, "one", 1.0)
    for _ in range(3):
        (entry,) = consumer.own_pending(lambda *_: False, crashed=crashed)
    (begun,) = (pair.one.begin if entry.counted else pair.one.hold)([delivery := Delivery(entry)])
    if begun.verdict != "run":
        (begun,) = pair.one.begin_held([delivery])
    assert (begun.verdict, delivery.attempt, pair.count(delivery)) == ("run", attempt, attempt)


def test_claiming_over_and_over_is_no_attempt_until_it_is_begun(pair: LedgerPair) -> None:
    delivery = pair.begun()
    for name in ("two", "one", "two", "one", "two"):  # each dies before it comes to it
        (entry,) = Consumer(pair.client, pair.keys, name, 0.0).claim("realtime", 10)
    (begun,) = pair.two.hold([taken := Delivery(entry)])
    assert (begun.verdict, taken.attempt, pair.count(taken)) == ("held", 2, 1)
    pair.two.begin_held([taken])
    assert pair.count(delivery) == 2


def test_claiming_goes_round_a_pending_list_longer_than_a_page(pair: LedgerPair) -> None:
    ids = {pair.put(f"x{i}") for i in range(25)}
    for _ in range(3):
        pair.read("one")
    consumer = Consumer(pair.client, pair.keys, "two", 0.0)
    claimed: list[Entry] = []
    while len(claimed) < 25:
        page = consumer.claim("realtime", 4)
        assert len(page) <= 4
        claimed += page
    assert {entry.id for entry in claimed} == ids


def test_entry_deleted_while_pending_is_dropped_by_the_claim(pair: LedgerPair) -> None:
    entry = pair.put("x1")
    pair.read("one")
    pair.client.xdel(pair.keys.stream("realtime"), entry)
    assert Consumer(pair.client, pair.keys, "two", 0.0).claim("realtime", 10) == []
    assert pair.view.pending() == []


def test_realtime_is_read_first_and_alone_where_batch_has_no_room(pair: LedgerPair) -> None:
    pair.put("b", tier="batch")
    pair.put("r")
    consumer = Consumer(pair.client, pair.keys, "one", 1.0)
    assert [entry.tier for entry in consumer.read({"realtime": 5, "batch": 0}, 1)] == ["realtime"]
    pair.put("r2")
    assert [entry.tier for entry in consumer.read({"realtime": 5, "batch": 5}, 1)] == ["realtime", "batch"]


def test_read_now_does_not_wait_and_does_not_count(pair: LedgerPair) -> None:
    consumer = Consumer(pair.client, pair.keys, "one", 1.0)
    assert consumer.read_now({"realtime": 5, "batch": 5}) == []
    for tier in ("batch", "realtime"):
        pair.put(f"of-{tier}", tier=tier)
    entries = consumer.read_now({"realtime": 5, "batch": 5})
    assert [(entry.tier, entry.fields[b"id"]) for entry in entries] == [("realtime", b"of-realtime"), ("batch", b"of-batch")]
    assert [pair.count(Delivery(entry)) for entry in entries] == [0, 0]
    again = [Delivery(entry) for entry in consumer.own_pending(lambda *_: False, crashed=False)]  # the reply was lost
    for deliveries in ([Delivery(entry) for entry in entries], again):
        pair.one.hold(deliveries)
        assert [delivery.attempt for delivery in deliveries] == [1, 1]


def test_waiting_for_entries_ends_with_the_first(pair: LedgerPair) -> None:
    consumer = Consumer(pair.client, pair.keys, "one", 1.0)
    started_s = time.monotonic()
    assert consumer.read({"realtime": 1}, block_ms=50) == []
    assert time.monotonic() - started_s >= 0.05
