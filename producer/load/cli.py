"""``headrace load``."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console

from producer.aio import AsyncClient
from producer.cli.options import open_client, queue_options, redis_errors
from producer.cli.output import print_json
from producer.client import Client
from producer.load import page
from producer.load import trace as traces
from producer.load.books import settle
from producer.load.callers import Shape
from producer.load.cancel_storm import cancel_storm as run_cancel_storm
from producer.load.limits import limits as run_limits
from producer.load.mixed import mixed as run_mixed
from producer.load.plots import can_draw
from producer.load.ramp import Goals, Step
from producer.load.ramp import ramp as run_ramp
from producer.load.report import Report
from producer.load.restart import Restart, restart_under_load
from producer.status import read_status

Command = TypeVar("Command", bound=Callable[..., Any])
_POSITIVE = click.FloatRange(0, min_open=True)
_STDERR = 2  # file descriptor
_COUNT = click.IntRange(1)


class Steps(click.ParamType[tuple[int, ...]]):
    """Numbers of callers: ``1,2,4``."""

    name = "N,N,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            steps = tuple(int(part) for part in str(value).split(","))
        except ValueError:
            steps = ()
        if not steps or min(steps) < 1:
            self.fail("give numbers of callers, such as 1,2,4,8", param, ctx)
        return steps


def _report_options(command: Command) -> Command:
    """Options of every test."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print the report as JSON."),
        click.option(
            "--report",
            "folder",
            type=click.Path(file_okay=False, path_type=Path),
            help="Folder for the report: JSON, plots, and one HTML page of all tests there.",
        ),
    ):
        command = option(command)
    return queue_options(command)


def _test_options(command: Command) -> Command:
    """Options of a test that waits for answers."""
    about = "Seconds after which a request is given up."
    return _report_options(click.option("--timeout", "timeout_s", default=600.0, show_default=True, type=_POSITIVE, help=about)(command))


def _shape_options(prompt_tokens: int, output_tokens: int) -> Callable[[Command], Command]:
    def add(command: Command) -> Command:
        for name, default in (("output-tokens", output_tokens), ("prompt-tokens", prompt_tokens)):
            command = click.option(f"--{name}", default=default, show_default=True, type=_COUNT, help="Of each request.")(command)
        return command

    return add


def _lengths_option(kind: str, default: tuple[int, int]) -> Callable[[Command], Command]:
    about = f"Tokens in and out of the {kind} requests; in the variable separated by a space."
    return click.option(f"--{kind}", nargs=2, default=default, show_default=True, type=_COUNT, help=about)


_callers_option = click.option("--callers", default=8, show_default=True, type=_COUNT, help="Streaming callers at once.")
_ttft_option = click.option("--ttft-goal-ms", default=1000.0, show_default=True, type=_POSITIVE, help="Goal of the first token, p95.")


@click.group()
def load() -> None:
    """Load-test a running queue; exit code 1 if a check fails."""


@load.command()
@_test_options
@_shape_options(128, 64)
@_ttft_option
@click.option("--itl-goal-ms", default=200.0, show_default=True, type=_POSITIVE, help="Goal of the time between tokens, p95.")
@click.option("--steps", default="1,2,4,8,16,32,64", show_default=True, type=Steps(), help="Callers of each step.")
@click.option("--seconds", default=10.0, show_default=True, type=_POSITIVE, help="Length of a step.")
def ramp(
    prompt_tokens: int, output_tokens: int, ttft_goal_ms: float, itl_goal_ms: float, steps: tuple[int, ...], seconds: float, **options: Any
) -> None:
    """Add callers step by step, and find the most that keep the goals."""

    def on_step(step: Step) -> None:
        figures = step.figures
        click.echo(
            f"{step.callers} callers: {figures['output_tokens_per_s']:.0f} tokens/s, TTFT p95 {figures['ttft_ms_p95']:.0f} ms", err=True
        )

    shape, goals = Shape(prompt_tokens, output_tokens), Goals(ttft_goal_ms, itl_goal_ms)

    def test(client: AsyncClient, timeout_s: float) -> Awaitable[Report]:
        return run_ramp(client, steps=steps, seconds=seconds, shape=shape, goals=goals, timeout_s=timeout_s, on_step=on_step)

    _run(test, **options)


