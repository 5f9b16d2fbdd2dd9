"""``headrace cancel``."""

from __future__ import annotations

import click

from producer.cli.options import open_client, queue_options


@click.command()
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@queue_options
def cancel(redis_url: str, queue: str, ids: tuple[str, ...]) -> None:
    """Cancel requests, queued or running.

    Prints for each: cancelled (it had not started), cancelling (its worker was told), finished (too late), or unknown, which
    exits with 1: there is no such request, or it was put by a bare XADD and is cancelled when a worker takes it.
    """
    all_known = True
    with open_client(redis_url, queue) as client:
        handles = [client.get(request_id) for request_id in ids]  # a malformed id is reported before any request is cancelled
        for handle in handles:
            outcome = handle.cancel()
            click.echo(outcome)
            all_known = all_known and outcome != "unknown"
    if not all_known:
        raise click.exceptions.Exit(1)
