"""The runbook's commands, run on a real server with a queue that is in use; its options and metrics held against the code."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import click
import pytest

from producer import Client
from producer.bulk import queue as bulk_jobs
from producer.bulk.spec import BulkSpec
from producer.cli.group import COMMANDS, main
from producer.errors import Poisoned
from tests.fakes import CRASH
from tests.servers import Server
from tests.workers import QueueView, WorkerProcess, eventually, worker_thread
from worker.metrics import WorkerMetrics
from worker.service import health_pages

OPS = Path(__file__).parents[2] / "ops"
DOCUMENTS = ("runbook.md", "tuning.md")
FENCE = re.compile(r"```sh\n(.*?)```", re.DOTALL)
CHANGING = ("headrace dead replay", "headrace dead purge")
EXCEPTED = ("journalctl",)  # the runbook says so itself: it needs a host with systemd


def commands(name: str) -> list[str]:
    return [line for block in FENCE.findall((OPS / name).read_text()) for line in block.splitlines() if line]


REDIS_COMMANDS = [command for command in commands("runbook.md") if command.startswith("redis-cli")]
HEADRACE_COMMANDS = [command for command in commands("runbook.md") if command.startswith(("headrace", "rq "))]
SUPERVISION = re.findall(r"```bash\n(.*?)```", (OPS / "runbook.md").read_text(), re.DOTALL)
CRONTAB = re.findall(r"```crontab\n(.*?)```", (OPS / "runbook.md").read_text(), re.DOTALL)


@dataclass(frozen=True)
class InUse:
    """A server whose queue ``default`` has a worker, requests that run, one that is done, and a dead letter."""

    port: int
    worker: str
    request_id: str
    dead_id: str

    def shell(self, command: str, folder: Path) -> subprocess.CompletedProcess[str]:
        """Run a line of the runbook as an operator does, to its end."""
        return subprocess.run(
            ["bash", "-o", "pipefail", "-c", command],
            env=self.environment(command, folder),
            cwd=folder,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=60,
        )

    def environment(self, command: str, folder: Path) -> dict[str, str]:
        """That of a shell with ``redis-cli`` and ``headrace`` pointed at this server; workers that it starts have the fake engine."""
        fake = f'"worker") shift; exec {sys.executable} -m tests.fakes --redis "$HEADRACE_REDIS" "$@";;'
        real = f'*) exec {sys.executable} -c "from producer.cli import main; main()" "$@";;'
        (folder / "headrace").write_text(f'#!/bin/sh\ncase "$1" in {fake} {real} esac\n')
        (folder / "redis-cli").write_text(f'#!/bin/sh\nexec {shutil.which("redis-cli")} -e -p {self.port} "$@"\n')
        (folder / "rq").write_text(f'#!/bin/sh\nexec {sys.executable} -m rq.cli "$@"\n')
        for name in ("headrace", "redis-cli", "rq"):
            (folder / name).chmod(0o755)
        return os.environ | {
            "PATH": f"{folder}:{os.environ['PATH']}",
            "HEADRACE_REDIS": f"redis://127.0.0.1:{self.port}/0",
            "WORKER": self.worker,
            "PYTHONPATH": str(OPS.parent),
            "ID": self.dead_id if "dead" in command else self.request_id,
        }


@pytest.fixture(scope="module")
def in_use() -> Iterator[InUse]:
    with Server("valkey") as server, server.client() as raw, Client(server.url) as client:
        view = QueueView(raw, "default")
        poison = given_up(server, client)
        with WorkerProcess(server.url, "default", "--lease", 1, "--max-attempts", 1, "--step-ms", 50) as worker:
            eventually(lambda: len(view.workers()) == 1, "the dead worker's heartbeat is over")
            done = client.submit_and_wait("hello", max_tokens=2, timeout=30)
            client.submit_many([{"prompt": "long", "max_tokens": 3000, "source": "search", "tier": tier} for tier in ("realtime", "batch")])
            eventually(lambda: view.pending() and view.pending("batch"), "requests run")
            assert worker.process.poll() is None
            with bulk_jobs.rq_connection(server.url) as connection:
                bulk_jobs.submit(connection, BulkSpec(job_id="job", input="/in.jsonl", output="/out.jsonl", errors="/errors.jsonl"))
            yield InUse(server.port, done.worker, done.id, poison)


def given_up(server: Server, client: Client) -> str:
    """Make a dead letter; returns its request's id. No worker is left."""
    poison = client.submit(CRASH, source="nightly")
    for _ in range(2):
        with WorkerProcess(server.url, "default", "--lease", 1, "--max-attempts", 1) as dying:
            eventually(lambda dying=dying: dying.process.poll() is not None or poison.status() == "failed", "it dies, or gives up")
    with pytest.raises(Poisoned):
        poison.result(timeout=1)
    return poison.id


