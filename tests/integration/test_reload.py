"""Another model under load: nothing queued is lost, every reply names the model that made it, and a bad model changes nothing."""

from __future__ import annotations

import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from structlog.testing import capture_logs

from producer import Client
from producer.cli.group import main
from producer.codec import decode_error, decode_frame, encode_chunk, encode_frame
from producer.errors import ModelUnavailable
from producer.wire import Chunk, Frame
from tests.fakes import FOREIGN, UNLOADABLE, FakeEngine, expected_tokens
from tests.servers import Server
from tests.tiny_engine import byte_tokenizer, tiny_engine
from tests.tiny_models import VOCAB_SIZE, tiny_model
from tests.workers import QueueView, WorkerProcess, eventually, worker_thread
from worker.config import WorkerConfig
from worker.engine.engine import Engine
from worker.engine.model_loader import prepare_model
from worker.intake import Intake
from worker.reload import Reload
from worker.worker import Worker

Headrace = Callable[..., Result]


@pytest.fixture
def client(server: Server, queue: str) -> Iterator[Client]:
    with Client(server.url, queue=queue) as client:
        yield client


@pytest.fixture
def worker(server: Server, queue: str, view: QueueView) -> Iterator[WorkerProcess]:
    with WorkerProcess(server.url, queue, "--name", "w1", "--step-ms", 2) as worker:
        view.await_running()
        yield worker


@pytest.fixture
def headrace(server: Server, queue: str) -> Headrace:
    def run(*args: str) -> Result:
        return CliRunner().invoke(main, ["reload", *args, "--redis", server.url, "--queue", queue], prog_name="headrace")

    return run


def test_requests_before_during_and_after_are_answered_by_the_model_of_their_time(
    worker: WorkerProcess, client: Client, headrace: Headrace, view: QueueView
) -> None:
    before = client.submit_many([{"prompt": f"before {i}", "max_tokens": 150} for i in range(150)])  # 50 of them find no room at first
    eventually(lambda: len(view.pending()) > 50, "some run")
    said: list[Result] = []
    thread = threading.Thread(target=lambda: said.append(headrace("--model", "second")))
    thread.start()
    eventually(lambda: view.workers().get("w1", {}).get("state") == "reloading" or said, "it reloads")
    during = client.submit_many([{"prompt": f"during {i}", "max_tokens": 5} for i in range(20)])
    thread.join(30)
    assert (said[0].exit_code, said[0].output) == (0, "w1: serves second\n")
    after = client.submit_and_wait("after", max_tokens=5, timeout=30)
    results = [handle.result(timeout=30) for handle in [*before, *during]]
    assert {result.model for result in results} == {"fake", "second"}
    assert after.model == "second"
    assert [result.token_ids for result in results[:150]] == [expected_tokens(f"before {i}", 150) for i in range(150)]
    assert {result.attempt for result in results} == {1}
    assert view.workers()["w1"]["model"] == "second"
    view.assert_clean()


def test_streams_go_on_behind_what_was_handed_back(server: Server, queue: str, client: Client, view: QueueView) -> None:
    """A request longer than the drain: its text has neither gap nor repeat, and its final reply names who finished it."""
    with worker_thread(server.url, queue, load=lambda model: FakeEngine(model, step_s=0.005), drain_s=0.1) as worker:
        handle = client.submit("hello", max_tokens=300, stream=True)
        chunks = handle.stream(timeout=30)
        first = next(chunks)
        worker.request_reload(Reload("second"))
        text = first.text + "".join(chunk.text for chunk in chunks)
        result = handle.result(timeout=30)
    assert result.text == text
    assert result.token_ids == expected_tokens("hello", 300)
    assert (result.model, result.attempt) == ("second", 1)
    assert {frame[b"attempt"] for frame in view.frames(handle.id)} == {b"1"}
    view.assert_clean()


def test_unloadable_model_leaves_the_old_one_serving(worker: WorkerProcess, client: Client, headrace: Headrace, view: QueueView) -> None:
    said = headrace("--model", UNLOADABLE)
    assert said.exit_code == 1
    assert said.output == "w1: serves fake, for the other could not be loaded: FileNotFoundError: no such model: unloadable\n"
    assert client.submit_and_wait("hello", max_tokens=3, timeout=30).model == "fake"
    assert "unloadable" in view.workers()["w1"]["reload_error"]
    assert headrace("--model", "second").exit_code == 0
    assert view.workers()["w1"]["reload_error"] == ""


