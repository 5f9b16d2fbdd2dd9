"""Requests that become several in the engine, and those that ask for numbers: one reply, whatever happens to their parts."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from producer import Client
from producer.errors import BatchFailed, Cancelled, ContextLengthExceeded, DeadlineExceeded, HeadraceError, InvalidRequest
from producer.keys import GROUP
from producer.wire import Choice, Result, TokenLogprob, Usage
from tests.fakes import FAIL_SECOND, MAX_MODEL_LEN, FakeEngine, expected_text, expected_tokens
from tests.proxy import Proxy
from tests.servers import Server
from tests.workers import QueueView, eventually, idle, worker_thread
from worker.reload import Reload
from worker.stream.delivery import Settlement, TokensFrame
from worker.stream.ledger import Ledger, Written
from worker.worker import Worker

BATCH_SIZE = 8


@pytest.fixture
def client(server: Server, queue: str) -> Iterator[Client]:
    with Client(server.url, queue=queue) as client:
        yield client


@pytest.fixture
def worker(server: Server, queue: str) -> Iterator[Worker]:
    with worker_thread(server.url, queue, FakeEngine(max_batch_size=BATCH_SIZE, step_s=0.002), checkpoint_tokens=5) as worker:
        yield worker


def expected_choices(prompt: str, max_tokens: int, n: int) -> list[Choice]:
    outputs = [(i, expected_text(prompt, max_tokens, i), expected_tokens(prompt, max_tokens, i)) for i in range(n)]
    return [Choice(i, text, tokens, "length") for i, text, tokens in outputs]


def assert_left_no_trace(worker: Worker, view: QueueView) -> None:
    eventually(lambda: idle(worker), "the engine idle")
    eventually(lambda: view.length() == 0, "the streams empty")
    view.assert_clean()


def test_outputs_of_one_request_are_the_choices_of_one_reply(client: Client, view: QueueView, worker: Worker) -> None:
    handle = client.submit("hello", max_tokens=30, n=3)
    result = handle.result(timeout=30)
    assert result.choices == expected_choices("hello", 30, 3)
    assert (result.text, result.token_ids) == (expected_text("hello", 30), expected_tokens("hello", 30))
    assert (result.finish_reason, result.usage) == ("length", Usage(5, 90, 0))
    assert 0 <= result.timings.queue_ms <= result.timings.ttft_ms <= result.timings.total_ms
    assert [frame[b"type"] for frame in view.frames(handle.id)] == [b"final"]
    assert_left_no_trace(worker, view)


def test_each_choice_has_its_own_logprobs(client: Client, worker: Worker) -> None:
    result = client.submit_and_wait("hello", max_tokens=3, n=2, logprobs=0, timeout=30)
    assert result.choices is not None
    assert [choice.logprobs for choice in result.choices] == [
        [TokenLogprob(token, -0.5, {token: -0.5}) for token in expected_tokens("hello", 3, i)] for i in range(2)
    ]


def test_stop_string_ends_the_output_that_it_is_in(client: Client, view: QueueView, worker: Worker) -> None:
    tokens = [expected_tokens("hello", 60, i) for i in range(3)]
    place, stop = next((i, token) for i, token in enumerate(tokens[1]) if i > 3 and token not in tokens[0] + tokens[2])
    result = client.submit_and_wait("hello", max_tokens=60, n=3, stop=f" {stop}", timeout=30)
    assert result.choices is not None
    assert [choice.finish_reason for choice in result.choices] == ["length", "stop", "length"]
    assert (result.choices[1].stop_reason, result.choices[1].token_ids) == (f" {stop}", tokens[1][: place + 1])
    assert [result.choices[i].token_ids for i in (0, 2)] == [tokens[0], tokens[2]]
    assert result.usage.completion_tokens == 121 + place
    assert_left_no_trace(worker, view)


def test_failure_of_one_output_is_that_of_all_and_harms_nobody_else(client: Client, view: QueueView, worker: Worker) -> None:
    neighbour = client.submit("neighbour", max_tokens=100)
    with pytest.raises(BatchFailed) as caught:
        client.submit_and_wait(FAIL_SECOND, max_tokens=50_000, n=3, timeout=30)
    assert caught.value.partial_token_ids == expected_tokens(FAIL_SECOND, len(caught.value.partial_token_ids))
    assert neighbour.result(timeout=30).token_ids == expected_tokens("neighbour", 100)
    assert_left_no_trace(worker, view)


def test_cancelling_ends_all_outputs(client: Client, view: QueueView, worker: Worker) -> None:
    handle = client.submit("hello", max_tokens=50_000, n=4)
    eventually(lambda: worker.loop.num_tokens > 20, "running")
    assert handle.cancel() == "cancelling"
    with pytest.raises(Cancelled) as caught:
        handle.result(timeout=30)
    tokens = caught.value.partial_token_ids
    assert tokens
    assert tokens == expected_tokens("hello", len(tokens))
    assert_left_no_trace(worker, view)


def test_deadline_ends_all_outputs(client: Client, view: QueueView, worker: Worker) -> None:
    with pytest.raises(DeadlineExceeded):
        client.submit("hello", max_tokens=50_000, n=4, deadline_s=0.3).result(timeout=30)
    assert_left_no_trace(worker, view)


def test_lost_lease_ends_all_outputs_and_nothing_is_said(client: Client, view: QueueView, worker: Worker) -> None:
    handle = client.submit("hello", max_tokens=50_000, n=4)
    (entry,) = eventually(view.pending, "taken")
    eventually(lambda: worker.loop.num_tokens > 20, "running")
    view.client.xclaim(view.keys.stream("realtime"), GROUP, "somebody else", 0, [entry["message_id"]], justid=True)
    eventually(lambda: idle(worker), "the engine idle")
    assert view.frames(handle.id) == []
    handle.cancel()


def test_outputs_handed_back_at_the_drains_end_are_made_anew(server: Server, queue: str, client: Client, view: QueueView) -> None:
    with worker_thread(server.url, queue, FakeEngine(step_s=0.01), drain_s=0.05) as first:
        handle = client.submit("hello", max_tokens=200, n=3)
        eventually(lambda: first.loop.num_tokens > 20, "running")
    assert view.finals(handle.id) == 0
    with worker_thread(server.url, queue):
        result = handle.result(timeout=30)
    assert (result.choices, result.attempt) == (expected_choices("hello", 200, 3), 1)
    view.assert_clean()


def test_more_outputs_than_fit_a_batch_are_refused(client: Client, worker: Worker) -> None:
    with pytest.raises(InvalidRequest) as caught:
        client.submit_and_wait("hello", max_tokens=5, n=BATCH_SIZE + 1, timeout=30)
    assert caught.value.field == "n"
    assert client.submit_and_wait("hello", max_tokens=5, n=BATCH_SIZE, timeout=30).choices == expected_choices("hello", 5, BATCH_SIZE)


def test_each_output_takes_room_of_its_own(client: Client, view: QueueView, worker: Worker) -> None:
    first = client.submit("first", max_tokens=200, n=BATCH_SIZE)
    second = client.submit("second", max_tokens=200, n=BATCH_SIZE)
    eventually(lambda: worker.loop.num_tokens > 5 * BATCH_SIZE, "running")
    eventually(lambda: len(view.pending()) == 2, "both taken")
    assert worker.loop.room() == {"realtime": 0, "batch": 0}
    third = client.submit("third", max_tokens=5)
    assert first.result(timeout=30).choices == expected_choices("first", 200, BATCH_SIZE)
    assert second.result(timeout=30).choices == expected_choices("second", 200, BATCH_SIZE)
    assert third.result(timeout=30).token_ids == expected_tokens("third", 5)
    assert_left_no_trace(worker, view)


def test_request_of_which_one_part_can_never_fit_is_refused_as_a_whole(client: Client, view: QueueView, worker: Worker) -> None:
    with pytest.raises(ContextLengthExceeded):
        client.score("hello", ["short", "x" * MAX_MODEL_LEN], timeout=30)
    assert client.score("hello", ["short"], timeout=30).scores == [-5.0]
    assert_left_no_trace(worker, view)


def test_score_of_each_continuation_in_their_order(client: Client, view: QueueView, worker: Worker) -> None:
    continuations = ["x" * length for length in (5, 1, 40, 3, 7, 7, 2, 9, 12, 30)]  # more than fit a batch
    handle = client.submit("hello", kind="score", continuations=continuations)
    result = handle.result(timeout=30)
    assert result.scores == [-float(len(text)) for text in continuations]
    assert (result.text, result.choices, result.usage) == ("", None, Usage(5, sum(map(len, continuations)), 0))
    assert list(client.get(handle.id).stream(timeout=10)) == []
    assert_left_no_trace(worker, view)


def test_embedding_of_the_prompt(client: Client, view: QueueView, worker: Worker) -> None:
    result = client.embed("ab", timeout=30)
    assert result.embedding == [ord("a") / (ord("a") + ord("b")), ord("b") / (ord("a") + ord("b"))]
    assert (result.text, result.usage) == ("", Usage(2, 0, 0))
    assert_left_no_trace(worker, view)


def test_reader_of_several_outputs_gets_the_first_at_the_end(client: Client, worker: Worker) -> None:
    handle = client.submit("hello", max_tokens=20, n=2)
    (chunk,) = handle.stream(timeout=30)
    assert (chunk.text, chunk.token_ids) == (expected_text("hello", 20), expected_tokens("hello", 20))


@pytest.mark.parametrize("options", [{"n": 2}, {"kind": "embed"}, {"kind": "score", "continuations": ["a"]}], ids=str)
def test_what_cannot_be_streamed_is_refused_before_it_is_put(client: Client, view: QueueView, options: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        client.submit("hello", stream=True, **options)  # type: ignore[arg-type]  # by name
    assert caught.value.field == "stream"
    assert view.length() == 0


def test_every_kind_at_once(client: Client, view: QueueView, worker: Worker) -> None:
    items = [
        [
            {"prompt": f"text {i}", "max_tokens": 20 + i},
            {"prompt": f"several {i}", "max_tokens": 10 + i, "n": 1 + i % BATCH_SIZE, "tier": "batch"},
            {"prompt": f"score {i}", "kind": "score", "continuations": ["a" * (i + 1), "b"]},
            {"prompt": f"embed {i}", "kind": "embed"},
            {"prompt": FAIL_SECOND, "max_tokens": 100, "n": 2},
        ]
        for i in range(20)
    ]
    handles = [client.submit_many(group) for group in items]  # type: ignore[arg-type]  # maps of options

    def ended(i: int, j: int) -> Result | str:
        try:
            return handles[i][j].result(timeout=60)
        except HeadraceError as error:
            return error.code

    for i in range(20):
        text, several, score, embed, failed = (ended(i, j) for j in range(5))
        assert isinstance(text, Result)
        assert text.token_ids == expected_tokens(f"text {i}", 20 + i)
        assert isinstance(several, Result)
        n = 1 + i % BATCH_SIZE
        assert several.choices == (expected_choices(f"several {i}", 10 + i, n) if n > 1 else None)
        assert isinstance(score, Result)
        assert score.scores == [-float(i + 1), -1.0]
        assert isinstance(embed, Result)
        assert embed.embedding is not None
        assert failed == "BATCH_FAILED"
    assert_left_no_trace(worker, view)


def test_reply_larger_than_the_server_takes_is_an_error_and_keeps_nothing_else_back() -> None:
    """Whose least setting is a megabyte. Refusing what is longer, it closes the connection."""
    with Server(proto_max_bulk_len="1mb") as server, worker_thread(server.url, "q", FakeEngine(max_batch_size=2 * BATCH_SIZE)) as worker:
        with Client(server.url, queue="q") as client:
            large = client.submit("hello", max_tokens=3000, n=BATCH_SIZE, logprobs=0)
            beside = client.submit("beside", max_tokens=30)
            with pytest.raises(InvalidRequest, match="logprobs asks for more than one reply can hold"):
                large.result(timeout=60)
            assert beside.result(timeout=30).token_ids == expected_tokens("beside", 30)
            assert client.submit_and_wait("after", max_tokens=3, timeout=30).token_ids == expected_tokens("after", 3)
        eventually(lambda: idle(worker), "the engine idle")


@pytest.fixture
def link(server: Server) -> Iterator[Proxy]:
    with Proxy(server.port).running() as proxy:
        yield proxy


LARGE: Any = {"max_tokens": 1500, "n": 2 * BATCH_SIZE, "logprobs": 0}  # a megabyte
SLOW_BYTES_PER_S = 30_000  # half a minute for that, while Redis may be silent for only a second


def test_reply_that_the_link_does_not_carry_is_an_error_and_keeps_nothing_else_back(
    client: Client, queue: str, link: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.reply_writer.LARGE_TIMEOUTS", 3)
    engine = FakeEngine(max_batch_size=2 * BATCH_SIZE + 1, step_s=0.001)
    with worker_thread(link.url, queue, engine, socket_timeout_s=1.0) as worker:
        large = client.submit("hello", **LARGE)
        eventually(lambda: worker.loop.num_tokens > 100, "it runs")
        link.bytes_per_s = SLOW_BYTES_PER_S
        beside = client.submit("beside", max_tokens=30)
        assert beside.result(timeout=30).token_ids == expected_tokens("beside", 30)
        with pytest.raises(InvalidRequest, match="logprobs asks for more than one reply can hold"):
            large.result(timeout=60)
        assert client.submit_and_wait("after", max_tokens=3, timeout=30).token_ids == expected_tokens("after", 3)
        eventually(lambda: idle(worker), "the engine idle")


def test_reply_that_the_link_does_not_carry_holds_up_no_reload_and_is_there_when_it_does(
    client: Client, queue: str, view: QueueView, link: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.reply_writer.LARGE_TIMEOUTS", 1000)
    size = 2 * BATCH_SIZE + 1
    engines = {"load": lambda model: FakeEngine(model, max_batch_size=size, step_s=0.001), "socket_timeout_s": 1.0, "drain_s": 0.1}
    with worker_thread(link.url, queue, **engines) as worker:
        large = client.submit("hello", **LARGE)
        running = eventually(lambda: worker.registry.get(large.id), "it runs")
        eventually(lambda: worker.loop.num_tokens > 100, "it runs")
        link.bytes_per_s = SLOW_BYTES_PER_S
        eventually(lambda: running.num_timeouts > 0, "it is not carried")
        long = client.submit("long", max_tokens=50_000, stream=True)
        chunks = long.stream(timeout=60)
        next(chunks)
        worker.request_reload(Reload("second"))
        eventually(lambda: view.workers()[worker.config.name]["model"] == "second", "reloaded")
        next(chunks)
        assert client.submit_and_wait("after", max_tokens=3, timeout=30).model == "second"
        long.cancel()
        link.bytes_per_s = math.inf
        assert large.result(timeout=60).model == "fake"


def test_frame_that_the_link_does_not_carry_holds_up_no_reload(
    client: Client, queue: str, view: QueueView, link: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokens are generated again."""
    monkeypatch.setattr("worker.reply_writer.LEAST_BULK_BYTES", 50_000)
    settings: Any = {"socket_timeout_s": 1.0, "drain_s": 0.1, "checkpoint_tokens": 10**6, "checkpoint_s": 3600}
    with worker_thread(link.url, queue, load=FakeEngine, **settings) as worker:
        handle = client.submit("hello", max_tokens=20_000, logprobs=0)
        eventually(lambda: worker.loop.num_tokens > 3000, "much is generated")
        link.bytes_per_s = SLOW_BYTES_PER_S
        worker.request_reload(Reload("second"))
        eventually(lambda: view.workers()[worker.config.name]["model"] == "second", "reloaded")
        link.bytes_per_s = math.inf
        assert handle.result(timeout=60).token_ids == expected_tokens("hello", 20_000)


