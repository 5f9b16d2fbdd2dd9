"""A bulk job is run by one worker at a time, and once."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import redis
from rq.results import Result

from producer.bulk import queue as bulk_jobs
from producer.bulk.files import OutputFiles
from producer.bulk.lease import RunLease
from tests.bulk import DEADLINE_S, await_true, bulk_worker, is_free, make_spec, progress, records, work_off
from tests.responder import Responder, Taken, echo
from tests.servers import Server


def assert_done_in_one_run(connection: redis.Redis, *, succeeded: int) -> None:
    """The job has ended, and its result is that of the run that did all of it."""
    ended = bulk_jobs.fetch(connection, "job")
    assert ended.is_finished
    assert (ended.return_value()["succeeded"], ended.return_value()["resumed"]) == (succeeded, 0)


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


def test_run_that_waits_for_the_files_of_one_that_finishes_takes_up_what_is_there(tmp_path: Path) -> None:
    """Their names have changed by then."""
    spec = make_spec(tmp_path, ["a"])
    part = f"{spec.output}.part"

    def num_open() -> int:
        return sum(os.path.realpath(f"/proc/self/fd/{number}") == part for number in os.listdir("/proc/self/fd"))

    def done() -> set[int]:
        with OutputFiles(spec) as files:
            files.finish()
            return files.done

    with ThreadPoolExecutor(1) as pool:
        with OutputFiles(spec) as files:
            files.write_answer(1, {"id": "job.1", "line": 1, "text": "a"})
            second = pool.submit(done)
            await_true(lambda: num_open() == 2, "the second run waits for the first")
            files.finish()
        assert second.result() == {1}
    assert [record["text"] for record in records(spec.output)] == ["a"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


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


def test_same_id_is_submitted_once(own_server: Server, connection: redis.Redis, tmp_path: Path) -> None:
    spec = make_spec(tmp_path, ["a"])
    assert bulk_jobs.submit(connection, spec).id == bulk_jobs.submit(connection, spec).id
    with Responder(own_server.url, "default").running():
        work_off(own_server)
        bulk_jobs.submit(connection, spec)
        work_off(own_server)
    assert len(records(spec.output)) == 1


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
