"""``headrace top``: a queue, live: what waits, what runs, how full the workers are, how fast they go, what went wrong."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice

import click
import redis
from redis.exceptions import RedisError
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from producer.cli.options import open_client, queue_options
from producer.cli.status import duration
from producer.dead import DeadLetter, latest
from producer.keys import Keys
from producer.status import QueueStatus, WorkerStatus, read_status

HISTORY = 60  # samples that a sparkline shows
LETTERS = 5
_BARS = "▁▂▃▄▅▆▇█"
_STATE_STYLES = {"running": "green", "starting": "cyan", "draining": "yellow", "wedged": "bold red", "failed": "bold red"}


@dataclass(frozen=True, slots=True)
class Frame:
    """One look at a queue.

    Attributes:
        letters: the latest dead letters, newest first.
    """

    status: QueueStatus
    letters: Sequence[DeadLetter]


def read_frame(client: redis.Redis, queue: str) -> Frame:
    """Raises `redis.RedisError`."""
    return Frame(read_status(client, queue), latest(client, Keys(queue), LETTERS))


@dataclass(slots=True)
class View:
    """The frame that is shown, and the course of its numbers."""

    frame: Frame | None = None
    trouble: str = ""
    _courses: dict[str, deque[float]] = field(default_factory=dict)

    def show(self, frame: Frame) -> None:
        self.frame, self.trouble = frame, ""
        self._note("tokens", sum(worker.tokens_per_s or 0.0 for worker in frame.status.workers))
        for tier in frame.status.tiers:
            self._note(f"queued {tier.tier}", tier.queued)
        for worker in frame.status.workers:
            self._note(f"batch {worker.name}", worker.batch_size or 0)
        living = {f"batch {worker.name}" for worker in frame.status.workers}
        for name in [name for name in self._courses if name.startswith("batch ") and name not in living]:
            del self._courses[name]

    def _note(self, name: str, value: float) -> None:
        self._courses.setdefault(name, deque(maxlen=HISTORY)).append(value)

    def render(self) -> RenderableType:
        """The screen."""
        if self.frame is None:
            return Text(self.trouble or "looking ...", style="red" if self.trouble else "dim")
        status = self.frame.status
        parts: list[RenderableType] = [self._head(status)]
        if self.trouble:
            parts.append(Text(f"{self.trouble}; this is what was last seen", style="bold red"))
        parts += ["", self._tiers(status), "", self._workers(status)]
        if status.dead:
            parts += ["", _letters(status, self.frame.letters)]
        return Group(*parts)

    def _head(self, status: QueueStatus) -> Text:
        tokens = self._courses["tokens"]
        head = Text.assemble(("headrace ", "bold"), (status.queue, "bold cyan"), f"  {datetime.now():%H:%M:%S}  ")
        head.append(f"{_counted(len(status.workers), 'worker')}  {tokens[-1]:,.0f} tokens/s ")
        return head.append(sparkline(tokens), style="green")

    def _tiers(self, status: QueueStatus) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for name in ("tier", "queued", "", "running", "oldest queued"):
            table.add_column(name, justify="left" if name in ("tier", "") else "right")
        for tier in status.tiers:
            oldest = "" if tier.oldest_age_s is None else duration(tier.oldest_age_s)
            course = Text(sparkline(self._courses[f"queued {tier.tier}"]), style="yellow")
            table.add_row(tier.tier, f"{tier.queued:,}", course, f"{tier.running:,}", oldest)
        return table

    def _workers(self, status: QueueStatus) -> RenderableType:
        if not status.workers:
            return Text("no live worker", style="bold yellow")
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for name in ("worker", "state", "model", "batch", "", "KV cache", "", "tokens/s", "done", "up"):
            table.add_column(name, justify="right" if name in ("batch", "tokens/s", "done", "up") else "left", no_wrap=True)
        for worker in status.workers:
            batch = "" if worker.batch_size is None else str(worker.batch_size)
            course = Text(sparkline(islice(reversed(self._courses[f"batch {worker.name}"]), 20), reverse=True), style="cyan")
            rate = "" if worker.tokens_per_s is None else f"{worker.tokens_per_s:,.0f}"
            up = "" if worker.uptime_s is None else duration(worker.uptime_s)
            state = Text(worker.state, style=_STATE_STYLES.get(worker.state, ""))
            done = worker.fields.get("requests_done", "")
            table.add_row(Text(worker.name), state, Text(worker.model), batch, course, *_cache(worker), rate, done, up)
        return table


def _cache(worker: WorkerStatus) -> tuple[RenderableType, str]:
    """How much of a worker's KV cache requests use: cached blocks are free for the next."""
    if not worker.total_blocks or worker.free_blocks is None:
        return "", ""
    cached = worker.fields.get("cached_blocks", "")
    used = max(0, worker.total_blocks - worker.free_blocks - (int(cached) if cached.isdecimal() else 0))
    return ProgressBar(total=worker.total_blocks, completed=used, width=12), f"{used / worker.total_blocks:4.0%}"


def _letters(status: QueueStatus, letters: Sequence[DeadLetter]) -> Table:
    table = Table(
        title=_counted(status.dead, "dead letter"),
        title_justify="left",
        title_style="red",
        box=None,
        padding=(0, 2, 0, 0),
        header_style="dim",
    )
    for name in ("when", "code", "request", "worker", "message"):
        table.add_column(name, no_wrap=name != "message", overflow="ellipsis")
    for letter in letters:
        when = datetime.fromtimestamp(letter.ms / 1000, UTC).astimezone()
        table.add_row(f"{when:%H:%M:%S}", letter.code, Text(letter.id), Text(letter.worker), Text(letter.message))
    return table


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def sparkline(values: Iterable[float], *, reverse: bool = False) -> str:
    """A course as a line of bars, scaled from 0 to its highest."""
    course = list(values)[::-1] if reverse else list(values)
    top = max(course, default=0.0)
    return "".join(_BARS[round(value / top * (len(_BARS) - 1))] if top > 0 else _BARS[0] for value in course)


@click.command()
@queue_options
@click.option("--interval", default=1.0, show_default=True, type=click.FloatRange(0.1), help="Seconds between two looks.")
def top(redis_url: str, queue: str, interval: float) -> None:
    """Watch a queue: tiers, workers, batches, KV caches, tokens a second, dead letters. Ctrl-C ends it."""
    console = Console()
    view = View()
    with open_client(redis_url, queue) as client, Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
        while True:
            try:
                view.show(read_frame(client.redis, queue))
            except RedisError as error:
                view.trouble = f"Redis is unavailable ({error})"
            live.update(view.render(), refresh=True)
            time.sleep(interval)
