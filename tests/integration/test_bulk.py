"""Bulk jobs on a real server, worked off by real rq workers, answered by a scripted responder."""

from __future__ import annotations

import asyncio
import fcntl
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import redis
from click.testing import CliRunner
from rq.cron import CronScheduler
from rq.results import Result

from producer.aio import AsyncClient
from producer.bulk import queue as bulk_jobs
from producer.bulk.cli import bulk
from producer.bulk.files import Extent, OutputFiles
from producer.bulk.job import run
from producer.bulk.lease import RunLease
from producer.bulk.runner import BulkRunner
from producer.bulk.spec import BulkSpec
from producer.errors import BatchFailed, Cancelled, InvalidRequest, UnknownRequest
from producer.keys import Keys
from tests.proxy import Proxy
from tests.responder import Responder, Taken, echo
from tests.servers import Server
from worker.embedded import EmbeddedQueue

HEADRACE = [sys.executable, "-c", "from producer.cli import main; main()"]
IMPATIENT = [*HEADRACE[:2], f"from producer.bulk import queue; queue._OUTAGE_TRIES = 1; {HEADRACE[2]}"]
DEADLINE_S = 60.0


def await_true(condition: Callable[[], object], what: str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {DEADLINE_S} s: {what}"
        time.sleep(0.02)


@pytest.fixture
def own_server() -> Iterator[Server]:
    with Server("valkey") as running:
        yield running


@pytest.fixture
def connection(own_server: Server) -> Iterator[redis.Redis]:
    with bulk_jobs.rq_connection(own_server.url) as client:
        yield client


@contextmanager
def bulk_worker(server: Server, *options: str, headrace: Sequence[str] = HEADRACE) -> Iterator[subprocess.Popen[bytes]]:
    """A bulk worker in a process group of its own; whatever is left of it is killed."""
    command = [*headrace, "bulk", "worker", "--redis", server.url, "--lease", "2", *options]
    process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE)
    try:
        yield process
    finally:
        kill_all(process)


def descendants(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return []
    return [pid, *(grandchild for child in children for grandchild in descendants(int(child)))]


def kill_all(process: subprocess.Popen[bytes]) -> None:
    """The worker and its work horse at once, as a lost machine takes them."""
    for pid in descendants(process.pid) if process.poll() is None else ():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    if process.stderr is not None:
        process.stderr.close()


def work_off(server: Server) -> str:
    """Run a bulk worker until there is no job left; returns its log."""
    command = [*HEADRACE, "bulk", "worker", "--redis", server.url, "--burst"]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=DEADLINE_S).stderr


def assert_done_in_one_run(connection: redis.Redis, *, succeeded: int) -> None:
    """The job has ended, and what stands as its result is that of the run that did all of it."""
    ended = bulk_jobs.fetch(connection, "job")
    assert ended.is_finished
    assert (ended.return_value()["succeeded"], ended.return_value()["resumed"]) == (succeeded, 0)


