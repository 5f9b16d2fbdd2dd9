"""Cancelled bulk jobs: their requests on the queue are cancelled, and no others begin."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
import redis

from producer.aio import AsyncClient
from producer.bulk import queue as bulk_jobs
from producer.bulk.files import Extent, OutputFiles
from producer.bulk.runner import BulkRunner
from producer.errors import BatchFailed
from producer.keys import Keys
from tests.bulk import DEADLINE_S, await_true, bulk_worker, descendants, make_spec, num_lines, progress, work_off
from tests.proxy import Proxy
from tests.responder import Responder, Taken, echo
from tests.servers import Server


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


async def test_all_attempts_of_a_line_are_withdrawn_also_behind_some_that_are_forgotten(
    own_server: Server, connection: redis.Redis, tmp_path: Path
) -> None:
    """A night's job may have a retry on the queue for longer than the state of a failed request lives."""
    keys, spec = Keys("default"), make_spec(tmp_path, ["p0", "p1"])
    sent = ["job.1", "job.1.2", f"job.1.{spec.retries + 1}", "job.2"]  # the first one anew
    async with AsyncClient(own_server.url) as client:
        for request_id in sent:
            await client.submit("hi", id=request_id, tier="batch")
        with OutputFiles(spec) as files:
            await BulkRunner(client, spec, files).withdraw(Extent.of(spec.input))
    assert [connection.hget(keys.state(request_id), "status") for request_id in sent] == [b"cancelled"] * len(sent)
    assert not connection.exists(keys.state("job.1.1"), keys.state("job.2.1"))


def test_cancelling_a_job_whose_input_is_gone_cancels_what_it_left_on_the_queue(
    own_server: Server, connection: redis.Redis, tmp_path: Path
) -> None:
    """By their numbers; some are of blank lines, which are not to be reported."""

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
