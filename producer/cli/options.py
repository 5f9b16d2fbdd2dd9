"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import click
from redis.exceptions import RedisError

from producer.client import Client
from producer.core import DEFAULT_URL
from producer.errors import RedisUnavailable

Command = TypeVar("Command", bound=Callable[..., Any])


def queue_options(command: Command) -> Command:
    """``--redis`` and ``--queue``, with the same environment variables everywhere."""
    for option in (
        click.option("--queue", envvar="HEADRACE_QUEUE", default="default", show_default=True, help="Queue name."),
        click.option("--redis", "redis_url", envvar="HEADRACE_REDIS", default=DEFAULT_URL, show_default=True, help="Where the queue is."),
    ):
        command = option(command)
    return command


def open_client(redis_url: str, queue: str) -> Client:
    """A client, or a usage error if an option is malformed."""
    try:
        return Client(redis_url, queue)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


@contextmanager
def redis_errors() -> Iterator[None]:
    """Turns Redis trouble within into `RedisUnavailable`."""
    try:
        yield
    except RedisError as error:
        raise RedisUnavailable(str(error)) from error