def test_model_that_is_refused_at_a_look_disturbs_nobody(server: Server, queue: str, client: Client, view: QueueView) -> None:
    """Running requests continue, and nothing is loaded: the cache stays with the engine that serves."""
    loaded: list[str] = []

    def load(model: str) -> FakeEngine:
        loaded.append(model)
        return FakeEngine(step_s=0.002)

    def check(model: str) -> None:
        raise ModelUnavailable(f"model {model}: no such folder")

    with capture_logs() as logs, worker_thread(server.url, queue, load=load, check_model=check) as worker:
        handle = client.submit("hello", max_tokens=90_000, stream=True)
        chunks = handle.stream(timeout=30)
        next(chunks)
        worker.request_reload(Reload("gone", "1-0"))
        eventually(lambda: view.workers()[worker.config.name]["reload"] == "1-0", "told")
        assert view.workers()[worker.config.name]["reload_error"] == "model gone: no such folder"
        next(chunks)
        assert worker.state == "running"
        handle.cancel()
    assert loaded == [""]
    assert [line["error"] for line in logs if line["log_level"] == "error"] == ["model gone: no such folder"]


def test_sighup_loads_the_served_model_anew(
    server: Server, queue: str, client: Client, headrace: Headrace, view: QueueView, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with WorkerProcess(server.url, queue, "--name", "w1", log=log) as worker:
        view.await_running()
        assert headrace("--model", "second").exit_code == 0
        handle = client.submit("hello", max_tokens=50)
        worker.signal(signal.SIGHUP)
        eventually(lambda: log.read_text().count("reloaded ") == 2, "reloaded again")
        assert handle.result(timeout=30).token_ids == expected_tokens("hello", 50)
        assert client.submit_and_wait("hello", max_tokens=3, timeout=30).model == "second"
        assert worker.drain() == 0


def test_only_the_worker_that_is_named_reloads(
    server: Server, queue: str, worker: WorkerProcess, headrace: Headrace, view: QueueView
) -> None:
    with WorkerProcess(server.url, queue, "--name", "w2"):
        view.await_running(2)
        assert headrace("--model", "second", "--worker", "w2").output == "w2: serves second\n"
        assert {name: said["model"] for name, said in view.workers().items()} == {"w1": "fake", "w2": "second"}
        assert sorted(headrace("--model", "third").output.splitlines()) == ["w1: serves third", "w2: serves third"]


def test_orders_that_come_together_are_all_carried_out_in_turn(server: Server, queue: str, view: QueueView) -> None:
    loaded: list[str] = []
    loading, go_on = threading.Event(), threading.Event()

    def load(model: str) -> FakeEngine:
        loaded.append(model)
        if model:
            loading.set()
            assert go_on.wait(30)
        return FakeEngine(model)

    with worker_thread(server.url, queue, load=load) as worker:
        view.await_running()
        worker.request_reload(Reload("second", "1-0"))
        assert loading.wait(30)
        worker.request_reload(Reload("third", "2-0"))
        worker.request_reload(Reload())  # a signal's
        go_on.set()
        eventually(lambda: loaded == ["", "second", "third", "third"], "all carried out")
        eventually(lambda: view.workers()[worker.config.name]["reload"] == "2-0", "told")
        assert view.workers()[worker.config.name]["model"] == "third"


@pytest.fixture
def resumed(monkeypatch: pytest.MonkeyPatch) -> list[Intake]:
    """Who was to fetch again and does not: whether it did would depend on which thread is quicker."""
    intakes: list[Intake] = []

    def resume(intake: Intake) -> None:
        intakes.append(intake)

    monkeypatch.setattr(Intake, "resume", resume)
    return intakes


def test_worker_that_is_told_to_stop_while_a_reload_finishes_what_runs_drains(
    server: Server, queue: str, client: Client, resumed: list[Intake]
) -> None:
    with worker_thread(server.url, queue, FakeEngine(step_s=0.005), drain_s=60.0) as worker:
        running = client.submit("hello", max_tokens=400)
        eventually(lambda: running.status() == "running", "it runs")
        worker.request_reload(Reload("second"))
        eventually(lambda: worker.state == "reloading", "it finishes what runs")
        worker.request_stop()
        result = running.result(timeout=30)
    assert (result.attempt, result.token_ids) == (1, expected_tokens("hello", 400))
    assert resumed == []


def test_worker_that_is_told_to_stop_while_it_loads_stops(
    server: Server, queue: str, client: Client, view: QueueView, resumed: list[Intake]
) -> None:
    loading, go_on = threading.Event(), threading.Event()

    def load(model: str) -> FakeEngine:
        if model:
            loading.set()
            go_on.wait(30)
        return FakeEngine(model)

    worker = Worker(WorkerConfig(redis_url=server.url, queue=queue), load)
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(worker.run()), daemon=True)
    thread.start()
    view.await_running()
    worker.request_reload(Reload("second"))
    assert loading.wait(30)
    handle = client.submit("hello", max_tokens=3)
    worker.request_stop()
    eventually(lambda: worker.state == "draining", "it ends")
    go_on.set()
    thread.join(30)
    assert codes == [0]
    assert resumed == []
    assert handle.status() == "queued"


