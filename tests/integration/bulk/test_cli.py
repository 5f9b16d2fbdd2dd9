"""``headrace bulk``, jobs for later, and rq's own tools on bulk jobs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import redis
from click.testing import CliRunner
from rq.cron import CronScheduler

from producer.bulk import queue as bulk_jobs
from producer.bulk.cli import bulk
from producer.bulk.job import run
from producer.cli.group import main
from producer.errors import InvalidRequest, UnknownRequest
from tests.bulk import DEADLINE_S, HEADRACE, await_true, bulk_worker, make_spec, records, work_off, write_input
from tests.responder import Responder
from tests.servers import Server


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


def test_known_job_is_not_run_again_and_another_under_its_id_is_refused(own_server: Server, tmp_path: Path) -> None:
    path = write_input(tmp_path, ["a"])

    def submit(*more: str, output: str = "out.jsonl") -> tuple[int, str, str]:
        arguments = ["bulk", "submit", str(path), "--output", str(tmp_path / output), "--id", "nightly", "--redis", own_server.url, *more]
        result = CliRunner().invoke(main, arguments)
        return result.exit_code, result.stdout, result.stderr

    assert submit() == (0, "nightly\n", "")
    assert submit() == (0, "nightly\n", "headrace: nightly is known, and is not run again: queued\n")
    refused = "headrace: INVALID_REQUEST: id nightly is known as a job with another "
    assert submit("--window", "7") == (1, "", f"{refused}window\n")
    assert submit(output="other.jsonl") == (1, "", f"{refused}output, errors\n")
    with Responder(own_server.url, "default").running():
        work_off(own_server)
    assert submit("--wait")[:2] == (0, "nightly\n")
    assert submit() == (0, "nightly\n", "headrace: nightly is known, and is not run again: done\n")
    assert len(records(tmp_path / "out.jsonl")) == 1


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
