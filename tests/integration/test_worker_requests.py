from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis
import structlog

from producer import Client, Handle, Result
from producer.codec import decode_error, decode_frame, decode_result
from producer.errors import BatchFailed, Cancelled, ContextLengthExceeded, DeadlineExceeded, HeadraceError, InvalidRequest, WaitTimeout
from producer.keys import GROUP, Keys, Tier
from tests.fakes import FAIL, FakeDelta, FakeDetokenizer, FakeEngine, expected_text, expected_tokens, next_token
from tests.servers import Server
from tests.workers import QueueView, eventually, idle, worker_thread
from worker.config import WorkerConfig
from worker.engine.request import Request
from worker.stream.consumer import Consumer
from worker.worker import Worker


@pytest.fixture
def client(server: Server, queue: str) -> Iterator[Client]:
    with Client(server.url, queue=queue) as client:
        yield client


@pytest.fixture
def engine() -> FakeEngine:
    """Slow enough to be caught running."""
    return FakeEngine(step_s=0.005)


@pytest.fixture
def worker(server: Server, queue: str, engine: FakeEngine) -> Iterator[Worker]:
    with worker_thread(server.url, queue, engine) as worker:
        yield worker


def outcome(handle: Handle) -> str:
    try:
        return handle.result(timeout=60).finish_reason
    except HeadraceError as error:
        return error.code


def test_200_callers_all_get_their_own_answer(client: Client, view: QueueView, worker: Worker) -> None:
    def call(i: int) -> Result:
        return client.submit_and_wait(f"caller {i}", max_tokens=5 + i % 40, timeout=60, tier="batch" if i % 3 else "realtime")

    with ThreadPoolExecutor(200) as pool:
        results = list(pool.map(call, range(200)))
    assert [result.token_ids for result in results] == [expected_tokens(f"caller {i}", 5 + i % 40) for i in range(200)]
    assert {result.attempt for result in results} == {1}
    view.assert_clean()
    eventually(lambda: idle(worker), "idle")


def test_result_tells_who_answered_and_where_the_time_went(client: Client, worker: Worker) -> None:
    result = client.submit_and_wait("hello", max_tokens=10, timeout=30, logprobs=1)
    assert (result.worker, result.model, result.finish_reason) == (worker.config.name, "fake", "length")
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (5, 10)
    assert 0 <= result.timings.queue_ms <= result.timings.ttft_ms <= result.timings.total_ms
    assert result.logprobs is not None
    assert [item.token_id for item in result.logprobs] == result.token_ids


