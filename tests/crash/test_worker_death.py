"""Workers that die, stop or hang, as real processes under real signals: every request is answered once, and continues where it was."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from producer import Client, Handle, Result
from producer.codec import decode_chunk, decode_frame
from producer.errors import HeadraceError
from tests.fakes import CRASH, KILL, WEDGE, expected_text, expected_tokens
from tests.servers import Server
from tests.workers import QueueView, WorkerProcess, eventually

LEASE_S = 1.0


class Scene:
    """A server and a queue on it, a client, and the ways to look at them."""

    def __init__(self, server: Server, queue: str, folder: Path) -> None:
        self.server = server
        self.queue = queue
        self.trace = folder / "trace"
        self.client = Client(server.url, queue=queue)
        self.view = QueueView(server.client(), queue)

    def worker(self, *options: object, lease_s: float = LEASE_S) -> WorkerProcess:
        return WorkerProcess(self.server.url, self.queue, "--lease", lease_s, "--trace", self.trace, *options)

    @contextmanager
    def running_worker(self, *options: object, lease_s: float = LEASE_S) -> Iterator[WorkerProcess]:
        with self.worker(*options, lease_s=lease_s) as worker:
            eventually(lambda: self.said(worker).get("state") == "running", "the worker runs")
            yield worker

    def said(self, worker: WorkerProcess) -> dict[str, str]:
        """A worker's heartbeat; empty if it has none."""
        return next((said for said in self.view.workers().values() if said.get("pid") == str(worker.pid)), {})

    def submit(self, count: int, max_tokens: int, **options: object) -> dict[str, Handle]:
        """``count`` requests by prompt."""
        prompts = [f"prompt {i}" for i in range(count)]
        items = [{"prompt": prompt, "max_tokens": max_tokens, **options} for prompt in prompts]
        return dict(zip(prompts, self.client.submit_many(items), strict=True))  # type: ignore[arg-type]  # each is a map of options

    def await_progress(self, handles: dict[str, Handle]) -> None:
        """Until all run and some tokens of each are published."""
        eventually(lambda: all(self.view.frames(handle.id) for handle in handles.values()), "all under way")

    def generated_twice(self) -> int:
        """Tokens that some step made though an earlier one had."""
        steps = Counter(line for line in self.trace.read_text().splitlines())
        return sum(count - 1 for count in steps.values())


