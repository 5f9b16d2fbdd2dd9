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
    exits with 1.
    """
    with open_client(redis_url, queue) as client:
        outcomes = [client.get(request_id).cancel() for request_id in ids]
    for outcome in outcomes:
        click.echo(outcome)
    if "unknown" in outcomes:
        raise click.exceptions.Exit(1)