def test_the_engine_is_told_when_a_request_came_to_the_queue_whoever_began_it_first(
    client: Client, view: QueueView, worker: Worker, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    came: list[int] = []
    add_all = engine.add_all

    def noting(requests: Sequence[Request]) -> None:
        came.extend(request.arrival for request in requests)
        add_all(requests)

    monkeypatch.setattr(engine, "add_all", noting)
    entries = []
    for _ in range(2):
        handle = client.submit("hello", max_tokens=3)
        entries.append(int(view.state(handle.id)["entry"].partition("-")[0]))
        handle.result(timeout=30)
    assert came == entries


def test_bare_xadd_is_answered_like_any_other(view: QueueView, worker: Worker) -> None:
    body = json.dumps({"prompt": "Hi", "max_tokens": 8})
    view.client.xadd(view.keys.stream("realtime"), {"id": "x1", "json": body})
    eventually(lambda: view.finals("x1"), "answered")
    result = decode_result(decode_frame(view.frames("x1")[-1]))
    assert (result.id, result.token_ids) == ("x1", expected_tokens("Hi", 8))
    view.assert_clean()


def test_streamed_chunks_joined_are_the_final_text(client: Client, view: QueueView, worker: Worker) -> None:
    handle = client.submit("stream me", max_tokens=60)
    chunks = list(handle.stream(timeout=30))
    assert len(chunks) > 5
    assert "".join(chunk.text for chunk in chunks) == expected_text("stream me", 60) == handle.result().text
    assert [token for chunk in chunks for token in chunk.token_ids] == expected_tokens("stream me", 60)
    view.assert_clean()


def test_request_put_as_streamed_is_published_every_step(client: Client, view: QueueView, worker: Worker) -> None:
    handle = client.submit("stream me", max_tokens=30, stream=True)
    handle.result(timeout=30)
    frames = view.frames(handle.id)
    assert frames[-1][b"type"] == b"final"
    assert len(frames) > 5
    assert frames[-2][b"tokens"] == b"30"


def test_unstreamed_request_is_checkpointed_every_so_many_tokens(server: Server, queue: str, client: Client, view: QueueView) -> None:
    with worker_thread(server.url, queue, FakeEngine(step_s=0.002), checkpoint_tokens=10, checkpoint_s=60.0):
        handle = client.submit("hello", max_tokens=45)
        handle.result(timeout=30)
    published = [int(frame[b"tokens"]) for frame in view.frames(handle.id) if frame[b"type"] == b"tokens"]
    assert len(published) == 4
    assert all(after - before >= 10 for before, after in zip([0, *published], published, strict=False))


def test_unstreamed_request_is_checkpointed_every_so_often(server: Server, queue: str, client: Client, view: QueueView) -> None:
    with worker_thread(server.url, queue, FakeEngine(step_s=0.01), checkpoint_tokens=10_000, checkpoint_s=0.1):
        handle = client.submit("hello", max_tokens=50)
        handle.result(timeout=30)
    assert 2 <= sum(frame[b"type"] == b"tokens" for frame in view.frames(handle.id)) <= 6


def test_stop_string_ends_the_output_and_frees_the_engine(client: Client, worker: Worker) -> None:
    tokens = expected_tokens("hello", 20)
    result = client.submit_and_wait("hello", max_tokens=10_000, stop=f" {tokens[7]}", timeout=30)
    first = tokens.index(tokens[7])
    assert (result.finish_reason, result.stop_reason) == ("stop", f" {tokens[7]}")
    assert (result.token_ids, result.text) == (tokens[: first + 1], "".join(f" {token}" for token in tokens[:first]))
    eventually(lambda: idle(worker), "the engine idle")


def test_running_request_is_cancelled_within_two_steps(server: Server, queue: str, client: Client, view: QueueView) -> None:
    step = threading.Event()

    class Stepwise(FakeEngine):
        """Once a request runs, steps only when told to."""

        steps = 0

        def step(self):  # type: ignore[no-untyped-def]  # the base class's
            assert step.wait(10)
            self.steps += 1
            return super().step()

    engine = Stepwise()
    step.set()
    with worker_thread(server.url, queue, engine, lease_s=30.0) as worker:
        handle = client.submit("hello", max_tokens=100_000 - 5)
        eventually(lambda: engine.steps > 3, "stepping")
        step.clear()
        assert handle.cancel() == "cancelling"
        with pytest.raises(Cancelled) as caught:  # answered although no step can end
            handle.result(timeout=30)
        count = engine.steps
        step.set()
        eventually(lambda: idle(worker), "idle")
        assert engine.steps - count <= 2
    tokens = caught.value.partial_token_ids
    assert tokens
    assert tokens == expected_tokens("hello", len(tokens))
    assert caught.value.partial_text == "".join(f" {token}" for token in tokens)
    view.assert_clean()


def test_queued_request_that_is_cancelled_never_starts(server: Server, queue: str, client: Client, view: QueueView) -> None:
    handle = client.submit("hello", max_tokens=5)
    assert handle.cancel() == "cancelled"
    with worker_thread(server.url, queue):
        eventually(lambda: view.length() == 0, "discarded")
    with pytest.raises(Cancelled):
        handle.result(timeout=5)
    assert view.finals(handle.id) == 1


def test_bare_request_that_is_cancelled_while_it_waits_never_starts(server: Server, queue: str, client: Client, view: QueueView) -> None:
    view.client.xadd(view.keys.stream("realtime"), {"id": "x1", "json": '{"prompt":"hi"}'})
    assert client.get("x1").cancel() == "unknown"
    with worker_thread(server.url, queue):
        eventually(lambda: view.finals("x1"), "answered")
    assert outcome(client.get("x1")) == "CANCELLED"
    assert "started_ms" not in view.state("x1")
    view.assert_clean()


def test_cancelling_a_finished_request_has_no_effect(client: Client, view: QueueView, worker: Worker) -> None:
    handle = client.submit("hello", max_tokens=5)
    handle.result(timeout=30)
    assert handle.cancel() == "finished"
    assert handle.result(timeout=5).token_ids == expected_tokens("hello", 5)


def test_cancel_storm_leaves_nothing_behind(client: Client, view: QueueView, worker: Worker) -> None:
    bystander = client.submit("bystander", max_tokens=200)
    handles = client.submit_many([{"prompt": f"p{i}", "max_tokens": 5000} for i in range(1000)])
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda handle: handle.cancel(), handles))
        assert set(pool.map(outcome, handles)) == {"CANCELLED"}
    assert bystander.result(timeout=60).token_ids == expected_tokens("bystander", 200)
    eventually(lambda: idle(worker), "idle")
    eventually(lambda: view.length() == 0, "streams empty")
    view.assert_clean()