def write_input(folder: Path, lines: list[Any], name: str = "in.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def make_spec(folder: Path, lines: list[Any], **more: Any) -> BulkSpec:
    path = write_input(folder, lines)
    values = {"job_id": "job", "input": str(path), "output": f"{folder}/out.jsonl", "errors": f"{folder}/out.errors.jsonl"}
    return BulkSpec(**{**values, **more})


def records(path: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def num_lines(path: str) -> int:
    try:
        return Path(path).read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def progress(connection: redis.Redis) -> dict[str, Any]:
    return bulk_jobs.view(bulk_jobs.fetch(connection, "job")).progress


def test_answers_come_in_input_order_with_a_summary_and_without_pickle(own_server: Server, connection: redis.Redis, tmp_path: Path) -> None:
    def backwards(taken: Taken) -> None:
        held.append(taken)
        if len(held) == 5 or taken.request.prompt == "p12":
            while held:
                echo(held.pop())

    held: list[Taken] = []
    spec = make_spec(tmp_path, [f"p{i}" for i in range(13)], window=5)
    bulk_jobs.submit(connection, spec)
    with Responder(own_server.url, "default", backwards).running() as responder:
        work_off(own_server)
    assert [record["text"] for record in records(spec.output)] == [f"p{i}" for i in range(13)]
    assert {(request.tier, request.source) for request in responder.seen} == {("batch", "bulk")}
    summary = bulk_jobs.fetch(connection, "job").return_value()
    assert (summary["state"], summary["total"], summary["succeeded"], summary["failed"]) == ("done", 13, 13, 0)
    assert summary["completion_tokens"] == sum(len(f"p{i}") for i in range(13))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]
    hashes = [connection.hgetall(key) for key in connection.scan_iter(match="rq:job:*", _type="hash")]
    values = [value for fields in hashes for name, value in fields.items() if name != b"data"]
    assert json.loads(hashes[0][b"meta"])
    assert not any(b"\x80\x04" in value or b"\x80\x05" in value for value in values)  # how a pickle begins


def test_answers_as_they_come_do_not_wait_for_a_slow_first_line(own_server: Server, connection: redis.Redis, tmp_path: Path) -> None:
    def first_last(taken: Taken) -> None:
        if taken.request.prompt == "p0":
            held.append(taken)
        else:
            echo(taken)
        if taken.request.prompt == "p9":
            await_true(lambda: num_lines(spec.output + ".part") == 9, "all but the first line are written")
            echo(held.pop())

    held: list[Taken] = []
    spec = make_spec(tmp_path, [f"p{i}" for i in range(10)], window=3, order="completion")
    bulk_jobs.submit(connection, spec)
    with Responder(own_server.url, "default", first_last).running():
        work_off(own_server)
    texts = [record["text"] for record in records(spec.output)]
    assert texts[-1] == "p0"
    assert sorted(texts) == sorted(f"p{i}" for i in range(10))


def test_window_bounds_what_is_on_the_queue(own_server: Server, connection: redis.Redis, tmp_path: Path) -> None:
    depths: list[int] = []

    def measure(taken: Taken) -> None:
        depths.append(taken.client.xlen(taken.keys.stream("batch")))
        echo(taken)

    bulk_jobs.submit(connection, make_spec(tmp_path, [f"p{i}" for i in range(60)], window=7))
    with Responder(own_server.url, "default", measure).running():
        work_off(own_server)
    assert len(depths) == 60
    assert max(depths) <= 7


def test_what_another_try_may_cure_is_tried_again_and_the_rest_goes_to_the_errors(
    own_server: Server, connection: redis.Redis, tmp_path: Path
) -> None:
    failures = Counter[str]()

    def trouble(taken: Taken) -> None:
        prompt = taken.request.prompt or ""
        failures[prompt] += 1
        if prompt == "hopeless" or (prompt == "cured" and failures[prompt] < 3):
            taken.error(BatchFailed("the step raised"))
        elif prompt == "cancelled":
            taken.error(Cancelled("by an operator"))
        else:
            echo(taken)

    lines = [
        "cured",
        "hopeless",
        "cancelled",
        {"custom_id": "x", "body": {"prompt": "p", "top_p": 7}},
        {"custom_id": "y", "body": 1},
        "fine",
    ]
    spec = make_spec(tmp_path, lines, retries=2)
    bulk_jobs.submit(connection, spec)
    with Responder(own_server.url, "default", trouble).running():
        work_off(own_server)
    assert [record["text"] for record in records(spec.output)] == ["cured", "fine"]
    failed = {record["line"]: record for record in records(spec.errors)}
    assert {number: record["error"]["code"] for number, record in failed.items()} == {
        2: "BATCH_FAILED",
        3: "CANCELLED",
        4: "INVALID_REQUEST",
        5: "INVALID_REQUEST",
    }
    assert (failed[4]["custom_id"], failed[4]["error"]["param"], failed[5]["custom_id"]) == ("x", "top_p", "y")
    assert (failures["cured"], failures["hopeless"], failures["cancelled"]) == (3, 3, 1)
    summary = bulk_jobs.fetch(connection, "job").return_value()
    assert (summary["succeeded"], summary["failed"], summary["errors"]) == (2, 4, spec.errors)


def test_full_queue_is_waited_for_and_fails_no_line(own_server: Server, connection: redis.Redis, tmp_path: Path) -> None:
    connection.hset(Keys("default").limits, "max_depth:batch", "2")
    spec = make_spec(tmp_path, [f"p{i}" for i in range(12)], retries=0)
    bulk_jobs.submit(connection, spec)
    with Responder(own_server.url, "default").running():
        work_off(own_server)
    assert len(records(spec.output)) == 12
    assert not Path(spec.errors).exists()


def test_lines_that_are_no_text_cost_only_themselves(own_server: Server, connection: redis.Redis, tmp_path: Path) -> None:
    spec = make_spec(tmp_path, [])
    huge = b'"' + b"x" * (9 * 1024 * 1024) + b'"\n'
    Path(spec.input).write_bytes(b'\xef\xbb\xbf"first"\r\n\n"\xff"\n' + huge + b'"last, without a newline"')
    bulk_jobs.submit(connection, spec)
    with Responder(own_server.url, "default").running():
        work_off(own_server)
    assert [(record["line"], record["text"]) for record in records(spec.output)] == [(1, "first"), (5, "last, without a newline")]
    assert [record["line"] for record in records(spec.errors)] == [3, 4]


def test_text_file_has_a_prompt_a_line(own_server: Server, connection: redis.Redis, tmp_path: Path) -> None:
    spec = make_spec(tmp_path, [], input=f"{tmp_path}/in.txt")
    Path(spec.input).write_text('Why?\n{"x": 1}\n')
    bulk_jobs.submit(connection, spec)
    with Responder(own_server.url, "default").running():
        work_off(own_server)
    assert [record["text"] for record in records(spec.output)] == ["Why?", '{"x": 1}']


def test_job_killed_twice_in_the_middle_ends_complete_with_no_line_run_or_written_twice(
    own_server: Server, connection: redis.Redis, tmp_path: Path
) -> None:
    lines = [{"custom_id": f"c{i}", "body": {"prompt": f"p{i}"}} for i in range(2000)]
    spec = make_spec(tmp_path, lines, window=50)
    bulk_jobs.submit(connection, spec)
    with Responder(own_server.url, "default").running() as responder:
        for written in (500, 1200):
            with bulk_worker(own_server) as worker:
                await_true(lambda written=written: num_lines(spec.output + ".part") >= written, "progress")
                kill_all(worker)
            assert not Path(spec.output).exists()
        with Path(spec.output + ".part").open("ab") as file:
            file.write(b'{"id":"job.19')  # a line that the kill has torn
        with bulk_worker(own_server):
            await_true(Path(spec.output).exists, "the output")
            await_true(lambda: bulk_jobs.fetch(connection, "job").is_finished, "the job's end")
    assert [record["custom_id"] for record in records(spec.output)] == [f"c{i}" for i in range(2000)]
    assert [record["response"]["body"]["choices"][0]["text"] for record in records(spec.output)] == [f"p{i}" for i in range(2000)]
    assert max(Counter(request.id for request in responder.seen).values()) == 1
    summary = bulk_jobs.fetch(connection, "job").return_value()
    assert summary["succeeded"] == 2000
    assert summary["resumed"] >= 1200


def test_sigterm_puts_the_job_back_at_once_and_costs_no_try(own_server: Server, connection: redis.Redis, tmp_path: Path) -> None:
    hold: list[Taken] = []

    def slow_tail(taken: Taken) -> None:
        echo(taken) if int((taken.request.prompt or "p0")[1:]) < 20 else hold.append(taken)

    spec = make_spec(tmp_path, [f"p{i}" for i in range(30)], window=10)
    bulk_jobs.submit(connection, spec)
    with Responder(own_server.url, "default", slow_tail).running() as responder:
        with bulk_worker(own_server) as worker:
            await_true(lambda: num_lines(spec.output + ".part") == 20, "progress")
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(DEADLINE_S) == 0
            assert worker.stderr is not None
            assert b"Traceback" not in worker.stderr.read()
        job = bulk_jobs.fetch(connection, "job")
        assert job.is_queued
        assert job.retries_left == bulk_jobs.MAX_CRASHES
        assert job.meta["state"] == "interrupted"
        for taken in hold:
            echo(taken)
        work_off(own_server)
    assert [record["text"] for record in records(spec.output)] == [f"p{i}" for i in range(30)]
    assert len(responder.seen) == 30


@pytest.mark.parametrize("lost", ["reply", "reply and state"])
def test_replies_that_nobody_read_in_time_are_asked_for_anew_and_cost_no_retry(
    own_server: Server, connection: redis.Redis, tmp_path: Path, lost: str
) -> None:
    held: list[Taken] = []
    spec = make_spec(tmp_path, ["a", "b"], retries=0)
    bulk_jobs.submit(connection, spec)
    with Responder(own_server.url, "default", held.append).running(), bulk_worker(own_server) as worker:
        await_true(lambda: len(held) == 2, "requests in flight")
        worker.terminate()
        worker.wait(DEADLINE_S)
    for taken in held:
        echo(taken)
        connection.delete(taken.keys.reply(taken.request.id), *([taken.keys.state(taken.request.id)] if "state" in lost else []))
    with Responder(own_server.url, "default").running():
        work_off(own_server)
    assert [record["text"] for record in records(spec.output)] == ["a", "b"]
    assert not Path(spec.errors).exists()


def test_horse_whose_worker_alone_was_killed_gives_the_files_up(own_server: Server, connection: redis.Redis, tmp_path: Path) -> None:
    release: list[Taken] = []
    spec = make_spec(tmp_path, ["a", "b"])
    bulk_jobs.submit(connection, spec)
    with Responder(own_server.url, "default", release.append).running():
        with bulk_worker(own_server) as worker:
            await_true(lambda: len(release) == 2, "requests in flight")
            os.kill(worker.pid, signal.SIGKILL)
            worker.wait()
        for taken in release:
            echo(taken)
        with bulk_worker(own_server):
            await_true(Path(spec.output).exists, "the output")
    assert [record["text"] for record in records(spec.output)] == ["a", "b"]


@pytest.mark.parametrize("ending", ["raised", "killed", "abandoned"])
def test_job_that_has_failed_and_is_requeued_has_the_tries_of_a_fresh_one(
    own_server: Server, connection: redis.Redis, tmp_path: Path, ending: str
) -> None:
    held: list[Taken] = []
    spec = make_spec(tmp_path, ["a"], input=f"{tmp_path}/{'gone' if ending == 'raised' else 'in.jsonl'}")
    job = bulk_jobs.submit(connection, spec)
    connection.hset(job.key, "retries_left", "0")
    requeue = [sys.executable, "-m", "rq.cli", "requeue", "-S", "json", "-u", own_server.url, "--queue", bulk_jobs.QUEUE_NAME, "job"]
    with Responder(own_server.url, "default", held.append).running():
        with bulk_worker(own_server) as worker:
            if ending != "raised":
                await_true(lambda: held, "a request in flight")
                os.kill(descendants(worker.pid)[1], signal.SIGKILL) if ending == "killed" else kill_all(worker)
            with bulk_worker(own_server):
                await_true(lambda: bulk_jobs.fetch(connection, "job").is_failed, "the job is given up")
                await_true(lambda: bulk_jobs.fetch(connection, "job").should_retry, "its tries are renewed")
        subprocess.run(requeue, check=True, capture_output=True, timeout=DEADLINE_S)
    requeued = bulk_jobs.fetch(connection, "job")
    assert (requeued.is_queued, requeued.retries_left) == (True, bulk_jobs.MAX_CRASHES)


def test_job_that_is_on_the_queue_twice_is_run_by_one_worker_and_the_other_waits(
    own_server: Server, connection: redis.Redis, tmp_path: Path
) -> None:
    held: list[Taken] = []
    spec = make_spec(tmp_path, ["a", "b"])
    job = bulk_jobs.submit(connection, spec)
    with Responder(own_server.url, "default", held.append).running() as responder, bulk_worker(own_server, "--name", "first"):
        await_true(lambda: len(held) == 2, "requests in flight")
        bulk_jobs.bulk_queue(connection).enqueue_job(job)
        with bulk_worker(own_server, "--name", "second", "--burst") as second:
            await_true(lambda: bulk_jobs.fetch(connection, "job").worker_name == "second", "the second run")
            for taken in held:
                echo(taken)
            assert second.wait(DEADLINE_S) == 0
    assert [record["text"] for record in records(spec.output)] == ["a", "b"]
    assert len(responder.seen) == 2
    assert_done_in_one_run(connection, succeeded=2)


def test_job_that_is_on_the_queue_once_more_when_it_has_ended_is_not_run_again(
    own_server: Server, connection: redis.Redis, tmp_path: Path
) -> None:
    spec = make_spec(tmp_path, ["a", "b"])
    job = bulk_jobs.submit(connection, spec)
    with Responder(own_server.url, "default").running() as responder:
        work_off(own_server)
        Path(spec.input).unlink()
        bulk_jobs.bulk_queue(connection).enqueue_job(job)
        work_off(own_server)
    assert len(responder.seen) == 2
    assert_done_in_one_run(connection, succeeded=2)


def test_run_that_was_silent_for_too_long_leaves_the_job_to_whoever_has_it_now(
    own_server: Server, connection: redis.Redis, tmp_path: Path
) -> None:
    held: list[Taken] = []
    spec = make_spec(tmp_path, ["a", "b"])
    bulk_jobs.submit(connection, spec)
    with Responder(own_server.url, "default", held.append).running() as responder, bulk_worker(own_server):
        await_true(lambda: len(held) == 2, "requests in flight")
        connection.set("rq:headrace-bulk:run:job", "another run's")
        await_true(lambda: progress(connection)["state"] == "interrupted", "it stops")
        assert is_free(spec.output + ".part")
        for taken in held:
            echo(taken)
        connection.delete("rq:headrace-bulk:run:job")
        await_true(Path(spec.output).exists, "the output")
    assert [record["text"] for record in records(spec.output)] == ["a", "b"]
    assert len(responder.seen) == 2


async def test_lease_of_a_run_is_kept_while_it_is_renewed_and_taken_again_where_redis_lost_it(connection: redis.Redis) -> None:
    first, second = (RunLease(connection, "job", 30.0) for _ in range(2))
    assert await first.take()
    assert not await second.take()
    assert await first.renew()
    connection.flushall()
    assert await first.renew()
    connection.flushall()
    assert await second.take()
    assert not await first.renew()
    await first.release()
    assert await second.renew()
    await second.release()
    while not await first.take():
        await asyncio.sleep(0.05)


def test_cancelling_a_running_job_cancels_its_requests_and_keeps_what_is_written(
    own_server: Server, connection: redis.Redis, tmp_path: Path
) -> None:
    def some(taken: Taken) -> None:
        if taken.request.prompt in ("p0", "p1"):
            echo(taken)

    spec = make_spec(tmp_path, [f"p{i}" for i in range(10)], window=5)
    bulk_jobs.submit(connection, spec)
    with Responder(own_server.url, "default", some).running(), bulk_worker(own_server):
        await_true(lambda: progress(connection).get("in_flight") == 5, "requests in flight")
        assert bulk_jobs.cancel(connection, "job") == "cancelling"
        await_true(lambda: progress(connection)["state"] == "cancelled", "the job's end")
        await_true(lambda: bulk_jobs.fetch(connection, "job").is_finished, "the job's end")
    orders = {fields[b"id"] for _, fields in connection.xrange(Keys("default").control) if fields[b"op"] == b"cancel"}
    assert orders == {f"job.{number}".encode() for number in range(3, 8)}
    assert num_lines(spec.output + ".part") == 2
    assert not Path(spec.output).exists()
    assert bulk_jobs.cancel(connection, "job") == "finished"


@pytest.mark.parametrize("ending", ["interrupted", "killed", "failed"])
def test_cancelling_a_job_that_does_not_run_cancels_what_it_left_on_the_queue(
    own_server: Server, connection: redis.Redis, tmp_path: Path, ending: str
) -> None:
    def fail_once(taken: Taken) -> None:
        if taken.request.id == "job.1":
            taken.error(BatchFailed("the step raised"))
        else:
            held.append(taken)

    held: list[Taken] = []
    spec = make_spec(tmp_path, [f"p{i}" for i in range(10)], window=3)
    job = bulk_jobs.submit(connection, spec)
    if ending == "failed":
        connection.hset(job.key, "retries_left", "0")
    with Responder(own_server.url, "default", fail_once).running() as responder:
        with bulk_worker(own_server) as worker:
            await_true(lambda: len(held) == 3, "a window of requests")
            if ending == "interrupted":
                worker.terminate()
                worker.wait(DEADLINE_S)
            elif ending == "failed":
                os.kill(descendants(worker.pid)[1], signal.SIGKILL)
                await_true(lambda: bulk_jobs.fetch(connection, "job").is_failed, "the job is given up")
        assert bulk_jobs.cancel(connection, "job") == "cancelling"
        with bulk_worker(own_server):
            await_true(lambda: bulk_jobs.fetch(connection, "job").is_finished, "the job's end")
    assert progress(connection)["state"] == "cancelled"
    orders = {fields[b"id"].decode() for _, fields in connection.xrange(Keys("default").control) if fields[b"op"] == b"cancel"}
    assert orders == {"job.1.1", "job.2", "job.3"}
    assert len(responder.seen) == 4
    assert bulk_jobs.cancel(connection, "job") == "finished"


def test_cancelling_a_job_whose_input_is_gone_cancels_what_it_left_on_the_queue(
    own_server: Server, connection: redis.Redis, tmp_path: Path
) -> None:
    """By their numbers, some of which are blank lines', of which nobody is to hear."""

    def some(taken: Taken) -> None:
        held.append(taken) if taken.request.prompt != "p0" else echo(taken)

    held: list[Taken] = []
    spec = make_spec(tmp_path, [], window=3)
    Path(spec.input).write_text("".join(f'"p{i}"\n\n' for i in range(10)))
    bulk_jobs.submit(connection, spec)
    with Responder(own_server.url, "default", some).running() as responder:
        with bulk_worker(own_server) as worker:
            await_true(lambda: len(held) == 3 and num_lines(spec.output + ".part") == 1, "a window of requests")
            worker.terminate()
            worker.wait(DEADLINE_S)
        Path(spec.input).unlink()
        assert bulk_jobs.cancel(connection, "job") == "cancelling"
        work_off(own_server)
    assert progress(connection)["state"] == "cancelled"
    orders = {fields[b"id"].decode() for _, fields in connection.xrange(Keys("default").control) if fields[b"op"] == b"cancel"}
    assert orders == {"job.3", "job.5", "job.7"}
    assert len(responder.seen) == 4


async def test_stopped_job_withdraws_requests_that_were_sent_and_not_heard_of(
    own_server: Server, connection: redis.Redis, tmp_path: Path
) -> None:
    keys = Keys("default")
    spec = make_spec(tmp_path, [f"p{i}" for i in range(10)], window=5)
    with Proxy(own_server.port).running() as proxy, OutputFiles(spec) as files:
        proxy.delay_s = 0.5
        async with AsyncClient(proxy.url) as client:
            runner = BulkRunner(client, spec, files)
            running = asyncio.create_task(runner.run())
            while connection.xlen(keys.stream("batch")) < 5:
                await asyncio.sleep(0.01)
            runner.stop()
            assert not await running
            await runner.withdraw(Extent.of(spec.input))
    assert {connection.hget(keys.state(f"job.{number}"), "status") for number in range(1, 6)} == {b"cancelled"}
    assert not connection.exists(keys.state("job.6"))


def test_cancelling_a_queued_job_keeps_it_from_beginning(own_server: Server, connection: redis.Redis, tmp_path: Path) -> None:
    bulk_jobs.submit(connection, make_spec(tmp_path, ["a"]))
    assert bulk_jobs.cancel(connection, "job") == "cancelled"
    work_off(own_server)
    assert [item.status for item in bulk_jobs.jobs(connection)] == ["canceled"]
    assert connection.xlen(Keys("default").stream("batch")) == 0


def test_same_id_is_submitted_once(own_server: Server, connection: redis.Redis, tmp_path: Path) -> None:
    spec = make_spec(tmp_path, ["a"])
    assert bulk_jobs.submit(connection, spec).id == bulk_jobs.submit(connection, spec).id
    with Responder(own_server.url, "default").running():
        work_off(own_server)
        bulk_jobs.submit(connection, spec)
        work_off(own_server)
    assert len(records(spec.output)) == 1


def test_output_of_another_job_is_not_touched_and_the_job_fails_at_once(
    own_server: Server, connection: redis.Redis, tmp_path: Path
) -> None:
    spec = make_spec(tmp_path, ["a"])
    Path(spec.output).write_text('{"id":"other.1"}\n')
    bulk_jobs.submit(connection, spec)
    work_off(own_server)
    assert Path(spec.output).read_text() == '{"id":"other.1"}\n'
    (item,) = bulk_jobs.jobs(connection)
    assert item.status == "failed"
    assert "is not of this job" in (item.error or "")


def test_run_whose_end_was_not_recorded_finds_its_files_complete(own_server: Server, connection: redis.Redis, tmp_path: Path) -> None:
    spec = make_spec(tmp_path, ["a", 17])
    bulk_jobs.submit(connection, spec)
    with Responder(own_server.url, "default").running() as responder:
        work_off(own_server)
        before = Path(spec.output).read_bytes(), Path(spec.errors).read_bytes()
        job = bulk_jobs.fetch(connection, "job")
        Result.delete_all(job)
        bulk_jobs.bulk_queue(connection).enqueue_job(job)
        work_off(own_server)
    assert (Path(spec.output).read_bytes(), Path(spec.errors).read_bytes()) == before
    assert len(responder.seen) == 1
    assert bulk_jobs.fetch(connection, "job").return_value()["resumed"] == 2


def test_redis_restart_in_the_middle_is_waited_out(tmp_path: Path) -> None:
    with Server("valkey", appendonly="yes", appendfsync="always") as server, bulk_jobs.rq_connection(server.url) as connection:

        def restart_once(taken: Taken) -> None:
            if taken.request.prompt == "p50":
                server.restart()
                await_true(lambda: connected(taken.client), "the responder's connection")
            echo(taken)

        spec = make_spec(tmp_path, [f"p{i}" for i in range(100)], window=20)
        bulk_jobs.submit(connection, spec)
        with Responder(server.url, "default", restart_once).running(), bulk_worker(server):
            await_true(Path(spec.output).exists, "the output")
        assert [record["text"] for record in records(spec.output)] == [f"p{i}" for i in range(100)]


def test_outage_that_ends_the_worker_ends_its_horse_and_the_next_worker_goes_on(tmp_path: Path) -> None:
    held: list[Taken] = []
    spec = make_spec(tmp_path, ["a", "b"])
    with Server("valkey", appendonly="yes", appendfsync="always") as server, bulk_jobs.rq_connection(server.url) as connection:
        bulk_jobs.submit(connection, spec)
        with Responder(server.url, "default", held.append).running() as responder:
            with bulk_worker(server, headrace=IMPATIENT) as worker:
                await_true(lambda: len(held) == 2, "requests in flight")
                server.kill()
                worker.wait(DEADLINE_S)
                await_true(lambda: is_free(spec.output + ".part"), "the horse's end")
            server.start()
            await_true(lambda: connected(held[0].client), "the responder's connection")
            for taken in held:
                echo(taken)
            with bulk_worker(server):
                await_true(Path(spec.output).exists, "the output")
        assert [record["text"] for record in records(spec.output)] == ["a", "b"]
        assert len(responder.seen) == 2


def is_free(path: str) -> bool:
    """Whether no run of a job holds the file."""
    with open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def connected(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


def test_commands_submit_wait_show_and_cancel(own_server: Server, tmp_path: Path) -> None:
    path = write_input(tmp_path, ["a", "b"])
    environment = {"HEADRACE_REDIS": own_server.url}

    def headrace(*arguments: str) -> str:
        result = CliRunner().invoke(bulk, arguments, env=environment)
        assert result.exit_code == 0, result.output
        return result.stdout

    with Responder(own_server.url, "default").running(), bulk_worker(own_server):
        assert headrace("submit", str(path), "--output", str(tmp_path / "out.jsonl"), "--id", "mine", "--wait") == "mine\n"
    assert len(records(tmp_path / "out.jsonl")) == 2
    (said,) = [json.loads(line) for line in headrace("status", "--json").splitlines()]
    assert (said["id"], said["status"], said["progress"]["succeeded"]) == ("mine", "finished", 2)
    assert "done" in headrace("status", "mine")
    assert headrace("cancel", "mine") == "finished\n"


def test_waiting_for_a_job_with_failed_lines_exits_with_1(own_server: Server, tmp_path: Path) -> None:
    path = write_input(tmp_path, ["a", 17])
    with Responder(own_server.url, "default").running(), bulk_worker(own_server):
        arguments = ["submit", str(path), "--output", str(tmp_path / "out.jsonl"), "--redis", own_server.url, "--wait"]
        assert CliRunner().invoke(bulk, arguments).exit_code == 1
    assert len(records(tmp_path / "out.errors.jsonl")) == 1


def test_unknown_jobs_and_unusable_ids_are_typed_errors(connection: redis.Redis, tmp_path: Path) -> None:
    with pytest.raises(UnknownRequest, match="no bulk job nothing"):
        bulk_jobs.cancel(connection, "nothing")
    with pytest.raises(InvalidRequest, match="id must be"):
        make_spec(tmp_path, [], job_id="a b")


def test_foreign_jobs_on_the_rq_queue_are_shown_and_fail_alone(own_server: Server, connection: redis.Redis, tmp_path: Path) -> None:
    cron = CronScheduler(connection)
    cron.register(run, bulk_jobs.QUEUE_NAME, args=({},), interval=86400)
    (pickled,) = [job.enqueue(connection).id for job in cron.get_jobs()]
    foreign = [
        pickled,
        bulk_jobs.bulk_queue(connection).enqueue("os.getcwd", job_id="other").id,
        bulk_jobs.bulk_queue(connection).enqueue(bulk_jobs.FUNCTION, "no spec", meta={"a": 1}, job_id="wrong").id,
    ]
    bulk_jobs.submit(connection, make_spec(tmp_path, ["a"]))
    connection.hset("rq:job:half", "last_heartbeat", "")  # what rq may leave of a job that was removed
    connection.rpush(bulk_jobs.bulk_queue(connection).key, "half")
    seen = {item.id: item for item in bulk_jobs.jobs(connection)}
    assert {job_id: seen[job_id].error for job_id in foreign} == dict.fromkeys(foreign, "not a Headrace job")
    with pytest.raises(InvalidRequest, match="is not a Headrace job"):
        bulk_jobs.cancel(connection, "wrong")
    with Responder(own_server.url, "default").running():
        work_off(own_server)
    assert {item.id: item.status for item in bulk_jobs.jobs(connection)} == {
        "job": "finished",
        "other": "finished",
        "wrong": "failed",
        pickled: "failed",
    }
    shown = CliRunner().invoke(bulk, ["status", "--redis", own_server.url], env={"COLUMNS": "200"}).output
    assert shown.count("not a Headrace job") == 3
    assert "out.jsonl" in shown


def test_job_for_later_waits_for_its_time(own_server: Server, connection: redis.Redis, tmp_path: Path) -> None:
    def submit(job_id: str, at: datetime) -> None:
        arguments = ["submit", str(path), "--output", f"{tmp_path}/{job_id}.jsonl", "--id", job_id, "--at", at.strftime("%FT%T%z")]
        result = CliRunner().invoke(bulk, [*arguments, "--redis", own_server.url])
        assert result.output == f"{job_id}\n"

    path = write_input(tmp_path, ["a"])
    submit("later", datetime.now() + timedelta(hours=1))
    submit("due", datetime.now(UTC) - timedelta(seconds=1))
    assert {item.id: item.status for item in bulk_jobs.jobs(connection)} == {"later": "scheduled", "due": "scheduled"}
    with Responder(own_server.url, "default").running(), bulk_worker(own_server):
        await_true((tmp_path / "due.jsonl").exists, "the output of the job that is due")
        submit("soon", datetime.now(UTC) + timedelta(seconds=2))
        await_true((tmp_path / "soon.jsonl").exists, "the output of the job whose time comes")
    assert {item.id: item.status for item in bulk_jobs.jobs(connection)}["later"] == "scheduled"
    assert bulk_jobs.cancel(connection, "later") == "cancelled"
    assert not connection.keys("rq:scheduler:*")  # no process of rq's own


def test_due_job_runs_behind_a_sentinel(own_server: Server, tmp_path: Path) -> None:
    with Server(sentinel=True, monitor=f"main 127.0.0.1 {own_server.port} 1") as sentinel:
        url = f"redis+sentinel://127.0.0.1:{sentinel.port}/main/0"
        spec = make_spec(tmp_path, ["a"])
        with bulk_jobs.rq_connection(url) as connection:
            bulk_jobs.submit(connection, spec, datetime.now(UTC))
        with Responder(url, "default").running():
            command = [*HEADRACE, "bulk", "worker", "--redis", url, "--burst"]
            subprocess.run(command, check=True, capture_output=True, timeout=DEADLINE_S)
    assert [record["text"] for record in records(spec.output)] == ["a"]


def test_rqs_own_tools_show_and_work_off_bulk_jobs(own_server: Server, connection: redis.Redis, tmp_path: Path) -> None:
    spec = make_spec(tmp_path, ["a"])
    bulk_jobs.submit(connection, spec)
    rq = [sys.executable, "-m", "rq.cli"]
    queued = subprocess.run([*rq, "info", "--raw", "-u", own_server.url], capture_output=True, text=True, check=True).stdout
    assert "queue headrace-bulk 1" in queued
    worker = [*rq, "worker", "--burst", "-u", own_server.url, "--serializer", "json", "headrace-bulk"]
    environment = os.environ | {"HEADRACE_REDIS": own_server.url}
    with Responder(own_server.url, "default").running():
        subprocess.run(worker, env=environment, capture_output=True, check=True, timeout=DEADLINE_S)
    assert [record["text"] for record in records(spec.output)] == ["a"]


def test_real_worker_answers_a_file_of_chats_and_embeddings_beside_a_realtime_caller(real_queue: EmbeddedQueue, tmp_path: Path) -> None:
    lines = [
        {
            "custom_id": f"c{i}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": "any", "messages": [{"role": "user", "content": f"Say {i}."}], "max_tokens": 4, "temperature": 0},
        }
        for i in range(12)
    ]
    embedding = {"custom_id": "e", "method": "POST", "url": "/v1/embeddings", "body": {"model": "any", "input": ["Once"]}}
    spec = make_spec(tmp_path, [*lines, embedding])
    environment = os.environ | {"HEADRACE_REDIS": real_queue.url}
    with bulk_jobs.rq_connection(real_queue.url) as connection, real_queue.client() as client:
        bulk_jobs.submit(connection, spec)
        worker = subprocess.Popen([*HEADRACE, "bulk", "worker", "--burst"], env=environment, stderr=subprocess.DEVNULL)
        answer = client.submit_and_wait("The capital of France is", max_tokens=4, temperature=0, timeout=240)
        assert worker.wait(240) == 0
    assert "Paris" in answer.text
    *said, embedded = records(spec.output)
    assert [record["custom_id"] for record in said] == [f"c{i}" for i in range(12)]
    (vector,) = embedded["response"]["body"]["data"]
    assert math.hypot(*vector["embedding"]) == pytest.approx(1.0, rel=1e-3)
    assert all(record["response"]["body"]["usage"]["completion_tokens"] in range(1, 5) for record in said)
    assert all(record["response"]["body"]["choices"][0]["message"]["content"] for record in said)
