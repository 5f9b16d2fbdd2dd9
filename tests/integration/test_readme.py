"""The README's commands, run as they stand there against a real worker. ``make`` targets are what runs this."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from worker.embedded import EmbeddedQueue

README = (Path(__file__).parents[2] / "README.md").read_text()
COMMANDS = [
    line.removeprefix("$ ")
    for block in re.findall(r"```console\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
    if line[:2] == "$ "
]
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def run(command: str, queue: EmbeddedQueue) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "HEADRACE_REDIS": queue.url, "HEADRACE_QUEUE": queue.queue}
    command = command.replace("redis-cli", f"redis-cli -u {queue.url}")
    return subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, timeout=240, check=False)


def test_the_two_commands_of_a_new_machine_are_there() -> None:
    assert {"make demo", "make test"} <= set(COMMANDS)


@pytest.mark.parametrize("command", [command for command in COMMANDS if not command.startswith("make ")])
def test_a_command_of_the_readme_runs(command: str, real_queue: EmbeddedQueue) -> None:
    if "redis-cli" in command and shutil.which("redis-cli") is None:
        pytest.skip("redis-cli is not installed")
    done = run(command, real_queue)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert not done.stderr


@pytest.mark.parametrize("code", PYTHON)
def test_the_readmes_python_runs(code: str, real_queue: EmbeddedQueue, capfd: pytest.CaptureFixture[str]) -> None:
    exec(code.replace("redis://127.0.0.1:6379/0", real_queue.url), {})  # noqa: S102 - the README is ours
    assert "Paris" in capfd.readouterr().out
