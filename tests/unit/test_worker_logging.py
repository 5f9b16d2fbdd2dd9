"""What the worker writes of itself. The form of its log is looked at in a process of its own: it is set for good."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import structlog

from worker.engine.scheduler import SchedulerStats
from worker.engine.step import StepStats
from worker.service import StepLog

CODE = """
import logging, structlog
from worker.service import configure_logging
configure_logging("info", "json")
structlog.get_logger("headrace.worker").info("ours", id="x1")
logging.getLogger("opentelemetry.exporter").warning("a library's, %d", 1)
try:
    raise ValueError("of a library")
except ValueError:
    logging.getLogger("library").exception("it failed")
logging.getLogger("library").info("too much")
"""


def test_every_line_is_json_a_librarys_too() -> None:
    run = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True, timeout=60)
    lines = [json.loads(line) for line in run.stderr.splitlines()]
    assert [(line["event"], line["level"]) for line in lines] == [
        ("ours", "info"),
        ("a library's, 1", "warning"),
        ("it failed", "error"),
    ]
    assert "ValueError: of a library" in lines[2]["exception"]
    assert all("timestamp" in line for line in lines)


STEP = StepStats(0.0125, 0.001, 3, 70, {"model": 0.0115, "sample": 0.001})


def test_step_log_has_a_line_a_step_at_once(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    with StepLog.opened(path) as steps:
        for count in (1, 2):
            steps.write(STEP, SchedulerStats())
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            assert [(line["step_ms"], line["batch_size"], line["num_tokens"]) for line in lines] == [(12.5, 3, 70)] * count
            assert [line["phase_ms"] for line in lines] == [{"model": 11.5, "sample": 1.0}] * count


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")
def test_step_log_on_a_full_disk_ends_and_says_so_once() -> None:
    with structlog.testing.capture_logs() as log, StepLog.opened(Path("/dev/full")) as steps:
        for _ in range(3):
            steps.write(STEP, SchedulerStats())
    assert [(line["event"], line["error"]) for line in log] == [("step log ended", "OSError")]