@pytest.fixture
def scene(any_server: Server, queue: str, tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(any_server, queue, tmp_path)
    yield scene
    scene.client.close()
    scene.view.client.close()


def assert_all_answered_once(scene: Scene, handles: dict[str, Handle], max_tokens: int) -> list[Result]:
    results = [handle.result(timeout=60) for handle in handles.values()]
    for (prompt, handle), result in zip(handles.items(), results, strict=True):
        assert result.token_ids == expected_tokens(prompt, max_tokens)
        assert result.text == expected_text(prompt, max_tokens)
        assert scene.view.finals(handle.id) == 1
    scene.view.assert_clean()
    return results


def assert_frames_have_no_seam(scene: Scene, handle: Handle) -> None:
    position = 0
    for fields in scene.view.frames(handle.id):
        frame = decode_frame(fields)
        if frame.type == "tokens":
            chunk = decode_chunk(frame)
            assert chunk.index == position
            position += len(chunk.token_ids)


def test_64_in_flight_survive_a_sigkill_and_lose_at_most_a_checkpoint(scene: Scene) -> None:
    with scene.running_worker("--step-ms", 5, "--checkpoint-tokens", 10) as victim:
        handles = scene.submit(64, 200)
        scene.await_progress(handles)
        victim.kill()
        with scene.running_worker("--step-ms", 0):
            running_s = time.monotonic()
            results = assert_all_answered_once(scene, handles, 200)
    assert time.monotonic() - running_s < LEASE_S + 15
    assert {result.attempt for result in results} == {2}
    assert scene.generated_twice() <= 64 * 2 * 10  # a checkpoint's worth a request, and one that was on its way


def test_streaming_caller_sees_neither_gap_nor_repeat(scene: Scene) -> None:
    handle = scene.client.submit("stream me", max_tokens=150, stream=True)
    chunks = []
    with scene.running_worker("--step-ms", 10) as victim, ThreadPoolExecutor(1) as pool:
        reading = pool.submit(lambda: chunks.extend(handle.stream(timeout=60)))
        eventually(lambda: len(scene.view.frames(handle.id)) > 10, "streaming")
        victim.kill()
        with scene.running_worker("--step-ms", 1):
            reading.result(60)
    assert "".join(chunk.text for chunk in chunks) == expected_text("stream me", 150)
    assert {chunk.attempt for chunk in chunks} == {1, 2}
    assert_frames_have_no_seam(scene, handle)
    assert scene.generated_twice() <= 2


def test_several_outputs_are_made_anew_and_are_the_same(scene: Scene) -> None:
    with scene.running_worker("--step-ms", 10, "--checkpoint-tokens", 5) as victim:
        several = scene.client.submit("several", max_tokens=150, n=3)
        eventually(lambda: f"{several.id}#2 20\n" in scene.trace.read_text(), "all under way")
        victim.kill()
        with scene.running_worker("--step-ms", 0):
            result = several.result(timeout=60)
    assert result.choices is not None
    assert [choice.token_ids for choice in result.choices] == [expected_tokens("several", 150, i) for i in range(3)]
    assert [choice.text for choice in result.choices] == [expected_text("several", 150, i) for i in range(3)]
    assert result.attempt == 2
    assert [frame[b"type"] for frame in scene.view.frames(several.id)] == [b"final"]
    scene.view.assert_clean()


def test_same_name_restarted_takes_up_its_own_at_once(scene: Scene) -> None:
    with scene.running_worker("--name", "pod-0", "--step-ms", 5, lease_s=60) as victim:
        handles = scene.submit(8, 100, stream=True)
        scene.await_progress(handles)
        victim.kill()
        with scene.worker("--name", "pod-0", lease_s=60):
            results = assert_all_answered_once(scene, handles, 100)
    assert {result.attempt for result in results} == {2}


def test_stopped_worker_that_comes_back_changes_nothing(scene: Scene) -> None:
    with scene.running_worker("--step-ms", 20) as stale:
        handles = scene.submit(8, 60, stream=True)
        scene.await_progress(handles)
        stale.signal(signal.SIGSTOP)
        with scene.running_worker("--step-ms", 1):
            results = assert_all_answered_once(scene, handles, 60)
            time.sleep(max(0.0, 3 * LEASE_S - 1.0))  # it sleeps for three leases in all
            frames = {handle.id: scene.view.frames(handle.id) for handle in handles.values()}
            stale.signal(signal.SIGCONT)
            eventually(lambda: scene.said(stale).get("held") == "0", "it noticed that it lost them")
            assert stale.drain() == 0
            assert {handle.id: scene.view.frames(handle.id) for handle in handles.values()} == frames
    assert {result.attempt for result in results} == {2}


def test_long_generation_keeps_its_lease(scene: Scene) -> None:
    with scene.running_worker("--step-ms", 20, lease_s=0.5), scene.running_worker(lease_s=0.5):
        handle = scene.client.submit("long", max_tokens=200)
        while handle.status() != "done":
            assert all(pending["times_delivered"] == 1 for pending in scene.view.pending())
            time.sleep(0.05)
    assert handle.result().attempt == 1
    assert scene.generated_twice() == 0


def test_wedged_engine_loses_its_lease(scene: Scene) -> None:
    with scene.running_worker("--step-ms", 20) as wedged:
        handles = scene.submit(4, 400, stream=True)
        scene.await_progress(handles)
        poison = scene.client.submit(WEDGE, max_tokens=5)
        eventually(lambda: scene.said(wedged).get("state") in ("wedged", "failed"), "found wedged")
        poison.cancel()
        with scene.running_worker():
            assert_all_answered_once(scene, handles, 400)
        wedged.kill()


def test_wedged_worker_ends_and_hands_back_what_nobody_took(scene: Scene) -> None:
    with scene.running_worker("--step-ms", 20) as wedged:
        handles = scene.submit(4, 400, stream=True)
        scene.await_progress(handles)
        poison = scene.client.submit(WEDGE, max_tokens=5)
        assert wedged.wait() == 1
        assert poison.status() == "queued"
        poison.cancel()
        with scene.running_worker(lease_s=600):  # which would not take what has only lapsed
            assert_all_answered_once(scene, handles, 400)


def test_long_generation_outlives_more_deaths_than_would_poison_it(scene: Scene) -> None:
    """As on hosts that come and go: each death counts only until the next token is published."""
    handle = scene.client.submit("long", max_tokens=400, stream=True)
    for _ in range(5):
        published = len(scene.view.frames(handle.id))
        with scene.running_worker("--step-ms", 10, lease_s=0.5) as victim:
            eventually(lambda published=published: len(scene.view.frames(handle.id)) > published + 5, "under way")
            victim.kill()
    with scene.running_worker("--step-ms", 0, lease_s=0.5):
        (result,) = assert_all_answered_once(scene, {"long": handle}, 400)
    assert result.attempt == 6
    assert_frames_have_no_seam(scene, handle)


def test_engine_that_fails_for_good_hands_everything_back_and_exits_with_an_error(scene: Scene) -> None:
    with scene.running_worker("--step-ms", 10, lease_s=60) as failing:
        handles = scene.submit(6, 80, stream=True)
        scene.await_progress(handles)
        culprit = scene.client.submit(CRASH, max_tokens=5)
        assert failing.wait() == 1
        culprit.cancel()
        with scene.running_worker(lease_s=60):
            results = assert_all_answered_once(scene, handles, 80)
    assert {result.attempt for result in results} == {2}
    assert scene.generated_twice() <= 2 * len(handles)


HOLDING = ("--max-batch-size", 4, "--fetch-ahead", 1000)
MAX_RUNNING = 4 + 2 + 1  # with one of these: the batch, what the engine holds beside it, and one that is handed over


def submit_and_await_held(scene: Scene, worker: WorkerProcess, count: int) -> dict[str, Handle]:
    """All of them with the worker, which runs a few."""
    handles = scene.submit(count, 30)
    eventually(lambda: int(scene.said(worker).get("ahead", 0)) > count - 100, "held")
    return handles


def test_crowd_that_waits_with_a_worker_is_never_in_doubt_when_it_is_killed(scene: Scene) -> None:
    handles: dict[str, Handle] = {}
    for _ in range(3):  # with all of what is left in its hands each time
        with scene.running_worker("--step-ms", 20, *HOLDING, lease_s=0.5) as victim:
            handles = handles or submit_and_await_held(scene, victim, 300)
            eventually(lambda victim=victim: int(scene.said(victim).get("ahead", 0)) > 200, "held")
            victim.kill()
    assert max(pending["times_delivered"] for pending in scene.view.pending()) <= 3
    assert sum(pending["times_delivered"] > 0 for pending in scene.view.pending()) <= 3 * MAX_RUNNING
    with scene.running_worker("--max-batch-size", 32, "--fetch-ahead", 100, lease_s=0.5):
        results = assert_all_answered_once(scene, handles, 30)
    assert sum(result.attempt > 1 for result in results) <= 3 * MAX_RUNNING
    assert scene.view.client.xlen(scene.view.keys.dead) == 0


def test_crowd_that_waits_with_a_worker_is_handed_back_at_once_when_it_drains(scene: Scene) -> None:
    with scene.running_worker("--step-ms", 20, "--drain-seconds", 0.1, *HOLDING, lease_s=60) as holder:
        handles = submit_and_await_held(scene, holder, 300)
        assert holder.drain() == 0
        with scene.running_worker("--max-batch-size", 16, lease_s=60):
            results = assert_all_answered_once(scene, handles, 30)
    assert {result.attempt for result in results} == {1}
    assert scene.generated_twice() == 0


@pytest.mark.parametrize(("options", "count"), [((), 10), (HOLDING, 200)], ids=["neighbours run beside it", "a crowd waits behind it"])
def test_request_that_kills_its_workers_is_given_up_and_costs_nobody_else(scene: Scene, options: tuple[object, ...], count: int) -> None:
    stop = threading.Event()

    def supervise() -> None:
        while not stop.is_set():
            with scene.worker("--step-ms", 2, *options, lease_s=0.5) as worker:
                while not stop.is_set() and worker.process.poll() is None:
                    stop.wait(0.05)

    threads = [threading.Thread(target=supervise) for _ in range(2)]
    neighbours = {} if options else scene.submit(count, 40)
    poison = scene.client.submit(KILL, max_tokens=5, source="nightly")
    handles = neighbours or scene.submit(count, 40)
    for thread in threads:
        thread.start()
    try:
        with pytest.raises(HeadraceError) as caught:
            poison.result(timeout=60)
        results = assert_all_answered_once(scene, handles, 40)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert caught.value.code == "POISONED"
    ((_, letter),) = scene.view.client.xrange(scene.view.keys.dead)
    assert (letter[b"id"], letter[b"dead_attempts"]) == (poison.id.encode(), b"3")
    assert scene.view.finals(poison.id) == 1
    num_interrupted = sum(result.attempt > 1 for result in results)
    if options:
        assert num_interrupted <= 3 * MAX_RUNNING
    else:
        assert num_interrupted > 0, "none ran beside it"


def test_drain_finishes_what_runs_and_reads_no_more(scene: Scene) -> None:
    with scene.running_worker("--step-ms", 5) as worker:
        handles = scene.submit(8, 400)  # long enough to be seen draining
        eventually(lambda: len(scene.view.pending()) == 8, "all running")
        worker.signal(signal.SIGTERM)
        eventually(lambda: scene.said(worker).get("state") == "draining", "draining")
        late = scene.client.submit("late", max_tokens=5)
        assert worker.wait() == 0
        token_ids = [handle.result(timeout=5).token_ids for handle in handles.values()]
        assert token_ids == [expected_tokens(prompt, 400) for prompt in handles]
        assert late.status() == "queued"
    assert (scene.view.workers(), scene.view.consumers()) == ({}, set())


@pytest.mark.parametrize("how", ["drain time over", "second signal"])
def test_drain_hands_the_rest_back_at_once_and_counts_no_attempt(scene: Scene, how: str) -> None:
    drain_s = 0.2 if how == "drain time over" else 60
    with scene.running_worker("--step-ms", 20, "--drain-seconds", drain_s, lease_s=60) as worker, scene.running_worker(lease_s=60) as other:
        other.signal(signal.SIGSTOP)  # so that the first one gets them all
        handles = scene.submit(8, 200)
        eventually(lambda: len(scene.view.pending()) == 8, "all running")
        worker.signal(signal.SIGTERM)
        if how == "second signal":
            eventually(lambda: scene.said(worker).get("state") == "draining", "draining")
            worker.signal(signal.SIGTERM)
        assert worker.wait() == 0
        other.signal(signal.SIGCONT)
        results = assert_all_answered_once(scene, handles, 200)
    assert {result.attempt for result in results} == {1}
    assert scene.generated_twice() == 0


def test_rolling_restarts_under_load_lose_nothing_and_keep_nobody_waiting(scene: Scene) -> None:
    chance = random.Random(3)
    stop = threading.Event()
    done: list[Result] = []
    options = ("--step-ms", 2, "--drain-seconds", 0.05)

    def caller(i: int) -> None:
        while not stop.is_set():
            result = scene.client.submit_and_wait(f"caller {i}", max_tokens=20 + i, timeout=60)
            assert result.token_ids == expected_tokens(f"caller {i}", 20 + i)
            done.append(result)

    with ExitStack() as stack, ThreadPoolExecutor(16) as pool:
        workers = [stack.enter_context(scene.running_worker(*options, lease_s=30)) for _ in range(2)]
        calls = [pool.submit(caller, i) for i in range(16)]
        for turn in range(8):
            time.sleep(chance.uniform(0.0, 0.2))
            assert workers[turn % 2].drain() == 0
            workers[turn % 2] = stack.enter_context(scene.running_worker(*options, lease_s=30))
        stop.set()
        for call in calls:
            call.result(60)
    assert {result.attempt for result in done} == {1}
    assert max(result.timings.total_ms for result in done) < 20_000  # a lease is 30 s: no hand-over waited for one
    assert scene.generated_twice() == 0
    scene.view.assert_clean()
