"""The README's commands, run as they stand there against a real worker. ``make`` targets are what runs this."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import click
import pytest

from producer.cli.group import main
from worker.embedded import EmbeddedQueue

README = (Path(__file__).parents[2] / "README.md").read_text()
COMMANDS = [
    line.removeprefix("$ ")
    for block in re.findall(r"```console\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
    if line[:2] == "$ "
]
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


MENTIONED = re.findall(r"`((?:headrace|python -m) [^`]+)`", README)
ROWS = [line for line in README.splitlines() if line.startswith("| ")]


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


def test_the_demo_answers_and_draws(tmp_path: Path) -> None:
    """What ``make demo`` runs once everything is installed."""
    assert "`headrace demo --plot demo.png`" in README
    program = Path(sys.executable).parent / "headrace"
    command = [str(program), "demo", "--plot", "demo.png"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert re.search(r"requests +24", done.stdout)
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("code", PYTHON)
def test_the_readmes_python_runs(code: str, real_queue: EmbeddedQueue, capfd: pytest.CaptureFixture[str]) -> None:
    exec(code.replace("redis://127.0.0.1:6379/0", real_queue.url), {})  # noqa: S102 - the README is ours
    assert "Paris" in capfd.readouterr().out


@pytest.mark.parametrize("command", [command for command in MENTIONED if command.endswith("--help")])
def test_a_page_of_help_is_shown(command: str) -> None:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(shlex.split(command), env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout.lower()


@pytest.mark.parametrize("command", [command for command in MENTIONED if not command.endswith("--help")])
def test_a_command_that_is_mentioned_is_understood(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").touch()
    words = shlex.split(command)[1:]
    found: click.Command = main
    while isinstance(found, click.Group) and words:
        name = words.pop(0)
        chosen = found.get_command(click.Context(found), name)
        assert chosen is not None, name
        found = chosen
    with suppress(click.MissingParameter):  # a mention need not be whole
        found.make_context(command, words)


@pytest.mark.parametrize("group", ["dead", "load"])
def test_every_command_of_a_group_that_is_listed_is_there(group: str) -> None:
    (row,) = [row for row in ROWS if f"`headrace {group} " in row]
    commands = main.get_command(click.Context(main), group)
    assert isinstance(commands, click.Group)
    first, *others = re.findall(r"`([^`]+)`", row)
    assert {first.split()[-1], *others} == set(commands.list_commands(click.Context(commands)))
