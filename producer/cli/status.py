"""``headrace status``."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime

import click
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from producer.cli.group import complain
from producer.cli.options import open_client, queue_options, redis_errors
from producer.cli.output import print_json
from producer.errors import RedisUnavailable
from producer.status import QueueStatus, read_status

PIPE_WIDTH = 200


@click.command()
@queue_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object (one per line with --watch).")
@click.option("--watch", is_flag=True, help="Repeat until Ctrl-C.")
@click.option("--interval", default=1.0, show_default=True, type=click.FloatRange(0.1), help="Seconds between two updates with --watch.")
def status(redis_url: str, queue: str, as_json: bool, watch: bool, interval: float) -> None:
    """Show tiers (queued, running, age of the oldest queued), workers (state, batch, use of the KV cache, tokens/s) and dead letters."""
    with open_client(redis_url, queue) as client:

        def read() -> QueueStatus:
            with redis_errors():
                return read_status(client.redis, queue)

        if not watch:
            _show(read(), as_json)
        elif as_json or not sys.stdout.isatty():
            _repeat(read, interval, lambda current: _show(current, as_json))
        else:
            with Live(console=_console(), auto_refresh=False) as live:
                _repeat(read, interval, lambda current: live.update(render(current), refresh=True))


def _show(current: QueueStatus, as_json: bool) -> None:
    if as_json:
        print_json(asdict(current))
    else:
        _console().print(render(current))
    sys.stdout.flush()


def _console() -> Console:
    """As wide as the terminal; in a pipe, wide enough for whole names."""
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)


def _repeat(read: Callable[[], QueueStatus], interval_s: float, show: Callable[[QueueStatus], None]) -> None:
    """Continue through Redis trouble, reporting its first error."""
    trouble = False
    while True:
        try:
            show(read())
            trouble = False
        except RedisUnavailable as error:
            if not trouble:
                complain(error)
            trouble = True
        time.sleep(interval_s)


def render(current: QueueStatus) -> Group:
    """The status as tables."""
    parts: list[Table | Text] = [_tiers(current)]
    parts.append(_workers(current) if current.workers else Text("no live worker", style="yellow"))
    for worker in current.workers:
        if worker.last_error is not None:
            ms, code = worker.last_error
            parts.append(Text(f"last error of {worker.name}: {code}, {moment(ms)}", style="red"))
    if current.dead:
        parts.append(Text(f"{current.dead} dead letters", style="red"))
    return Group(*parts)


def _tiers(current: QueueStatus) -> Table:
    table = Table(title=f"queue {current.queue}", title_justify="left")
    table.add_column("tier")
    for name in ("queued", "running", "oldest"):
        table.add_column(name, justify="right")
    for tier in current.tiers:
        table.add_row(tier.tier, str(tier.queued), str(tier.running), "" if tier.oldest_age_s is None else duration(tier.oldest_age_s))
    return table


def _workers(current: QueueStatus) -> Table:
    table = Table()
    for name in ("worker", "state", "model"):
        table.add_column(name)
    for name in ("batch", "KV cache", "tokens/s", "up"):
        table.add_column(name, justify="right")
    for worker in current.workers:
        use = "" if worker.cache_use is None else f"{worker.cache_use:.0%}"
        rate = "" if worker.tokens_per_s is None else f"{worker.tokens_per_s:.1f}"
        up = "" if worker.uptime_s is None else duration(worker.uptime_s)
        table.add_row(Text(worker.name), Text(worker.state), Text(worker.model), worker.batch, use, rate, up)
    return table


def moment(ms: int) -> str:
    """A Unix time in local time, with the day if that is not today."""
    when = datetime.fromtimestamp(ms / 1000, UTC).astimezone()
    return f"{when:%H:%M:%S}" if when.date() == datetime.now(UTC).astimezone().date() else f"{when:%Y-%m-%d %H:%M:%S}"


def duration(seconds: float) -> str:
    """Two units at most: ``4.2s``, ``3m12s``, ``2h05m``, ``4d07h``."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
    if minutes < 60:
        return f"{minutes}m{int(seconds % 60):02d}s"
    return f"{hours}h{minutes % 60:02d}m" if hours < 24 else f"{days}d{hours % 24:02d}h"