def test_caller_that_times_out_cancels(client: Client, view: QueueView, worker: Worker) -> None:
    with pytest.raises(WaitTimeout) as caught:
        client.submit_and_wait("hello", max_tokens=50_000, timeout=0.3)
    eventually(lambda: idle(worker), "idle")
    assert caught.value.request_id is not None
    eventually(lambda: view.state(caught.value.request_id or "")["status"] == "cancelled", "cancelled")


def test_deadline_that_passed_in_the_queue_costs_no_step(
    server: Server, queue: str, client: Client, view: QueueView, tmp_path: Path
) -> None:
    trace = tmp_path / "trace"
    view.client.xadd(view.keys.stream("realtime"), {"id": "late", "deadline_ms": 1, "json": b'{"prompt":"hello","max_tokens":5}'})
    with worker_thread(server.url, queue, FakeEngine(trace=trace)):
        eventually(lambda: view.finals("late"), "answered")
    with pytest.raises(DeadlineExceeded):
        client.get("late").result(timeout=5)
    assert trace.read_text() == ""
    view.assert_clean()


def test_deadline_that_passes_while_running_gives_the_partial_text(client: Client, view: QueueView, worker: Worker) -> None:
    handle = client.submit("hello", max_tokens=50_000, deadline_s=0.3)
    with pytest.raises(DeadlineExceeded) as caught:
        handle.result(timeout=30)
    tokens = caught.value.partial_token_ids
    assert tokens
    assert tokens == expected_tokens("hello", len(tokens))
    eventually(lambda: idle(worker), "idle")
    view.assert_clean()


@pytest.mark.parametrize("deliveries", [0, 2], ids=["waiting for room", "suspect that waits for its turn"])
def test_deadline_that_passes_while_held_ends_it_then(server: Server, queue: str, client: Client, view: QueueView, deliveries: int) -> None:
    first = client.submit("endless", max_tokens=50_000)
    late = client.submit("late", max_tokens=5, deadline_s=3.0)
    stream = view.keys.stream("realtime")
    view.client.xgroup_create(stream, GROUP, id="0")
    if deliveries:  # to workers that died
        for entry_id, _ in view.client.xreadgroup(GROUP, "dead", {stream: ">"})[0][1]:
            view.client.xclaim(stream, GROUP, "dead", 0, [entry_id], idle=3_600_000, retrycount=deliveries)
    with worker_thread(server.url, queue, FakeEngine(max_batch_size=1, step_s=0.005), fetch_ahead=8) as worker:
        eventually(lambda: first.status() == "running" and len(worker.registry) == 2, "one runs, the other is held")
        with pytest.raises(DeadlineExceeded):
            late.result(timeout=20)
        assert first.status() == "running"
        first.cancel()
        eventually(lambda: idle(worker), "idle")
    view.assert_clean()


BAD_BODIES = [
    ("json", '{"prompt":"x","max_tokens":0}', "max_tokens"),
    ("json", '{"prompt":"x","temperature":NaN}', "json"),
    ("json", '{"prompt":"x","temperature":1e999}', "temperature"),
    ("json", '{"prompt":""}', "prompt"),
    ("json", '{"prompt":"\\ud800"}', "prompt"),
    ("json", '{"prompt":"a\\u0000b"}', "prompt"),
    ("json", '{"prompt":"x","max_tokens":99999999999999999999}', "max_tokens"),
    ("json", '{"prompt":"x","max_tokens":200000}', "max_tokens"),
    ("json", '{"prompt":"x","seed":99999999999999999999}', "seed"),
    ("json", '{"prompt":"x","top_p":"high"}', "top_p"),
    ("json", '{"prompt":"x","prompt_token_ids":[1]}', "prompt"),
    ("json", "[" * 100_000, "json"),
    ("json", "\xff\xfe", "json"),
    ("msgpack", b"\xc1\x00\xff", "msgpack"),
    ("msgpack", b"", "msgpack"),
    ("yaml", "prompt: x", "body"),
]


