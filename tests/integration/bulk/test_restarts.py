"""Bulk jobs whose worker or whose Redis goes down: nothing is run or written twice, and nothing is missing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import redis

from producer.aio import AsyncClient
from producer.bulk import queue as bulk_jobs
from producer.bulk.files import OutputFiles
from producer.bulk.runner import LOST_ATTEMPTS, BulkRunner
from tests.bulk import (
    DEADLINE_S,
    HEADRACE,
    await_true,
    bulk_worker,
    descendants,
    is_free,
    kill_all,
    make_spec,
    num_lines,
    records,
    work_off,
)
from tests.responder import Responder, Taken, echo
from tests.servers import Server

IMPATIENT = [*HEADRACE[:2], f"from producer.bulk import queue; queue._OUTAGE_TRIES = 1; {HEADRACE[2]}"]


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


async def test_line_whose_first_attempts_are_forgotten_continues_with_the_one_that_is_known(
    own_server: Server, connection: redis.Redis, tmp_path: Path
) -> None:
    spec = make_spec(tmp_path, ["a", "b", "c"], retries=1)
    sent = ["job.1.1", "job.2.2", "job.3"]  # the second line's first reply was lost as well
    async with AsyncClient(own_server.url) as client:
        for request_id, prompt in zip(sent, "abc", strict=True):
            await client.submit(prompt, id=request_id, tier="batch")
        with OutputFiles(spec):
            pass  # as an earlier run that was interrupted
        with OutputFiles(spec) as files, Responder(own_server.url, "default").running() as responder:
            assert await BulkRunner(client, spec, files).run()
    assert [record["id"] for record in records(spec.output + ".part")] == sent
    assert [request.id for request in responder.seen] == sent


@pytest.mark.parametrize(("resumed", "num_perhaps_sent"), [(False, 0), (True, 2)])
async def test_redis_is_asked_for_the_attempts_of_lines_that_may_have_been_sent_alone(
    own_server: Server, connection: redis.Redis, tmp_path: Path, resumed: bool, num_perhaps_sent: int
) -> None:
    spec = make_spec(tmp_path, [f"p{i}" for i in range(10)], window=2, retries=0)
    if resumed:
        with OutputFiles(spec):
            pass
    async with AsyncClient(own_server.url) as client:
        with OutputFiles(spec) as files, Responder(own_server.url, "default").running():
            assert await BulkRunner(client, spec, files).run()
    stats: Any = connection.info("commandstats")
    others = 2 * 10  # for each request, one of the enqueue script and one of the responder
    assert stats["cmdstat_hget"]["calls"] == others + num_perhaps_sent * (1 + LOST_ATTEMPTS)


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


def connected(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False
