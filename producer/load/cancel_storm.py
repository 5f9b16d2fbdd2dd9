"""``cancel-storm``: thousands of requests, queued and running, are cancelled at once; then nothing of them may be left."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from producer.aio import AsyncClient, AsyncHandle
from producer.client import Client
from producer.errors import HeadraceError
from producer.load.books import Remains, held_by_workers, is_idle, remains, settle
from producer.load.callers import SOURCE
from producer.load.report import Cell, Check, Panel, Report, distribution
from producer.load.stats import percentile
from producer.options import BatchItem
from producer.status import read_tiers

_AT_ONCE = 64  # cancellations at the same time, each on its own connection
_START_S = 10.0  # how long the first of the requests may take to be running
_SETTLE_S = 30.0
_POLL_S = 0.02
_BEAT_S = 1.0  # how old a heartbeat may be


@dataclass(frozen=True, slots=True)
class Cancelled:
    """One request's end: what the order to cancel returned, the code that it ended with, and the time from order to reply."""

    order: str
    code: str
    seconds: float


async def cancel_storm(client: AsyncClient, operator: Client, *, count: int, output_tokens: int, timeout_s: float) -> Report:
    """Submit ``count`` requests, half of them streamed, wait until some run, and cancel all, in any order.

    Args:
        operator: a client of the same queue, which checks what is left.
    """
    idle = await asyncio.to_thread(is_idle, operator.redis, operator.queue)
    same: BatchItem = {"max_tokens": output_tokens, "ignore_eos": True, "temperature": 0.0, "source": SOURCE}
    handles = await client.submit_many([{**same, "prompt": f"count to {i}", "stream": i % 2 == 0} for i in range(count)])
    await asyncio.to_thread(_await_running, operator)
    started_s = time.monotonic()
    ends = await _cancel_all(random.sample(handles, count), timeout_s)
    wall_s = time.monotonic() - started_s
    ids = [handle.id for handle in handles]
    left = await asyncio.to_thread(settle, lambda: remains(operator.redis, operator.keys, ids), Remains(), _SETTLE_S)
    checks = [_all_ended(ends), *left.checks(count)]
    if idle:
        checks.append(await asyncio.to_thread(_workers_hold_nothing, operator))
    return _report(ends, checks, wall_s, idle)


def _await_running(operator: Client) -> None:
    deadline_at_s = time.monotonic() + _START_S
    while not any(tier.running for tier in read_tiers(operator.redis, operator.keys)) and time.monotonic() < deadline_at_s:
        time.sleep(_POLL_S)


async def _cancel_all(handles: Sequence[AsyncHandle], timeout_s: float) -> list[Cancelled]:
    turn = asyncio.Semaphore(_AT_ONCE)

    async def end(handle: AsyncHandle) -> Cancelled:
        async with turn:
            started_s, order, code = time.monotonic(), "", ""
            try:
                order = await handle.cancel()
                await handle.result(timeout_s)
            except HeadraceError as error:
                code = error.code
            return Cancelled(order, code, time.monotonic() - started_s)

    return list(await asyncio.gather(*map(end, handles)))


def _all_ended(ends: Sequence[Cancelled]) -> Check:
    """A request that was done before its cancellation came is fine too."""
    others = Counter(end.code for end in ends if end.code not in ("", "CANCELLED"))
    detail = f"{sum(end.code == 'CANCELLED' for end in ends)} cancelled, {sum(not end.code for end in ends)} done before"
    return Check(
        "every request ends, cancelled or done", not others, ", ".join([detail, *(f"{count} {code}" for code, count in others.items())])
    )


def _workers_hold_nothing(operator: Client) -> Check:
    time.sleep(_BEAT_S)
    held = settle(lambda: held_by_workers(operator.redis, operator.queue), 0, _SETTLE_S)
    return Check("workers hold no request and no block", held == 0, f"{held} held, as their heartbeats say")


def _report(ends: Sequence[Cancelled], checks: Sequence[Check], wall_s: float, idle: bool) -> Report:
    groups = {
        "queued": [end for end in ends if end.order == "cancelled"],
        "running": [end for end in ends if end.order == "cancelling"],
        "finished": [end for end in ends if end.order == "finished"],
    }
    times_ms = {name: [1000 * end.seconds for end in group] for name, group in groups.items()}
    rows: list[list[Cell]] = [
        [name, len(times), percentile(times, 50), percentile(times, 95), max(times, default=0.0)] for name, times in times_ms.items()
    ]
    panel = Panel(
        "from cancellation to reply",
        "ms",
        "share of requests",
        [distribution(f"cancelled while {name}", times) for name, times in times_ms.items() if times and name != "finished"],
    )
    summary = f"{len(ends) / wall_s:.0f} cancellations answered a second"
    if not idle:
        summary += "; the queue had other requests, so what its workers hold was not checked"
    about = f"{len(ends)} requests cancelled, {_AT_ONCE} at a time"
    columns = ("cancelled while", "requests", "to reply p50 ms", "p95", "max")
    return Report("cancel-storm", about, columns, rows, checks, [panel] if panel.series else [], summary)