@pytest.mark.parametrize("command", REDIS_COMMANDS)
def test_redis_recipe_answers_on_a_queue_in_use(in_use: InUse, command: str, tmp_path: Path) -> None:
    if shutil.which("redis-cli") is None:
        pytest.skip("no redis-cli on this machine")
    result = in_use.shell(command, tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert not re.search(r"^(\(error\)|ERR|NOPERM|WRONGTYPE|Could not connect)", result.stdout + result.stderr, re.MULTILINE)
    shows_nothing = ("IDLE", "SLOWLOG", "LATENCY", "limits")  # on a queue without trouble
    assert result.stdout.strip() or any(word in command for word in shows_nothing)


@pytest.mark.parametrize("command", [command for command in HEADRACE_COMMANDS if not command.startswith(CHANGING)])
def test_headrace_command_works_on_a_queue_in_use(in_use: InUse, command: str, tmp_path: Path) -> None:
    result = in_use.shell(command, tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout


@pytest.mark.parametrize("command", [command for command in HEADRACE_COMMANDS if command.startswith(CHANGING)])
def test_headrace_command_takes_the_dead_letter_away(command: str, tmp_path: Path) -> None:
    with Server("valkey") as server, server.client() as raw, Client(server.url) as client:
        dead_id = given_up(server, client)
        result = InUse(server.port, "", "", dead_id).shell(command, tmp_path)
        assert (result.returncode, result.stdout.strip()) == (0, dead_id), result.stderr
        assert raw.xlen(client.keys.dead) == 0


@pytest.mark.parametrize("command", [command for command in commands("runbook.md") if command.startswith("curl")])
def test_health_page_is_fetched(in_use: InUse, command: str, tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("no curl on this machine")
    with worker_thread(f"redis://127.0.0.1:{in_use.port}/0", "pages") as worker, health_pages(worker, WorkerMetrics("w")) as pages:
        eventually(lambda: worker.state == "running", "it serves")
        result = in_use.shell(command.replace("9100", str(pages.port)), tmp_path)
    assert (result.returncode, json.loads(result.stdout)["status"]) == (0, "ok"), result.stderr


def test_first_look_shows_what_the_runbook_says_it_does(in_use: InUse, tmp_path: Path) -> None:
    if shutil.which("redis-cli") is None:
        pytest.skip("no redis-cli on this machine")
    groups = in_use.shell("redis-cli XINFO GROUPS 'headrace:{default}:batch'", tmp_path).stdout.split()
    assert groups[groups.index("pending") + 1] == "1"
    assert groups[groups.index("lag") + 1] == "0"
    state = in_use.shell('redis-cli HGET "headrace:{default}:state:$ID" status', tmp_path).stdout
    assert state.strip() == "done"


def test_rq_info_shows_the_bulk_job(in_use: InUse, tmp_path: Path) -> None:
    (command,) = [command for command in HEADRACE_COMMANDS if command.startswith("rq info")]
    assert re.search(r"headrace-bulk +\|.* 1, 0 executing", in_use.shell(command, tmp_path).stdout)


def test_supervised_worker_is_restarted_under_load_and_serves_again(tmp_path: Path) -> None:
    loop, restart = SUPERVISION
    with Server("valkey") as server, server.client() as raw:
        operator, view = InUse(server.port, "w1", "", ""), QueueView(raw, "default")
        with supervised(loop, operator.environment(loop, tmp_path), tmp_path):
            view.await_running()
            first = view.workers()["w1"]["pid"]
            result = operator.shell(f"{restart.strip()} --seconds 2 --json", tmp_path)
            assert result.returncode == 0, result.stdout + result.stderr
            assert view.workers()["w1"]["pid"] != first
    figures = dict(json.loads(result.stdout)["rows"])
    assert figures["answered by w1"] == figures["requests"]
    assert figures["without progress, s"] >= 1.0  # the loop's own pause
    assert (tmp_path / "restart" / "index.html").exists()


@contextmanager
def supervised(loop: str, environment: dict[str, str], folder: Path) -> Iterator[None]:
    """A shell that runs ``loop`` until the end, in a process group of its own."""
    with subprocess.Popen(["bash", "-c", loop], env=environment, cwd=folder, start_new_session=True, stderr=subprocess.DEVNULL) as shell:
        try:
            yield
        finally:
            os.killpg(shell.pid, signal.SIGKILL)


def test_line_of_the_crontab_submits_a_job_a_night(in_use: InUse, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('"Hi"\n')
    *_, line = CRONTAB[0].splitlines()
    *times, command = line.split(maxsplit=5)
    assert len(times) == 5
    assert not re.search(r"(?<!\\)%", command)  # which would end it
    command = command.replace("\\%", "%").replace("/srv/bulk", str(tmp_path))
    said = {in_use.shell(command, tmp_path).stdout for _ in range(2)}
    assert said == {f"nightly-{datetime.now():%F}\n"}
    assert f"out-{datetime.now():%F}.jsonl" in in_use.shell("headrace bulk status --json", tmp_path).stdout


def test_every_command_line_of_the_documents_is_known_here() -> None:
    known = ("redis-cli", "headrace", "rq ", "curl", *EXCEPTED)
    assert [command for name in DOCUMENTS for command in commands(name) if not command.startswith(known)] == []
    assert len(REDIS_COMMANDS) > 20
    said = " ".join((OPS / "runbook.md").read_text().split())
    assert all(f"`{name}` excepted" in said for name in EXCEPTED)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_name_commands_and_options_that_exist(name: str) -> None:
    text = (OPS / name).read_text()
    context = click.Context(main)
    options = {option for command in all_commands(main, context) for option in options_of(command)}
    used = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", re.sub(r"redis-cli .*", "", text)))
    assert used - options == set()
    assert set(re.findall(r"headrace ([a-z]+)", text)) - set(COMMANDS) == set()


def all_commands(group: click.Group, context: click.Context) -> Iterator[click.Command]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield command
        if isinstance(command, click.Group):
            yield from all_commands(command, context)


def options_of(command: click.Command) -> list[str]:
    return [option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_name_metrics_that_are_exported(name: str) -> None:
    families = {family.name for family in WorkerMetrics("w").registry.collect()}
    assert set(re.findall(r"headrace:[a-z][a-z0-9_]+", (OPS / name).read_text())) - families == set()


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_name_plots_that_the_dashboard_has(name: str) -> None:
    dashboard = (OPS / "grafana/dashboards/headrace.json").read_text()
    plots = set(re.findall(r"(?<!\*)\*([A-Z][A-Za-z ,']+)\*(?!\*)", (OPS / name).read_text()))
    assert {plot for plot in plots if f'"title": "{plot}"' not in dashboard} == set()


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_within_the_documents_lead_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", (OPS / name).read_text()):
        path, _, section = target.partition("#")
        text = (OPS / (path or name)).read_text()
        headings = {line.lstrip("# ").lower().replace(" ", "-") for line in text.splitlines() if line.startswith("#")}
        assert not section or section in headings, target