def test_a_real_model_takes_the_place_of_another(
    server: Server, queue: str, client: Client, headrace: Headrace, view: QueueView, tmp_path: Path
) -> None:
    for seed, name in enumerate(("first", "second")):
        tiny_model("llama", seed).save_pretrained(tmp_path / name)
        byte_tokenizer().save_pretrained(tmp_path / name)
    module = ("worker.cli", "worker")
    with WorkerProcess(server.url, queue, "--name", "w1", "--model", tmp_path / "first", "--kv-memory", "8MiB", module=module) as worker:
        eventually(lambda: view.workers().get("w1", {}).get("state") == "running", "it serves", 120)
        before = [client.submit("a mill", max_tokens=64, temperature=0, ignore_eos=True) for _ in range(3)]
        assert headrace("--model", str(tmp_path / "second")).output == "w1: serves second\n"
        after = client.submit_and_wait("a mill", max_tokens=64, temperature=0, ignore_eos=True, timeout=60)
        assert headrace("--model", str(tmp_path / "third")).exit_code == 1
        assert "no such folder" in view.workers()["w1"]["reload_error"]
        assert view.workers()["w1"]["cached_blocks"] != "0"
        results = [handle.result(timeout=60) for handle in before]
        assert {result.model for result in results} <= {"first", "second"}
        assert after.model == "second"
        texts = {result.model: result.token_ids for result in [*results, after]}
        assert [texts[result.model] for result in results] == [result.token_ids for result in results]
        assert texts.get("first") != texts["second"]
        assert client.submit_and_wait("a mill", max_tokens=64, temperature=0, ignore_eos=True, timeout=60).token_ids == after.token_ids
        assert worker.drain() == 0


def test_the_engine_that_serves_lends_its_cache_to_the_one_that_is_loaded(
    server: Server, queue: str, client: Client, headrace: Headrace, view: QueueView
) -> None:
    """The old engine has the cache again if loading fails, and is gone otherwise; the same requests get the same answers."""
    engines: list[weakref.ref[Engine]] = []
    blocks_beside: list[list[int]] = []

    def load(model: str) -> Engine:
        blocks_beside.append([engine.runner.cache.num_blocks for alive in engines if (engine := alive()) is not None])
        loaded = prepare_model(tiny_model("llama"), byte_tokenizer(), model or "first")
        engine = tiny_engine(loaded, num_blocks=300 if model else 200)
        engines.append(weakref.ref(engine))
        if model == UNLOADABLE:
            raise RuntimeError("halfway")
        return engine

    def answer() -> list[int]:
        prompt = "the same beginning again and again, and an end"
        return client.submit_and_wait(prompt, max_tokens=20, temperature=0, ignore_eos=True, timeout=30).token_ids

    with capture_logs() as logs, worker_thread(server.url, queue, load=load):
        view.await_running()
        expected = answer()
        assert headrace("--model", UNLOADABLE).exit_code == 1
        assert [engine() is None for engine in engines] == [False, True]
        assert answer() == expected
        assert headrace("--model", "second").exit_code == 0
        assert [engine() is None for engine in engines] == [True, True, False]
        assert answer() == expected
    assert blocks_beside == [[], [0], [0]]
    told = [(line["blocks_before"], line["blocks"]) for line in logs if "blocks_before" in line]
    assert told == [(200, 200), (200, 300)]


@pytest.mark.parametrize("token_id", [VOCAB_SIZE, 2**31, -1])
def test_output_that_this_model_cannot_have_written_is_not_gone_on_from(
    server: Server, queue: str, client: Client, view: QueueView, token_id: int
) -> None:
    """As a model with a larger vocabulary leaves it: it would be read from behind the end of this one's."""
    chunk = Chunk("so far", [5, token_id], 0)
    view.client.xadd(view.keys.reply("x1"), encode_frame(Frame("tokens", encode_chunk(chunk)), "json") | {"tokens": 2})
    view.client.xadd(view.keys.stream("realtime"), {"id": "x1", "json": '{"prompt":"a mill","max_tokens":8}'})
    with worker_thread(server.url, queue, load=lambda _: tiny_engine()):
        eventually(lambda: view.finals("x1") == 1, "answered")
        error = decode_error(decode_frame(view.frames("x1")[-1]))
        assert (error.code, error.retryable) == ("MODEL_UNAVAILABLE", True)
        assert (error.partial_text, error.partial_token_ids) == ("so far", [5, token_id])
        assert len(client.submit_and_wait("a mill", max_tokens=3, ignore_eos=True, timeout=30).token_ids) == 3


