"""``headrace bulk``: files of prompts through the batch tier."""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import click
import redis
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from producer.bulk import queue as bulk_jobs
from producer.bulk.job import LEASE_VARIABLE, URL_VARIABLE
from producer.bulk.queue import BulkWorker, JobView
from producer.bulk.spec import ORDERS, BulkSpec, check_job_id
from producer.cli.options import queue_options, redis_errors
from producer.cli.output import print_json
from producer.core import DEFAULT_URL
from producer.options import new_id

POLL_S = 0.5
TIMES = ("%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%dT%H:%M:%S%z")
ENDED = ("finished", "failed", "canceled", "stopped")

redis_option = click.option(
    "--redis", "redis_url", envvar="HEADRACE_REDIS", default=DEFAULT_URL, show_default=True, help="Where the queue is."
)


@click.group()
def bulk() -> None:
    """Run files of prompts through the batch tier, with an rq worker that needs no GPU."""


@bulk.command()
@click.argument("source_file", metavar="INPUT", type=click.Path(exists=True, dir_okay=False, resolve_path=True, path_type=Path))
@queue_options
@click.option(
    "--output", required=True, type=click.Path(dir_okay=False, resolve_path=True, path_type=Path), help="Answers, one JSON line each."
)
@click.option("--errors", type=click.Path(dir_okay=False, resolve_path=True, path_type=Path), help="Failures [default: beside the output].")
@click.option("--id", "job_id", help="The job's id [default: a new one]; a known one is not run again, and refused for another job.")
@click.option("--window", default=256, show_default=True, type=click.IntRange(1), help="Most requests on the queue at once.")
@click.option("--order", default="input", show_default=True, type=click.Choice(ORDERS), help="Order of the answers.")
@click.option("--retries", default=3, show_default=True, type=click.IntRange(0), help="How often to retry a line after a retryable error.")
@click.option("--source", default="bulk", show_default=True, help="Label of the requests, for fairness and metrics.")
@click.option("--at", type=click.DateTime(TIMES), help="Not before this time, local unless it has an offset [default: now].")
@click.option("--wait", is_flag=True, help="Show the progress until the job is done; exit with 1 if lines failed.")
def submit(
    source_file: Path,
    redis_url: str,
    queue: str,
    output: Path,
    errors: Path | None,
    job_id: str | None,
    at: datetime | None,
    wait: bool,
    **options: Any,
) -> None:
    """Enqueue a bulk job and print its id.

    INPUT has one request per line: OpenAI's batch format (custom_id, body), an object such as {"prompt": "...", "max_tokens": 8}, or
    a JSON string. In a file that is not called .jsonl each line is a prompt. Paths are as the bulk worker sees them.
    """
    spec = BulkSpec(
        job_id=check_job_id(job_id or new_id()),
        input=str(source_file),
        output=str(output),
        errors=str(errors or output.with_suffix(f".errors{output.suffix}")),
        queue=queue,
        **options,
    )
    with _connected(redis_url) as connection, redis_errors():
        known = bulk_jobs.find(connection, spec)
        if known is not None:
            click.echo(f"headrace: {spec.job_id} is known, and is not run again: {_state(bulk_jobs.view(known))}", err=True)
        else:
            bulk_jobs.submit(connection, spec, at)
        click.echo(spec.job_id)
        if wait:
            _follow(connection, spec.job_id)


@bulk.command()
@redis_option
@click.option("--name", help="rq's name of this worker [default: a new one].")
@click.option(
    "--lease",
    "lease_s",
    default=30,
    show_default=True,
    type=click.IntRange(2),
    help="Seconds of silence after which its job continues elsewhere.",
)
@click.option("--burst", is_flag=True, help="End when there is no job left.")
def worker(redis_url: str, name: str | None, lease_s: int, burst: bool) -> None:
    """Run bulk jobs, one at a time. SIGTERM puts the running one back; it resumes where it was."""
    os.environ[URL_VARIABLE] = redis_url
    os.environ[LEASE_VARIABLE] = str(lease_s)
    with _connected(redis_url) as connection, redis_errors():
        BulkWorker(connection, name=name, lease_s=lease_s).work(burst=burst)


@bulk.command()
@click.argument("job_id", required=False)
@redis_option
@click.option("--json", "as_json", is_flag=True, help="One line of JSON per job.")
def status(job_id: str | None, redis_url: str, as_json: bool) -> None:
    """Show one bulk job, or all: lines done, failed, on the queue; tokens; lines per second."""
    with _connected(redis_url) as connection, redis_errors():
        views = [bulk_jobs.view(bulk_jobs.fetch(connection, job_id))] if job_id else list(bulk_jobs.jobs(connection))
    if as_json:
        for item in views:
            print_json(asdict(item))
    else:
        Console().print(_table(views) if views else Text("no bulk jobs"))


@bulk.command()
@click.argument("job_id")
@redis_option
def cancel(job_id: str, redis_url: str) -> None:
    """Cancel a bulk job and its requests. What is written stays, as OUTPUT.part.

    Prints cancelled (it had not begun), cancelling (its bulk worker, or the next one if the job was interrupted or has
    failed, cancels its requests), or finished (too late).
    """
    with _connected(redis_url) as connection, redis_errors():
        click.echo(bulk_jobs.cancel(connection, job_id))


def _connected(redis_url: str) -> redis.Redis:
    try:
        return bulk_jobs.rq_connection(redis_url)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def _follow(connection: redis.Redis, job_id: str) -> None:
    """Show a bar until the job has ended; exit with 1 if it or any of its lines failed."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        bar = bars.add_task("queued", total=None)
        while True:
            current = bulk_jobs.view(bulk_jobs.fetch(connection, job_id))
            said = current.progress
            done = said.get("succeeded", 0) + said.get("failed", 0)
            bars.update(bar, description=_state(current), completed=done, total=said.get("total"))
            if current.status in ENDED:
                break
            time.sleep(POLL_S)
    if current.error is not None and current.status == "failed":
        click.echo(f"headrace: {current.error}", err=True)
    if _state(current) != "done" or said.get("failed"):
        raise click.exceptions.Exit(1)


def _state(current: JobView) -> str:
    """rq's status, or ours if it says more: to rq a cancelled run has finished."""
    return str(current.progress.get("state", current.status)) if current.status in ("finished", "started") else current.status


def _table(views: list[JobView]) -> Table:
    table = Table()
    for name in ("job", "state"):
        table.add_column(name)
    for name in ("lines", "done", "failed", "on queue", "lines/s", "tokens"):
        table.add_column(name, justify="right")
    table.add_column("output", overflow="ellipsis", no_wrap=True)
    for current in views:
        said = current.progress
        done = said.get("succeeded", 0) + said.get("failed", 0)
        rate = (done - said["resumed"]) / said["seconds"] if said.get("seconds") else 0.0
        counts = [
            said.get("total", ""),
            done,
            said.get("failed", 0),
            said.get("in_flight", 0),
            f"{rate:.1f}",
            said.get("completion_tokens", 0),
        ]
        table.add_row(Text(current.id), _state(current), *map(str, counts), Text(Path(current.output).name or current.error or ""))
    return table
