"""``restart``: a worker is restarted under load; for how long no token comes, and whether every request is answered once."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from producer.aio import AsyncClient
from producer.client import Client
from producer.load.books import Remains, remains, settle
from producer.load.callers import Callers, LoadCall, Shape, answered
from producer.load.report import Cell, Check, Panel, Report, Series, all_answered

_SETTLE_S = 10.0
_BEFORE, _AFTER = 0.3, 0.5  # shares of the run: before the restart, and at least after tokens flow again
_POLL_S = 0.1
_BINS = 60

Restart = Callable[[], Awaitable[str]]


async def restart_under_load(
    client: AsyncClient,
    operator: Client,
    restart: Restart,
    *,
    shape: Shape,
    num_callers: int,
    seconds: float,
    gap_goal_s: float,
    timeout_s: float,
) -> Report:
    """Closed loop of streaming callers for ``seconds`` or more, with a restart within and tokens that flow again.

    Args:
        restart: returns '' when the worker has ended or, if it cannot know, when its restart has been ordered; else what went wrong.
        timeout_s: how long a call may take, and how long tokens may fail to come after the restart.
    """
    callers = Callers(client, timeout_s=timeout_s)
    end_s = math.inf
    load = asyncio.create_task(callers.closed_loop(shape, num_callers, lambda: callers.now_s() < end_s))
    await asyncio.sleep(_BEFORE * seconds)
    at_s = callers.now_s()
    trouble = await restart()
    done_s = callers.now_s()
    await _token_after(callers, done_s, timeout_s)
    end_s = max(seconds, callers.now_s() + _AFTER * seconds)
    calls = await load
    ids = [call.request_id for call in calls]
    left = await asyncio.to_thread(settle, lambda: remains(operator.redis, operator.keys, ids), Remains(), _SETTLE_S)
    done = Check("the restart succeeds", not trouble, trouble or f"done after {done_s - at_s:.1f} s")
    return _report(calls, [done, all_answered(calls), *left.checks(len(ids))], at_s, gap_goal_s)


async def _token_after(callers: Callers, after_s: float, timeout_s: float) -> None:
    """Wait until a caller has got a token after ``after_s``, for at most ``timeout_s``."""
    while callers.now_s() < after_s + timeout_s and not any(call.record.token_times_s[-1:] > [after_s] for call in callers.calls):
        await asyncio.sleep(_POLL_S)


def longest_gap(times_s: Sequence[float], after_s: float) -> tuple[float, float] | None:
    """Begin and end of the longest time without any token that ends after ``after_s``; None if no token came after it."""
    ordered = sorted(times_s)
    gaps = [(end - begin, begin, end) for begin, end in zip([after_s, *ordered], ordered, strict=False) if end > after_s]
    return max(gaps)[1:] if gaps else None


def _report(calls: Sequence[LoadCall], checks: list[Check], at_s: float, gap_goal_s: float) -> Report:
    times_s = [time_s for call in calls for time_s in call.record.token_times_s]
    gap = longest_gap(times_s, at_s)
    length_s = gap[1] - gap[0] if gap is not None else 0.0
    moved = Check("tokens flow again", gap is not None and length_s <= gap_goal_s, f"none for {length_s:.2f} s, goal {gap_goal_s:g} s")
    taken_over = sum(call.attempt > 1 for call in calls)
    workers = Counter(call.worker for call in calls if call.worker)
    rows: list[list[Cell]] = [["requests", len(calls)], ["answered in a later attempt", taken_over], ["without progress, s", length_s]]
    if gap is not None:
        rows.append(["from the restart to progress, s", gap[1] - at_s])
    rows += [[f"answered by {name}", count] for name, count in workers.most_common()]
    return Report(
        "restart",
        f"{len(calls)} requests, a worker restarted after {at_s:.1f} s",
        ("figure", "value"),
        rows,
        [*checks, moved],
        _panels(calls, times_s, {"restart": at_s} | ({"progress": gap[1]} if gap is not None else {})),
        f"no token for {length_s:.2f} s" if gap is not None else "no token after the restart",
    )


def _panels(calls: Sequence[LoadCall], times_s: Sequence[float], marks: dict[str, float]) -> list[Panel]:
    records = answered(calls)
    x = [record.arrival_s for record in records]
    return [
        Panel("throughput", "seconds", "output tokens/s", [rate(times_s)], marks=marks),
        Panel(
            "each request, by its submission",
            "seconds",
            "seconds to",
            [
                Series("last token", x, [record.finished_s - record.arrival_s for record in records], "dots"),
                Series("first token", x, [record.first_token_s - record.arrival_s for record in records], "dots"),
            ],
            marks=marks,
        ),
    ]


def rate(times_s: Sequence[float]) -> Series:
    """Events per second over time."""
    width_s = max(0.1, max(times_s, default=0.0) / _BINS)
    counts = Counter(int(time_s / width_s) for time_s in times_s)
    bins = range(max(counts, default=0) + 2)
    return Series("tokens/s", [width_s * i for i in bins], [counts[i] / width_s for i in bins], "step")
