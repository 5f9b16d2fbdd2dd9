"""Requests that wait with a worker beyond its engine's room: which is next, and which other worker may have them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
import structlog

from producer import Client, Handle
from producer.errors import DeadlineExceeded
from producer.keys import GROUP, Keys
from tests.fakes import FakeEngine, expected_tokens
from tests.servers import Server
from tests.workers import QueueView, eventually, idle, worker_thread
from worker.stream.control import Control
from worker.worker import Worker

Serve = Callable[..., Any]


@pytest.fixture
def client(server: Server, queue: str) -> Iterator[Client]:
    with Client(server.url, queue=queue) as client:
        yield client


class Trace:
    """In which order requests made their first tokens."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def begun(self) -> list[str]:
        return [id_ for id_, index in (line.split() for line in self.path.read_text().splitlines()) if index == "0"]


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    return Trace(tmp_path / "trace")


@pytest.fixture
def serve(server: Server, queue: str, trace: Trace) -> Serve:
    """Starts a worker of four slots that holds up to 1,000 requests per tier."""

    @contextmanager
    def run(**config: Any) -> Iterator[Worker]:
        engine = FakeEngine(max_batch_size=4, step_s=0.001, trace=trace.path)
        with worker_thread(server.url, queue, engine, **{"fetch_ahead": 1000} | config) as worker:
            yield worker

    return run


@contextmanager
def full_worker(client: Client, serve: Serve, **settings: Any) -> Iterator[tuple[Worker, list[Handle]]]:
    """A worker whose engine has no room, and the requests that fill it, to be cancelled."""
    busy = client.submit_many([{"prompt": f"busy{i}", "max_tokens": 50_000} for i in range(6)])
    with serve(**settings) as worker:
        eventually(lambda: worker.loop.stats.running_realtime == 4, "full")
        yield worker, busy


def await_held(view: QueueView, worker: Worker, count: int) -> None:
    eventually(lambda: view.workers()[worker.config.name].get("ahead") == str(count), "held")


def submit(client: Client, count: int, name: str, **options: Any) -> list[Handle]:
    return client.submit_many([{"prompt": f"{name}{i}", "max_tokens": 3, "id": f"{name}{i}", **options} for i in range(count)])


def assert_answered(handles: list[Handle]) -> None:
    assert [handle.result(timeout=60).token_ids for handle in handles] == [expected_tokens(handle.id, 3) for handle in handles]


def place_of_last(begun: list[str], name: str) -> int:
    return max(place for place, id_ in enumerate(begun) if id_.startswith(name))


def test_source_behind_a_flood_is_served_in_turns_with_it(client: Client, serve: Serve, trace: Trace, view: QueueView) -> None:
    flood, others = submit(client, 500, "flood", source="a"), submit(client, 10, "other", source="b")
    with serve():
        assert_answered(flood + others)
    begun = trace.begun()
    assert len(begun) == 510
    read_before = 150  # pages that are read while the first are run
    assert place_of_last(begun, "other") < read_before + 3 * 10
    assert [id_ for id_ in begun if id_.startswith("other")] == [handle.id for handle in others]
    view.assert_clean()


def test_early_deadline_behind_a_flood_is_served_first(client: Client, serve: Serve, trace: Trace) -> None:
    flood, urgent = submit(client, 500, "flood"), submit(client, 10, "urgent", deadline_s=60.0)
    with serve():
        assert_answered(flood + urgent)
    assert place_of_last(trace.begun(), "urgent") < 150 + 10


def test_without_it_a_flood_is_served_in_order(client: Client, serve: Serve, trace: Trace) -> None:
    flood, others = submit(client, 100, "flood", source="a"), submit(client, 5, "other", source="b")
    with serve(fetch_ahead=0):
        assert_answered(flood + others)
    assert trace.begun()[-5:] == [handle.id for handle in others]


def test_realtime_passes_batch_work_that_is_held(client: Client, serve: Serve, trace: Trace, view: QueueView) -> None:
    batch = submit(client, 600, "batch", tier="batch")
    with serve():
        eventually(lambda: len(view.pending("batch")) > 100, "held")
        for i in range(10):
            before = len(trace.begun())
            assert_answered(submit(client, 1, f"realtime{i}-"))
            passed = trace.begun()[before:].index(f"realtime{i}-0")
            assert passed < 60  # what one look at the streams may hand over, and what was begun before it was there
        assert_answered(batch)