def test_each_bad_input_is_told_its_field_and_disturbs_nobody(client: Client, view: QueueView, worker: Worker) -> None:
    neighbour = client.submit("neighbour", max_tokens=300)
    for i, (encoding, body, _) in enumerate(BAD_BODIES):
        view.client.xadd(view.keys.stream("realtime"), {"id": f"bad{i}", encoding: body})
    for i, (_, body, field) in enumerate(BAD_BODIES):
        eventually(lambda i=i: view.finals(f"bad{i}"), f"{body[:40]!r} answered")
        error = decode_error(decode_frame(view.frames(f"bad{i}")[-1]))
        assert isinstance(error, InvalidRequest), body[:40]
        assert error.field == field, body[:40]
    assert "".join(chunk.text for chunk in neighbour.stream(timeout=30)) == expected_text("neighbour", 300)
    view.assert_clean()


@pytest.mark.parametrize("fields", [{}, {"id": ""}, {"id": "no/slashes"}, {"id": "x" * 129}, {"id": b"\xff"}])
def test_entry_without_usable_id_is_answered_under_the_entrys_own(view: QueueView, worker: Worker, fields: dict[str, str]) -> None:
    entry = view.client.xadd(view.keys.stream("realtime"), {**fields, "json": '{"prompt":"x"}'}).decode()
    eventually(lambda: view.finals(entry), "answered")
    error = decode_error(decode_frame(view.frames(entry)[-1]))
    assert (error.code, error.field) == ("INVALID_REQUEST", "id")
    view.assert_clean()


def test_prompt_that_cannot_fit_is_refused_by_the_engine_with_its_code(client: Client, worker: Worker) -> None:
    with pytest.raises(ContextLengthExceeded):
        client.submit_and_wait("x" * 90_000, max_tokens=20_000, timeout=30)


def test_request_that_fails_in_its_step_harms_itself_alone(client: Client, worker: Worker) -> None:
    neighbour = client.submit("neighbour", max_tokens=100)
    with pytest.raises(BatchFailed):
        client.submit_and_wait(FAIL, max_tokens=10, timeout=30)
    assert neighbour.result(timeout=30).token_ids == expected_tokens("neighbour", 100)


def test_prompt_that_breaks_the_preparation_is_an_internal_error(client: Client, worker: Worker, engine: FakeEngine) -> None:
    def broken(_: object) -> None:
        raise ZeroDivisionError

    prepare, engine.inputs.prepare_all = engine.inputs.prepare_all, broken  # type: ignore[method-assign,assignment]  # a tokenizer's bug
    with pytest.raises(HeadraceError) as caught:
        client.submit_and_wait("hello", max_tokens=5, timeout=30)
    assert caught.value.code == "INTERNAL"
    engine.inputs.prepare_all = prepare  # type: ignore[method-assign]
    assert client.submit_and_wait("hello", max_tokens=5, timeout=30).text


def test_same_id_put_twice_is_run_and_answered_once(view: QueueView, worker: Worker, client: Client) -> None:
    body = json.dumps({"prompt": "Hi", "max_tokens": 50})
    for _ in range(3):
        view.client.xadd(view.keys.stream("realtime"), {"id": "x1", "json": body})
    eventually(lambda: view.finals("x1"), "answered")
    view.client.xadd(view.keys.stream("batch"), {"id": "x1", "json": body})
    eventually(lambda: view.length() == 0, "all taken off")
    assert view.finals("x1") == 1
    assert client.get("x1").result(timeout=5).token_ids == expected_tokens("Hi", 50)


def test_more_requests_than_room_are_left_on_the_stream(server: Server, queue: str, client: Client, view: QueueView) -> None:
    engine = FakeEngine(max_batch_size=4, step_s=0.005)
    with worker_thread(server.url, queue, engine):
        handles = client.submit_many([{"prompt": f"p{i}", "max_tokens": 50} for i in range(40)])
        eventually(view.pending, "some are running")
        while handles[-1].status() != "done":
            assert len(view.pending()) <= 4 + (4 + 2)  # four that ended just now, and what the engine has room for
        assert [handle.result(timeout=30).token_ids for handle in handles] == [expected_tokens(f"p{i}", 50) for i in range(40)]


def test_token_ids_as_prompt(client: Client, worker: Worker) -> None:
    result = client.submit_and_wait(prompt_token_ids=[500, 600], max_tokens=5, timeout=30)
    assert result.token_ids == [next_token([500, 600], i) for i in range(5)]


def test_log_has_one_line_a_request_and_no_user_text(client: Client, worker: Worker) -> None:
    with structlog.testing.capture_logs() as lines:
        handle = client.submit("a very private prompt", max_tokens=7, source="search")
        text = handle.result(timeout=30).text
        eventually(lambda: any(line.get("id") == handle.id for line in lines), "logged")
    (line,) = [line for line in lines if line.get("id") == handle.id]
    assert {name: line[name] for name in ("tier", "source", "attempt", "prompt_tokens", "completion_tokens", "finish_reason")} == {
        "tier": "realtime",
        "source": "search",
        "attempt": 1,
        "prompt_tokens": 21,
        "completion_tokens": 7,
        "finish_reason": "length",
    }
    assert "private" not in str(lines)
    assert text not in str(lines)


