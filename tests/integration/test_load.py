"""Load tests of a queue whose worker has the fake engine: they pass if all is well, and say so if it is not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from click.testing import CliRunner, Result

from producer import Client
from producer.cli.group import main
from producer.keys import Keys
from producer.load import trace
from producer.load.books import Remains, remains
from tests.servers import Server
from tests.workers import QueueView, WorkerProcess, eventually

HEADRACE = (sys.executable, "-c", "from producer.cli import main; main(prog_name='headrace')")


class Load:
    """Runs ``headrace load`` on one queue."""

    def __init__(self, url: str, queue: str, raw: redis.Redis) -> None:
        self.url, self.queue = url, queue
        self.view = QueueView(raw, queue)

    def __call__(self, *args: object) -> Result:
        return CliRunner().invoke(main, ["load", *map(str, args), "--redis", self.url, "--queue", self.queue], prog_name="headrace")

    def report(self, *args: object) -> dict[str, Any]:
        """The report of a run that passes."""
        run = self(*args, "--json")
        assert run.exit_code == 0, run.output
        said: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
        assert said["ok"]
        return said


@pytest.fixture
def load(server: Server, queue: str, raw: redis.Redis) -> Load:
    return Load(server.url, queue, raw)


@pytest.fixture
def worker(load: Load) -> Iterator[WorkerProcess]:
    with WorkerProcess(load.url, load.queue, "--name", "w1", "--step-ms", 2) as worker:
        load.view.await_running()
        yield worker


def checks(said: dict[str, Any]) -> dict[str, bool]:
    return {check["name"]: check["ok"] for check in said["checks"]}


def test_ramp_measures_each_step_and_names_the_capacity(load: Load, worker: WorkerProcess, tmp_path: Path) -> None:
    goals = ("--ttft-goal-ms", 60000, "--itl-goal-ms", 60000)
    said = load.report("ramp", "--steps", "1,3", "--seconds", 0.3, "--output-tokens", 8, *goals, "--report", tmp_path)
    assert [row[0] for row in said["rows"]] == [1, 3]
    assert all(row[3] > 0 for row in said["rows"])
    assert said["summary"].startswith("capacity: 3 callers at once, the most that was tried")
    assert {path.name for path in tmp_path.iterdir()} == {"ramp.json", "ramp.png", "index.html"}
    load.view.assert_clean()


def test_ramp_fails_where_the_goals_cannot_be_kept(load: Load, worker: WorkerProcess) -> None:
    run = load("ramp", "--steps", "1", "--seconds", 0.1, "--output-tokens", 4, "--ttft-goal-ms", 0.001)
    assert run.exit_code == 1
    assert "FAIL  the first step keeps the goals" in run.output
    assert "capacity: none" in run.output


def test_requests_that_nobody_answers_fail_the_test_and_are_cancelled(load: Load) -> None:
    run = load("ramp", "--steps", "2", "--seconds", 0.1, "--timeout", 0.3)
    assert run.exit_code == 1
    assert "FAIL  every request is answered: 0 of 2 (2 WAIT_TIMEOUT)" in run.output
    states = [load.view.client.hget(key, "status") for key in load.view.client.scan_iter(match=load.view.keys.state("*"))]
    assert set(states) == {b"cancelled"}


def test_mixed_compares_short_requests_alone_and_beside_long_ones(load: Load, worker: WorkerProcess) -> None:
    sizes = ("--short", 8, 4, "--long", 100, 200, "--short-callers", 2, "--long-callers", 2)
    said = load.report("mixed", *sizes, "--seconds", 0.5, "--ttft-goal-ms", 60000)
    assert [row[0] for row in said["rows"]] == ["short alone", "short beside long", "long"]
    assert checks(said)["short requests do not wait for long ones"]


def test_cancel_storm_leaves_nothing_behind(load: Load, worker: WorkerProcess) -> None:
    said = load.report("cancel-storm", "--count", 300, "--output-tokens", 20000)
    by_state = {row[0]: row[1] for row in said["rows"]}
    assert by_state["queued"] > 0
    assert by_state["running"] > 0
    assert sum(by_state.values()) == 300
    assert checks(said)["workers hold no request and no block"]
    load.view.assert_clean()


def test_cancel_storm_sees_entries_that_nobody_takes_off(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("producer.load.cancel_storm._START_S", 0.1)
    monkeypatch.setattr("producer.load.cancel_storm._SETTLE_S", 0.2)
    run = load("cancel-storm", "--count", 20)
    assert run.exit_code == 1
    assert "PASS  every request has exactly one final reply: 20 of 20" in run.output
    assert "FAIL  every entry has left its stream: 0 of 20" in run.output


def test_what_requests_leave_is_counted_one_by_one(load: Load, worker: WorkerProcess) -> None:
    with Client(load.url, queue=load.queue) as client:
        handles = [client.submit(f"hello {i}", max_tokens=2) for i in range(4)]
        for handle in handles:
            handle.result(timeout=30)
        raw, keys, ids = load.view.client, load.view.keys, [handle.id for handle in handles]
        assert remains(raw, keys, ids) == Remains()
        raw.persist(keys.reply(ids[0]))
        raw.xadd(keys.reply(ids[1]), {"type": "final"})
        raw.delete(keys.reply(ids[2]))
        running = client.submit("long", max_tokens=90000)
        eventually(load.view.pending, "it runs")
        assert remains(raw, keys, [*ids, running.id]) == Remains(on_stream=1, pending=1, without_ttl=1, not_once=3)
        running.cancel()


def test_limits_answer_with_readable_errors(load: Load, worker: WorkerProcess) -> None:
    said = load.report("limits", "--goal-ms", 60000)
    codes = {row[1] for row in said["rows"]}
    expected = {"INVALID_REQUEST", "CONTEXT_LENGTH_EXCEEDED", "DEADLINE_EXCEEDED", "QUEUE_FULL", "WAIT_TIMEOUT", "UNKNOWN_REQUEST"}
    assert codes == expected
    assert not list(load.view.client.scan_iter(match=f"headrace:{{{load.queue}-limits-*"))
    load.view.assert_clean()


def test_restart_measures_how_long_nothing_moves(load: Load, tmp_path: Path) -> None:
    options = f"--redis {load.url} --queue {load.queue} --name w1 --step-ms 2"
    script = tmp_path / "restart.sh"
    pid = tmp_path / "pid"
    with WorkerProcess(load.url, load.queue, "--name", "w1", "--step-ms", 2) as first:
        load.view.await_running()
        script.write_text(f"kill -9 {first.pid}; {sys.executable} -m tests.fakes {options} >/dev/null 2>&1 & echo $! >{pid}\n")
        sizes = ("--callers", 2, "--output-tokens", 100, "--seconds", 1.0)
        try:
            said = load.report("restart", *sizes, "--restart-command", f"sh {script}", "--report", tmp_path)
        finally:
            kill(pid)
    figures = dict(map(tuple, said["rows"]))
    assert figures["answered in a later attempt"] >= 1
    assert figures["answered by w1"] == figures["requests"]
    assert checks(said)["tokens flow again"]
    assert (tmp_path / "restart.png").exists()


def kill(pid: Path) -> None:
    os.kill(int(pid.read_text()), signal.SIGKILL)


def test_restart_orders_a_worker_of_this_host_by_its_name(load: Load, worker: WorkerProcess) -> None:
    with WorkerProcess(load.url, load.queue, "--name", "w2", "--step-ms", 2):
        load.view.await_running(2)
        said = load.report("restart", "--worker", "w1", "--callers", 2, "--output-tokens", 20, "--seconds", 0.6)
        assert worker.wait() == 0
    assert checks(said)["every request has exactly one final reply"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "give either --restart-command or --worker"),
        (("--worker", "nobody"), "no live worker is called nobody: there are none"),
    ],
)
def test_restart_needs_to_know_what_to_restart(load: Load, args: tuple[str, ...], message: str) -> None:
    run = load("restart", *args)
    assert run.exit_code == 2
    assert message in run.output


def test_restart_tells_of_a_command_that_fails(load: Load, worker: WorkerProcess) -> None:
    run = load("restart", "--restart-command", "false", "--callers", 1, "--output-tokens", 4, "--seconds", 0.2)
    assert run.exit_code == 1
    assert "FAIL  the restart succeeds: false ended with exit code 1" in run.output


def test_request_that_a_search_names_twice_is_recorded_once(
    raw: redis.Redis, queue: str, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer() -> None:
        fields = {"enqueued_ms": 10**15, "prompt_tokens": 3, "completion_tokens": 2, "tier": "batch"}
        raw.hset(keys.state("x1"), mapping=fields)  # type: ignore[arg-type]  # dict is invariant

    monkeypatch.setattr(raw, "scan_iter", lambda **_: iter([keys.state("x1").encode()] * 2))
    assert trace.record(raw, keys, 0.0, answer) == trace.Recording([trace.TraceRequest(0, 3, 2, "batch")], 0)


def test_what_was_recorded_can_be_replayed(load: Load, worker: WorkerProcess, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with Client(load.url, queue=load.queue) as client:
        client.submit_and_wait("before", max_tokens=3, timeout=30)
        command = ["load", "record", "--output", str(path), "--seconds", "2", "--redis", load.url, "--queue", load.queue]
        recorder = subprocess.Popen([*HEADRACE, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert recorder.stderr is not None
        assert recorder.stderr.readline() == "recording for 2 s\n"
        for i in range(3):
            client.submit_and_wait(
                "secret" + "x" * i, max_tokens=5 + i, ignore_eos=True, tier="batch" if i == 2 else "realtime", timeout=30
            )
        client.submit("long", max_tokens=90000)
        assert recorder.communicate(timeout=30)[0] == "3 requests recorded, 1 without lengths left out\n"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["input_length"], line["output_length"], line["tier"]) for line in lines] == [
        (6, 5, "realtime"),
        (7, 6, "realtime"),
        (8, 7, "batch"),
    ]
    assert lines[0]["timestamp"] == 0
    assert "secret" not in path.read_text()
    said = load.report("replay", path, "--speed", 4)
    assert said["rows"][0][0] == 3


def test_a_queue_with_others_requests_is_not_blamed_for_them(load: Load, worker: WorkerProcess) -> None:
    with Client(load.url, queue=load.queue) as client:
        other = client.submit("other", max_tokens=90000)
        eventually(load.view.pending, "it runs")
        said = load.report("cancel-storm", "--count", 20, "--output-tokens", 2000)
        other.cancel()
    assert "workers hold no request and no block" not in checks(said)
    assert "the queue had other requests" in said["summary"]
