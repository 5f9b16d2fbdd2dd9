"""Every option of every command is read from the variable that its spelling says and its help shows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import pytest
from click.core import ParameterSource

from producer.cli.group import main

OF_ALL_COMMANDS = {"--redis": "HEADRACE_REDIS", "--queue": "HEADRACE_QUEUE"}
SAMPLES = ("7", "0.75", "batch:source=nightly-*", "2031-01-31T02:00", sys.executable)


def leaves(group: click.Group, context: click.Context, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Commands that are no groups, with the words that call them."""
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from leaves(command, context, (*path, name))
        else:
            yield (*path, name), command


OPTIONS = [
    pytest.param(path, command, option, id=" ".join((*path, option.opts[0])))
    for path, command in leaves(main, click.Context(main))
    for option in command.params
    if isinstance(option, click.Option)
]


@pytest.fixture(autouse=True)
def _variables_of_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("HEADRACE_")]:
        monkeypatch.delenv(name)


def parsed(command: click.Command, *args: str) -> click.Context:
    """Its parameters, though what is required may be missing."""
    return command.make_context("command", list(args), resilient_parsing=True)


def sample(command: click.Command, option: click.Option) -> str:
    """A value that the option takes, and that is not its default."""
    context = parsed(command)
    default = context.params[str(option.name)]
    choices = option.type.choices if isinstance(option.type, click.Choice) else ()
    flags = ("false", "true") if option.secondary_opts else ("true",)
    for text in flags if option.is_flag else (*SAMPLES, *choices):
        try:
            if option.type.convert(text, option, context) != default:
                return text
        except click.BadParameter:
            continue
    raise AssertionError(f"no sample for {option.opts[0]}")


def arguments(option: click.Option, text: str) -> list[str]:
    """What says on the command line what ``text`` says in the variable."""
    if option.is_flag:
        return [option.opts[0] if text == "true" else option.secondary_opts[0]]
    return [option.opts[0], text] * (2 if option.multiple else 1) + [text] * (option.nargs - 1)


@pytest.mark.parametrize(("path", "command", "option"), OPTIONS)
def test_variable_arrives_as_the_option_does(
    path: tuple[str, ...], command: click.Command, option: click.Option, monkeypatch: pytest.MonkeyPatch
) -> None:
    spelling = option.opts[0]
    name = OF_ALL_COMMANDS.get(spelling) or "_".join(("HEADRACE", *path, spelling.lstrip("-"))).replace("-", "_").upper()
    text = sample(command, option)
    typed = parsed(command, *arguments(option, text)).params[str(option.name)]
    monkeypatch.setenv(name, " ".join([text] * 2) if option.multiple or option.nargs == 2 else text)
    context = parsed(command)
    assert context.get_parameter_source(str(option.name)) is ParameterSource.ENVIRONMENT
    assert context.params[str(option.name)] == typed
    assert typed not in (None, ())
    shown = option.get_help_record(context)
    assert shown is not None
    assert f"env var: {name}" in shown[1]


@pytest.mark.parametrize(("path", "command", "option"), OPTIONS)
def test_help_says_how_several_values_are_written_in_a_variable(
    path: tuple[str, ...], command: click.Command, option: click.Option
) -> None:
    several = option.multiple or option.nargs > 1
    assert several == ("in the variable separated by" in (option.help or ""))


def run(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    headrace = [sys.executable, "-c", "from producer.cli import main; main(prog_name='headrace')"]
    return subprocess.run([*headrace, *args], env=os.environ | environment, capture_output=True, text=True, timeout=60, check=False)


def log_lines(stderr: str) -> list[Mapping[str, Any]]:
    return [json.loads(line) for line in stderr.splitlines() if line.startswith("{")]


def test_worker_warns_once_of_variables_that_it_does_not_read(tmp_path: Path) -> None:
    typos = {"HEADRACE_WORKER_LEASE_S": "61", "HEADRACE_WORKER_REDIS_URL": "redis://:secret@nowhere"}
    meant = {"HEADRACE_WORKER_LEASE": "60", "HEADRACE_WORKER_STEP_LOG": str(tmp_path / "missing" / "steps"), "HEADRACE_SUBMIT_LAESE": "1"}
    done = run("worker", **typos, **meant)
    assert done.returncode == 1  # its step log cannot be written
    (warning,) = log_lines(done.stderr)
    assert (warning["level"], warning["names"]) == ("warning", sorted(typos))
    assert "secret" not in done.stderr


def test_worker_says_nothing_of_variables_that_it_reads(tmp_path: Path) -> None:
    done = run("worker", HEADRACE_WORKER_STEP_LOG=str(tmp_path / "missing" / "steps"))
    assert (done.returncode, log_lines(done.stderr)) == (1, [])