def test_output_that_cannot_be_turned_into_a_reply_costs_its_request_alone(client: Client, worker: Worker, engine: FakeEngine) -> None:
    make = engine.make_detokenizer

    def broken(request: Request) -> FakeDetokenizer:
        return Broken(request.params) if request.num_prompt_tokens == 3 else make(request)

    engine.make_detokenizer = broken  # type: ignore[method-assign]  # a detokeniser's bug
    neighbour = client.submit("neighbour", max_tokens=50)
    with pytest.raises(HeadraceError) as caught:
        client.submit_and_wait("bad", max_tokens=50, timeout=30)
    assert caught.value.code == "INTERNAL"
    assert neighbour.result(timeout=30).token_ids == expected_tokens("neighbour", 50)
    eventually(lambda: idle(worker), "idle")


class Broken(FakeDetokenizer):
    def push(self, token_ids: Sequence[int], finished: bool) -> FakeDelta:
        raise ZeroDivisionError(len(token_ids), finished)


def test_heartbeat_tells_the_last_error_that_was_not_asked_for(client: Client, view: QueueView, worker: Worker) -> None:
    def said(name: str) -> str | None:
        return view.workers().get(worker.config.name, {}).get(name)

    eventually(lambda: said("last_error") == "", "the heartbeat says that there was none")
    failing = client.submit(FAIL, max_tokens=3)
    assert outcome(failing) == "BATCH_FAILED"
    cancelled = client.submit("hello", max_tokens=10_000)
    eventually(lambda: len(worker.registry) == 1, "it runs")
    cancelled.cancel()
    assert outcome(cancelled) == "CANCELLED"
    eventually(lambda: said("requests_done") == "2", "the heartbeat knows of both")
    assert said("last_error") == "BATCH_FAILED"
    assert int(view.state(failing.id)["started_ms"]) <= int(said("last_error_ms") or 0) < int(view.state(cancelled.id)["finished_ms"])


def test_failure_of_any_thread_hands_everything_back_and_ends_the_worker(server: Server, queue: str, client: Client) -> None:
    config = WorkerConfig(redis_url=server.url, queue=queue, lease_s=60.0)
    failing = Worker(config, lambda _: FakeEngine(step_s=0.01))
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(failing.run()))
    thread.start()
    handle = client.submit("hello", max_tokens=100)
    eventually(lambda: failing.loop.num_tokens > 5, "running")
    failing.registry.next_deadline_at_s = lambda: 1 / 0  # type: ignore[method-assign]  # a bug in the keeper's thread
    thread.join(30)
    assert codes == [1]
    with worker_thread(server.url, queue, lease_s=60.0):
        result = handle.result(timeout=30)
    assert (result.token_ids, result.attempt) == (expected_tokens("hello", 100), 2)


def test_engine_that_cannot_be_loaded_ends_the_worker_and_says_why(server: Server, queue: str) -> None:
    def load(_: str) -> FakeEngine:
        raise FileNotFoundError("no such folder: /models/missing")

    with structlog.testing.capture_logs() as lines:
        assert Worker(WorkerConfig(redis_url=server.url, queue=queue), load).run() == 1
    assert any("/models/missing" in line.get("detail", "") for line in lines)


def test_batch_work_that_finds_no_room_does_not_keep_realtime_waiting(server: Server, queue: str, client: Client, raw: redis.Redis) -> None:
    class RealtimeOnly(FakeEngine):
        def room(self, tier: Tier) -> int:
            return super().room(tier) if tier == "realtime" else 0

    stuck = client.submit_many([{"prompt": f"b{i}", "max_tokens": 3, "tier": "batch"} for i in range(30)])
    dead = Consumer(raw, Keys(queue), "dead", 1.0)
    dead.ensure_groups()
    while dead.read({"batch": 100}, 1):  # their worker died with them
        pass
    with worker_thread(server.url, queue, RealtimeOnly(), lease_s=0.3):
        for i in range(20):
            assert client.submit_and_wait(f"r{i}", max_tokens=3, timeout=20).token_ids == expected_tokens(f"r{i}", 3)
    with worker_thread(server.url, queue, lease_s=0.3):
        assert {handle.result(timeout=20).attempt for handle in stuck} == {2}
