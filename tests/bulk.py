"""Bulk jobs and their workers: rq workers as processes, their input and output files."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import redis

from producer.bulk import queue as bulk_jobs
from producer.bulk.spec import BulkSpec
from tests.servers import Server
from tests.workers import eventually

HEADRACE = [sys.executable, "-c", "from producer.cli import main; main()"]
DEADLINE_S = 60.0


def await_true(condition: Callable[[], object], what: str) -> None:
    """`eventually`, with the patience needed for processes that start and import."""
    eventually(condition, what, DEADLINE_S)


@contextmanager
def bulk_worker(server: Server, *options: str, headrace: Sequence[str] = HEADRACE) -> Iterator[subprocess.Popen[bytes]]:
    """A bulk worker in its own process group; what is left of it is killed."""
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
    """Kill the worker and its work horse at once, as when a machine is lost."""
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


def is_free(path: str) -> bool:
    """Whether no run of a job holds the file."""
    with open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
