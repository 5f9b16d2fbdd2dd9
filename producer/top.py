"""``headrace top``: a queue live or as a picture: what waits and runs, how full and fast the workers are, what went wrong."""

from __future__ import annotations

import io
import itertools
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import click
import redis
from redis.exceptions import RedisError
from rich.console import Console, ConsoleOptions, Group, JustifyMethod, RenderableType
from rich.live import Live
from rich.measure import Measurement
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from producer.cli.options import open_client, queue_options
from producer.cli.status import duration, moment
from producer.client import Client
from producer.dead import DeadLetter, latest
from producer.keys import Keys
from producer.status import QueueStatus, WorkerStatus, read_status

HISTORY = 60  # samples that a sparkline shows
LETTERS = 5
ERRORS = 5
PICTURE_WIDTH = 200  # columns, at most
_BARS = "▁▂▃▄▅▆▇█"
_STATE_STYLES = {"running": "green", "starting": "cyan", "draining": "yellow", "wedged": "bold red", "failed": "bold red"}


@dataclass(frozen=True, slots=True)
class Frame:
    """One reading of a queue.

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
    """The frame that is shown, and the history of its numbers."""

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
        if errors := _errors(status):
            parts += ["", errors]
        if status.dead:
            parts += ["", _letters(status, self.frame.letters)]
        return Group(*parts)

    def _head(self, status: QueueStatus) -> Table:
        tokens = self._courses["tokens"]
        head = Text.assemble(("headrace ", "bold"), (status.queue, "bold cyan"), f"  {datetime.now():%H:%M:%S}  ")
        head.append(f"{_counted(len(status.workers), 'worker')}  {tokens[-1]:,.0f} tokens/s")
        line = Table.grid(padding=(0, 1, 0, 0))
        for no_wrap in (True, False, True):
            line.add_column(no_wrap=no_wrap)
        line.add_row(head, Course(tokens, "green"), Text(f"highest {max(tokens):,.0f}", style="dim"))
        return line

    def _tiers(self, status: QueueStatus) -> Table:
        table = _table("tier", ">queued", "~", ">highest", ">running", ">oldest queued")
        for tier in status.tiers:
            course = self._courses[f"queued {tier.tier}"]
            oldest = "" if tier.oldest_age_s is None else duration(tier.oldest_age_s)
            table.add_row(tier.tier, f"{tier.queued:,}", Course(course, "yellow"), f"{max(course):,.0f}", f"{tier.running:,}", oldest)
        return table

    def _workers(self, status: QueueStatus) -> RenderableType:
        if not status.workers:
            return Text("no live worker", style="bold yellow")
        table = _table("worker", "state", "~model", ">batch", "~", ">waits", "KV cache", "", ">tokens/s", ">done", ">up")
        for worker in status.workers:
            course = Course(self._courses[f"batch {worker.name}"], "cyan", 20)
            rate = "" if worker.tokens_per_s is None else f"{worker.tokens_per_s:,.0f}"
            up = "" if worker.uptime_s is None else duration(worker.uptime_s)
            state = Text(worker.state, style=_STATE_STYLES.get(worker.state, ""))
            waiting, done = (worker.fields.get(name, "") for name in ("waiting", "requests_done"))
            table.add_row(
                Text(worker.name),
                state,
                Text(worker.model, no_wrap=True, overflow="ellipsis"),
                worker.batch,
                course,
                waiting,
                *_cache(worker),
                rate,
                done,
                up,
            )
        return table


def _table(*columns: str) -> Table:
    """Columns by name; a prefix ``>`` aligns a column to the right, and ``~`` lets it give way on a narrow screen."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for column in columns:
        justify: JustifyMethod = "right" if column.startswith(">") else "left"
        table.add_column(column.lstrip(">~"), justify=justify, no_wrap=not column.startswith("~"))
    return table


def _titled(title: str, *columns: str) -> Table:
    """A table of what went wrong."""
    table = _table(*columns)
    table.title, table.title_justify, table.title_style = title, "left", "red"
    return table


def _cache(worker: WorkerStatus) -> tuple[RenderableType, str]:
    use = worker.cache_use
    if use is None:
        return "", ""
    return ProgressBar(total=1.0, completed=use, width=4, complete_style="cyan", finished_style="yellow"), f"{use:4.0%}"


def _errors(status: QueueStatus) -> Table | None:
    """Each worker's last error, the latest first; None if there is none."""
    errors = sorted(((*worker.last_error, worker.name) for worker in status.workers if worker.last_error), reverse=True)
    table = _titled("last error of each worker", "when", "code", "worker")
    for ms, code, name in errors[:ERRORS]:
        table.add_row(moment(ms), Text(code), Text(name))
    return table if errors else None


def _letters(status: QueueStatus, letters: Sequence[DeadLetter]) -> Table:
    table = _titled(_counted(status.dead, "dead letter"), "when", "code", "request", "worker", "~message")
    for letter in letters:
        table.add_row(moment(letter.ms), letter.code, Text(letter.id), Text(letter.worker), Text(letter.message))
    return table


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


class Course:
    """The history of a number as a `sparkline`, of as many of the latest values as fit."""

    def __init__(self, values: Iterable[float], style: str, width: int = HISTORY) -> None:
        self._values = list(values)[-width:]
        self._style = style

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, max(1, min(len(self._values), options.max_width)))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[Text]:
        yield Text(sparkline(self._values[-options.max_width :]), style=self._style, no_wrap=True)


def sparkline(values: Sequence[float]) -> str:
    """Values as a line of bars, scaled from 0 to the highest."""
    top = max(values, default=0.0)
    return "".join(_BARS[round(value / top * (len(_BARS) - 1))] if top > 0 else _BARS[0] for value in values)


def picture(view: View) -> str:
    """The screen as SVG, as wide as it needs."""
    console = Console(record=True, file=io.StringIO(), force_terminal=True, color_system="truecolor", width=PICTURE_WIDTH)
    screen = view.render()
    console.width = console.measure(screen).maximum
    console.print(screen)
    return console.export_svg(title="headrace top")


def _check_folder(_context: click.Context, _parameter: click.Parameter, path: Path | None) -> Path | None:
    if path is not None and not path.parent.is_dir():
        raise click.BadParameter(f"{path}: there is no such folder")
    return path


@click.command()
@queue_options
@click.option("--interval", default=1.0, show_default=True, type=click.FloatRange(0.1), help="Seconds between two updates.")
@click.option("--count", type=click.IntRange(1), help="End after this many updates.")
@click.option(
    "--svg",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    callback=_check_folder,
    help="At the end write the screen, with its sparklines, as a picture.",
)
def top(redis_url: str, queue: str, interval: float, count: int | None, svg: Path | None) -> None:
    """Watch a queue: tiers, workers, batches, KV caches, tokens per second, dead letters. Ctrl-C ends it."""
    view = View()
    with open_client(redis_url, queue) as client:
        try:
            _watch(view, client, interval, count)
        finally:
            if svg is not None:
                svg.write_text(picture(view), encoding="utf-8")


def _watch(view: View, client: Client, interval_s: float, count: int | None) -> None:
    console = Console()
    with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
        for look in range(count) if count else itertools.count():
            if look:
                time.sleep(interval_s)
            try:
                view.show(read_frame(client.redis, client.queue))
            except RedisError as error:
                view.trouble = f"Redis is unavailable ({error})"
            live.update(view.render(), refresh=True)
