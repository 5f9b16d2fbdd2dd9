"""``headrace reload``."""

from __future__ import annotations

import time
from typing import Any

import click

from producer.cli.options import open_client, queue_options, redis_errors
from producer.client import Client
from producer.errors import ModelUnavailable, WaitTimeout
from producer.keys import CONTROL_LENGTH, check_name
from producer.status import WorkerStatus, read_status

_POLL_S = 0.1


@click.command()
@queue_options
@click.option("--model", default="", help="As a worker's own --model, on its host [default: load the one it serves again].")
@click.option("--worker", "only", default="", help="Only the worker of this name.")
@click.option("--timeout", "timeout_s", default=600.0, show_default=True, type=click.FloatRange(0, min_open=True), help="Seconds to wait.")
def reload(redis_url: str, queue: str, model: str, only: str, timeout_s: float) -> None:
    """Have the queue's workers serve another model, and wait until they do.

    Each worker finishes what it can within the time of a drain and hands the rest back; queued requests wait. A worker that
    cannot load the model keeps its old one; this command then reports it and exits with 1. All workers reload at the same
    time: give --worker to reload them one by one.
    """
    with open_client(redis_url, queue) as client, redis_errors():
        waiting = {worker.name for worker in read_status(client.redis, queue).workers if not only or worker.name == only}
        if not waiting:
            raise ModelUnavailable(f"no live worker{f' is called {only}' if only else ''}")
        order_id = _order(client, model, only)
        failed = _await(client, waiting, order_id, time.monotonic() + timeout_s)
    if failed:
        raise click.exceptions.Exit(1)


def _order(client: Client, model: str, only: str) -> str:
    fields: dict[Any, Any] = {"op": "reload", "model": model, "worker": check_name("worker", only) if only else ""}
    entry: Any = client.redis.xadd(client.keys.admin, fields, maxlen=CONTROL_LENGTH, approximate=True)
    return str(entry.decode())


def _await(client: Client, waiting: set[str], order_id: str, deadline_at_s: float) -> bool:
    """Print each worker's outcome; returns whether one failed.

    Raises:
        WaitTimeout: some have not carried it out in time.
    """
    failed = False
    while waiting:
        workers = {worker.name: worker for worker in read_status(client.redis, client.queue).workers}
        for name in sorted(waiting):
            worker = workers.get(name)
            if worker is None or _is_done(worker, order_id):
                waiting.remove(name)
                failed |= _tell(name, worker)
        if waiting and time.monotonic() >= deadline_at_s:
            raise WaitTimeout(f"not reloaded yet: {', '.join(sorted(waiting))}")
        time.sleep(_POLL_S if waiting else 0.0)
    return failed


def _is_done(worker: WorkerStatus, order_id: str) -> bool:
    """Whether the worker has carried out this order, or a later one in its place."""
    return _number(worker.fields.get("reload", "")) >= _number(order_id)


def _number(entry_id: str) -> tuple[int, ...]:
    return tuple(int(part) for part in entry_id.split("-")) if entry_id else ()


def _tell(name: str, worker: WorkerStatus | None) -> bool:
    """Print the outcome; returns whether it is a failure."""
    if worker is None:
        click.echo(f"{name}: has ended")
        return True
    error = worker.fields.get("reload_error", "")
    click.echo(f"{name}: serves {worker.model}{f', for the other could not be loaded: {error}' if error else ''}")
    return bool(error)