@load.command()
@_test_options
@_lengths_option("short", (32, 16))
@_lengths_option("long", (1000, 256))
@click.option("--short-callers", default=4, show_default=True, type=_COUNT)
@click.option("--long-callers", default=8, show_default=True, type=_COUNT)
@_ttft_option
@click.option("--seconds", default=20.0, show_default=True, type=_POSITIVE, help="Length of each of the two phases.")
def mixed(
    short: tuple[int, int],
    long: tuple[int, int],
    short_callers: int,
    long_callers: int,
    ttft_goal_ms: float,
    seconds: float,
    **options: Any,
) -> None:
    """Short requests alone, then beside long ones."""

    def test(client: AsyncClient, timeout_s: float) -> Awaitable[Report]:
        return run_mixed(
            client,
            short=Shape(*short),
            long=Shape(*long),
            short_callers=short_callers,
            long_callers=long_callers,
            seconds=seconds,
            ttft_goal_ms=ttft_goal_ms,
            timeout_s=timeout_s,
        )

    _run(test, **options)


@load.command("cancel-storm")
@_test_options
@click.option("--count", default=1000, show_default=True, type=_COUNT, help="Requests to submit and cancel.")
@click.option("--output-tokens", default=512, show_default=True, type=_COUNT, help="Of each request, if it were not cancelled.")
def cancel_storm(redis_url: str, queue: str, count: int, output_tokens: int, **options: Any) -> None:
    """Cancel thousands of requests, queued and running, and check what is left of them."""
    with open_client(redis_url, queue) as operator:

        def test(client: AsyncClient, timeout_s: float) -> Awaitable[Report]:
            return run_cancel_storm(client, operator, count=count, output_tokens=output_tokens, timeout_s=timeout_s)

        _run(test, redis_url, queue, **options)


@load.command()
@_report_options
@click.option("--goal-ms", default=2000.0, show_default=True, type=_POSITIVE, help="How fast an error must come.")
def limits(redis_url: str, queue: str, goal_ms: float, as_json: bool, folder: Path | None) -> None:
    """Go beyond every limit, and check that a readable error comes fast."""
    _check_folder(folder)
    with open_client(redis_url, queue) as client, redis_errors():
        report = run_limits(client, redis_url, goal_ms=goal_ms)
    _finish(report, as_json, folder)


@load.command()
@_test_options
@_shape_options(128, 128)
@_callers_option
@click.option("--restart-command", help="Shell command that restarts a worker and returns.")
@click.option("--worker", help="Name of a worker on this host, or its process id: it gets SIGTERM, and its supervisor starts it again.")
@click.option("--seconds", default=30.0, show_default=True, type=_POSITIVE, help="Length of the load; half of it is after the restart.")
@click.option("--gap-goal", "gap_goal_s", default=60.0, show_default=True, type=_POSITIVE, help="Most seconds without any token.")
def restart(
    redis_url: str,
    queue: str,
    prompt_tokens: int,
    output_tokens: int,
    callers: int,
    restart_command: str | None,
    worker: str | None,
    seconds: float,
    gap_goal_s: float,
    timeout_s: float,
    **options: Any,
) -> None:
    """Restart a worker under load: for how long no token comes, and whether every request is answered once."""
    if (restart_command is None) == (worker is None):
        raise click.UsageError("give either --restart-command or --worker")
    with open_client(redis_url, queue) as operator:
        order = _command(restart_command or "") if worker is None else _sigterm(operator, _pid_of(operator, worker), timeout_s)

        def test(client: AsyncClient, timeout_s: float) -> Awaitable[Report]:
            return restart_under_load(
                client,
                operator,
                order,
                shape=Shape(prompt_tokens, output_tokens),
                num_callers=callers,
                seconds=seconds,
                gap_goal_s=gap_goal_s,
                timeout_s=timeout_s,
            )

        _run(test, redis_url, queue, timeout_s, **options)


