"""The form of the worker's log, in a process of its own: it is set for good."""

from __future__ import annotations

import json
import subprocess
import sys

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