def test_held_requests_are_queued_for_their_callers_and_can_be_cancelled_or_late(client: Client, serve: Serve, view: QueueView) -> None:
    with full_worker(client, serve) as (worker, busy):
        held, late = submit(client, 20, "held"), submit(client, 5, "late", deadline_s=0.2)
        await_held(view, worker, 25)
        assert {handle.status() for handle in held} == {"queued"}
        assert {pending["times_delivered"] for pending in view.pending()} == {0, 1}
        assert {handle.cancel() for handle in held[:10]} == {"cancelled"}
        for handle in late:  # although nothing leaves the engine
            with pytest.raises(DeadlineExceeded):
                handle.result(timeout=30)
        for handle in busy:
            handle.cancel()
        assert_answered(held[10:])
        eventually(lambda: idle(worker) and view.length() == 0, "idle")
    view.assert_clean()


def test_idle_worker_gets_its_share_of_what_another_holds(
    server: Server, queue: str, client: Client, serve: Serve, view: QueueView
) -> None:
    handles = client.submit_many([{"prompt": f"p{i}", "max_tokens": 20} for i in range(200)])
    with serve(name="first", lease_s=60.0) as first:
        eventually(lambda: len(view.pending()) > 150, "held")
        first.loop.engine.step_s = 0.1  # until the other has its share
        with worker_thread(server.url, queue, FakeEngine(max_batch_size=4, step_s=0.001), name="second", lease_s=60.0):
            eventually(lambda: any(pending["consumer"] == b"second" for pending in view.pending()), "shared")
            first.loop.engine.step_s = 0.001
            results = [handle.result(timeout=60) for handle in handles]
    assert [result.token_ids for result in results] == [expected_tokens(f"p{i}", 20) for i in range(200)]
    assert {result.attempt for result in results} == {1}
    assert 60 < sum(result.worker == "second" for result in results) < 180
    assert [view.finals(handle.id) for handle in handles] == [1] * 200
    view.assert_clean()


def test_request_to_share_is_answered_with_the_latest_and_only_by_whom_it_names(
    client: Client, serve: Serve, view: QueueView, raw: redis.Redis, queue: str
) -> None:
    with full_worker(client, serve, name="holder", lease_s=60.0) as (worker, busy):
        held = submit(client, 10, "held")
        await_held(view, worker, 10)
        control = Control(raw, Keys(queue))
        for name in ("nobody", "holder"):
            control.ask_to_share(name, "idle")
        with structlog.testing.capture_logs() as lines:
            eventually(lambda: any(line["event"] == "waiting requests handed back" for line in lines), "shared")
        ids = {pending["message_id"] for pending in view.pending() if pending["time_since_delivered"] > 3_600_000}
        assert ids == {view.state(handle.id)["entry"].encode() for handle in held[5:]}
        for handle in busy:
            handle.cancel()
        assert_answered(held[:5])
        raw.xadd(view.keys.control, {"op": "claim", "worker": "idle"})
        assert_answered(held)


def hand_back_and_claim(raw: redis.Redis, view: QueueView, held: list[str]) -> None:
    """The holder gives the latter half to a worker that does not fetch it, and takes it back."""

    def num_handed_back() -> int:
        return sum(pending["time_since_delivered"] > 3_600_000 for pending in view.pending())

    Control(raw, view.keys).ask_to_share("holder", "idle")
    eventually(lambda: num_handed_back() == len(held) // 2, "handed back")
    raw.xadd(view.keys.control, {"op": "claim", "worker": "idle"})
    eventually(lambda: num_handed_back() == 0, "claimed")


def lose_deliveries(raw: redis.Redis, view: QueueView, held: list[str]) -> None:
    """As when Redis comes back without its last writes: the group delivers again what it had delivered."""
    stream, num_pending = view.keys.stream("realtime"), len(view.pending())
    ((before, _),) = raw.xrevrange(stream, f"({held[0]}", "-", count=1)
    with raw.pipeline(transaction=True) as pipe:
        pipe.xack(stream, GROUP, *held)
        pipe.xgroup_setid(stream, GROUP, before)
        pipe.execute()
    eventually(lambda: len(view.pending()) == num_pending, "delivered again")


@pytest.mark.parametrize("come_back", [hand_back_and_claim, lose_deliveries])
def test_entries_that_come_back_while_others_of_their_source_wait_are_run_once(
    client: Client, serve: Serve, trace: Trace, view: QueueView, raw: redis.Redis, come_back: Callable[..., None]
) -> None:
    with full_worker(client, serve, name="holder", lease_s=60.0) as (worker, busy):
        held = submit(client, 10, "held")
        await_held(view, worker, 10)
        come_back(raw, view, [view.state(handle.id)["entry"] for handle in held])
        for handle in busy:
            handle.cancel()
        assert_answered(held)
        eventually(lambda: idle(worker) and view.length() == 0, "idle")
    assert [id_ for id_ in trace.begun() if id_.startswith("held")] == [handle.id for handle in held]
    assert [view.finals(handle.id) for handle in held] == [1] * 10
    view.assert_clean()