@load.command()
@queue_options
@click.option("--output", required=True, type=click.Path(dir_okay=False, path_type=Path), help="File for the trace.")
@click.option("--seconds", default=60.0, show_default=True, type=_POSITIVE, help="How long to record.")
def record(redis_url: str, queue: str, output: Path, seconds: float) -> None:
    """Record lengths and times of the requests that come in and are answered, without their text."""
    with open_client(redis_url, queue) as client, redis_errors():
        recording = traces.record(client.redis, client.keys, seconds, lambda: click.echo(f"recording for {seconds:g} s", err=True))
    recording.write(output)
    left_out = f", {recording.num_left_out} without lengths left out" if recording.num_left_out else ""
    click.echo(f"{len(recording.requests)} requests recorded{left_out}")


@load.command()
@click.argument("trace", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@_test_options
@click.option("--speed", default=1.0, show_default=True, type=_POSITIVE, help="How many times as fast as recorded.")
def replay(trace: Path, speed: float, **options: Any) -> None:
    """Submit requests of recorded lengths at recorded times."""
    requests = traces.read(trace)

    def test(client: AsyncClient, timeout_s: float) -> Awaitable[Report]:
        return traces.replay(client, requests, speed=speed, timeout_s=timeout_s)

    _run(test, **options)


def _run(
    test: Callable[[AsyncClient, float], Awaitable[Report]],
    redis_url: str,
    queue: str,
    timeout_s: float,
    as_json: bool,
    folder: Path | None,
) -> None:
    _check_folder(folder)
    open_client(redis_url, queue).close()  # a malformed option is a usage error

    async def within_a_client() -> Report:
        async with AsyncClient(redis_url, queue) as client:
            return await test(client, timeout_s)

    with redis_errors():
        report = asyncio.run(within_a_client())
    _finish(report, as_json, folder)


def _check_folder(folder: Path | None) -> None:
    if folder is not None and not can_draw():
        raise click.UsageError("--report draws plots: headrace[demo] is not installed (matplotlib is missing)")


def _finish(report: Report, as_json: bool, folder: Path | None) -> None:
    if as_json:
        print_json(report.to_json())
    else:
        Console(width=None if sys.stdout.isatty() else 160).print(report.render())
    if folder is not None:
        click.echo(f"report: {page.write(report, folder)}", err=True)
    if not report.ok:
        raise click.exceptions.Exit(1)


def _command(command: str) -> Restart:
    async def restart() -> str:
        process = await asyncio.create_subprocess_shell(command, stdout=_STDERR)
        code = await process.wait()
        return f"{shlex.split(command)[0]} ended with exit code {code}" if code else ""

    return restart


def _sigterm(client: Client, pid: int, timeout_s: float) -> Restart:
    """The heartbeat says whether it has ended: the process may remain for long as a zombie of a busy supervisor."""

    def lives() -> bool:
        workers = [worker.fields for worker in read_status(client.redis, client.queue).workers]
        return any((said.get("host"), said.get("pid")) == (socket.gethostname(), str(pid)) for said in workers)

    async def restart() -> str:
        try:
            os.kill(pid, signal.SIGTERM)
        except OSError as error:
            return f"process {pid}: {error.strerror}"
        lived = await asyncio.to_thread(settle, lives, False, timeout_s)
        return f"process {pid} has not ended within {timeout_s:g} s" if lived else ""

    return restart


def _pid_of(client: Client, worker: str) -> int:
    """The process id of a worker, which must be on this host."""
    if worker.isdecimal():
        return int(worker)
    with redis_errors():
        said = {found.name: found.fields for found in read_status(client.redis, client.queue).workers}
    if worker not in said:
        raise click.UsageError(f"no live worker is called {worker}: there are {', '.join(said) or 'none'}")
    if said[worker].get("host") != socket.gethostname():
        raise click.UsageError(f"worker {worker} is on another host: give --restart-command")
    return int(said[worker]["pid"])