def test_frame_that_the_link_does_not_carry_is_tried_ever_more_rarely_while_others_stream(
    client: Client, queue: str, link: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    large, tries = 50_000, [0]
    write = Ledger.write

    def counted(ledger: Ledger, frames: Sequence[TokensFrame], settlements: Sequence[Settlement]) -> Written:
        tries[0] += any(len(frame.body) > large for frame in frames)
        return write(ledger, frames, settlements)

    monkeypatch.setattr("worker.reply_writer.LEAST_BULK_BYTES", large)
    monkeypatch.setattr(Ledger, "write", counted)
    settings: Any = {"socket_timeout_s": 1.0, "drain_s": 0.1, "checkpoint_tokens": 3000, "checkpoint_s": 3600}
    engine = FakeEngine(step_s=0.001)
    with worker_thread(link.url, queue, load=lambda _: engine, **settings) as worker:
        heavy = client.submit("hello", max_tokens=60_000, logprobs=0)
        eventually(lambda: worker.loop.num_tokens > 2000, "much is generated")
        link.bytes_per_s = SLOW_BYTES_PER_S
        others = client.submit("other", max_tokens=40_000, stream=True).stream(timeout=60)
        eventually(lambda: tries[0] >= 3, "it is tried again")
        tries_before = tries[0]
        for _ in zip(range(100), others, strict=False):
            pass
        assert tries[0] - tries_before <= 4
        link.bytes_per_s = math.inf
        heavy.cancel()


@pytest.mark.parametrize(
    ("options", "field"),
    [({}, "max_tokens"), ({"n": 2}, "n"), ({"n": 2, "logprobs": 0}, "logprobs"), ({"stream": True}, "max_tokens")],
    ids=str,
)
def test_reply_above_our_own_limit_is_an_error_at_once(
    client: Client, view: QueueView, worker: Worker, options: dict[str, Any], field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.reply_writer.LEAST_BULK_BYTES", 1000)
    monkeypatch.setattr("worker.reply_writer.MAX_REPLY_BYTES", 2000)
    with pytest.raises(InvalidRequest, match="asks for more than one reply can hold") as refused:
        client.submit_and_wait("hello", max_tokens=400, timeout=30, **options)
    assert refused.value.field == field
    assert client.submit_and_wait("hello", max_tokens=100, timeout=30).token_ids == expected_tokens("hello", 100)
    assert_left_no_trace(worker, view)


def test_cancelled_request_whose_partial_output_is_too_large_is_told_without_it(
    client: Client, view: QueueView, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.reply_writer.LEAST_BULK_BYTES", 1000)
    monkeypatch.setattr("worker.reply_writer.MAX_REPLY_BYTES", 2000)
    handle = client.submit("hello", max_tokens=90_000)
    eventually(lambda: worker.loop.num_tokens > 1000, "much is written")
    handle.cancel()
    with pytest.raises(Cancelled) as cancelled:
        handle.result(timeout=30)
    assert (cancelled.value.partial_text, cancelled.value.partial_token_ids) == ("", [])
    assert_left_no_trace(worker, view)


def test_large_replies_that_are_due_together_are_in_memory_one_at_a_time(
    client: Client, view: QueueView, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    large, write, most = 1000, Ledger.write, 0

    def watched(ledger: Ledger, frames: Sequence[TokensFrame], settlements: Sequence[Settlement]) -> Written:
        nonlocal most
        if settlements:
            most = max(most, sum(type(item) is Settlement and item.num_bytes > large for item in gc.get_objects()))
        return write(ledger, frames, settlements)

    monkeypatch.setattr("worker.reply_writer.LEAST_BULK_BYTES", large)
    monkeypatch.setattr(Ledger, "write", watched)
    handles = client.submit_many([{"prompt": f"text {i}", "max_tokens": 400} for i in range(BATCH_SIZE)])
    for i, handle in enumerate(handles):
        assert handle.result(timeout=30).token_ids == expected_tokens(f"text {i}", 400)
    assert most == 1
    assert_left_no_trace(worker, view)