@pytest.mark.parametrize("noted", ["another's", "this model's", None])
def test_output_of_another_vocabulary_is_not_gone_on_from(
    server: Server, queue: str, client: Client, view: QueueView, noted: str | None
) -> None:
    """All its ids exist in this model too, but stand for other words. A state without a vocabulary is trusted."""
    chunk = Chunk("so far", [5, 6], 0)
    view.client.xadd(view.keys.reply("x1"), encode_frame(Frame("tokens", encode_chunk(chunk)), "json") | {"tokens": 2})
    if noted is not None:
        vocabulary = tiny_engine().inputs.vocabulary if noted == "this model's" else "0123456789abcdef"
        view.client.hset(view.keys.state("x1"), "vocabulary", vocabulary)
    view.client.xadd(view.keys.stream("realtime"), {"id": "x1", "json": '{"prompt":"a mill","max_tokens":8,"ignore_eos":true}'})
    with worker_thread(server.url, queue, load=lambda _: tiny_engine()):
        eventually(lambda: view.finals("x1") == 1, "answered")
    if noted == "another's":
        error = decode_error(decode_frame(view.frames("x1")[-1]))
        assert (error.code, error.retryable) == ("MODEL_UNAVAILABLE", True)
        assert (error.partial_text, error.partial_token_ids) == ("so far", [5, 6])
    else:
        assert client.get("x1").result(timeout=30).token_ids[:2] == [5, 6]


def test_stream_handed_back_to_a_model_of_another_vocabulary_ends_with_what_it_had(server: Server, queue: str, client: Client) -> None:
    with worker_thread(server.url, queue, load=lambda model: FakeEngine(model, step_s=0.005), drain_s=0.1) as worker:
        begun, not_begun = client.submit("hello", max_tokens=90_000, stream=True), client.submit("several", max_tokens=90, n=2)
        chunks = begun.stream(timeout=30)
        texts = [next(chunks).text]
        worker.request_reload(Reload(FOREIGN))
        with pytest.raises(ModelUnavailable) as caught:
            texts.extend(chunk.text for chunk in chunks)
        tokens = caught.value.partial_token_ids
        assert (tokens, caught.value.partial_text) == (expected_tokens("hello", len(tokens)), "".join(texts))
        assert not_begun.result(timeout=30).model in ("fake", FOREIGN)
        assert client.redis.hget(client.keys.state(begun.id), "vocabulary") == b"common"


@pytest.mark.parametrize(("op", "stream"), [("reload", "control"), ("cancel", "admin"), ("stream", "admin")])
def test_order_on_the_stream_of_others_is_passed_over(
    worker: WorkerProcess, client: Client, headrace: Headrace, view: QueueView, op: str, stream: str
) -> None:
    handle = client.submit("hello", max_tokens=400)
    eventually(lambda: handle.status() == "running", "it runs")
    client.redis.xadd(getattr(view.keys, stream), {"op": op, "id": handle.id, "model": "smuggled"})
    assert handle.result(timeout=30).token_ids == expected_tokens("hello", 400)
    assert len(view.frames(handle.id)) < 100
    assert client.submit_and_wait("hello", max_tokens=3, timeout=30).model == "fake"
    assert view.workers()["w1"]["reload"] == ""


def test_reload_without_a_worker_is_an_error(headrace: Headrace) -> None:
    said = headrace("--model", "second")
    assert (said.exit_code, said.output) == (75, "headrace: MODEL_UNAVAILABLE: no live worker\n")
    assert "no live worker is called w9" in headrace("--worker", "w9").output


def test_reload_that_takes_too_long_is_told(worker: WorkerProcess, client: Client, headrace: Headrace) -> None:
    handle = client.submit("hello", max_tokens=90000)
    eventually(lambda: handle.status() == "running", "it runs")
    said = headrace("--timeout", "0.3")
    assert (said.exit_code, said.output) == (75, "headrace: WAIT_TIMEOUT: not reloaded yet: w1\n")
    handle.cancel()
