"""``mixed``: short requests alone, then beside long ones."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from producer.aio import AsyncClient
from producer.load.callers import Callers, LoadCall, Shape, answered, phase_figures
from producer.load.report import Check, Panel, Report, all_answered, distribution
from producer.load.stats import RequestRecord, percentile

COLUMNS = ("requests of", "requests", "req/s", "TTFT p50 ms", "p95", "ITL p50 ms", "p95", "E2E p50 ms", "p95")
_FIGURES = ("requests", "requests_per_s", "ttft_ms_p50", "ttft_ms_p95", "itl_ms_p50", "itl_ms_p95", "e2e_ms_p50", "e2e_ms_p95")


async def mixed(
    client: AsyncClient,
    *,
    short: Shape,
    long: Shape,
    short_callers: int,
    long_callers: int,
    seconds: float,
    ttft_goal_ms: float,
    timeout_s: float,
) -> Report:
    """Two phases of ``seconds`` each: the callers of short requests alone, then beside those of long requests."""
    callers = Callers(client, timeout_s=timeout_s)
    await callers.call(short)
    starts_s = [callers.now_s()]
    alone = await callers.closed_loop(short, short_callers, callers.for_s(seconds))
    starts_s.append(callers.now_s())
    beside, longs = await asyncio.gather(
        callers.closed_loop(short, short_callers, callers.for_s(seconds)), callers.closed_loop(long, long_callers, callers.for_s(seconds))
    )
    phases = {"short alone": (alone, starts_s[0]), "short beside long": (beside, starts_s[1]), "long": (longs, starts_s[1])}
    figures = {name: phase_figures(calls, start_s, seconds) for name, (calls, start_s) in phases.items()}
    about = (
        f"{short_callers} callers of {short.prompt_tokens}+{short.output_tokens} tokens, "
        f"{long_callers} of {long.prompt_tokens}+{long.output_tokens}"
    )
    return Report(
        "mixed",
        about,
        COLUMNS,
        [[name, *(found[key] for key in _FIGURES)] for name, found in figures.items()],
        [all_answered([*alone, *beside, *longs]), *_checks(beside, longs, ttft_goal_ms)],
        _panels({name: answered(calls) for name, (calls, _) in phases.items()}, ttft_goal_ms),
        f"beside long requests the short ones take {_ratio(figures, 'e2e_ms_p95'):.1f} times as long (E2E p95), "
        f"their first token {_ratio(figures, 'ttft_ms_p95'):.1f} times (TTFT p95)",
    )


def _ratio(figures: dict[str, dict[str, float]], name: str) -> float:
    before = figures["short alone"][name]
    return figures["short beside long"][name] / before if before else 0.0


def _checks(beside: Sequence[LoadCall], longs: Sequence[LoadCall], ttft_goal_ms: float) -> list[Check]:
    ttft_ms = percentile([1000 * (record.first_token_s - record.arrival_s) for record in answered(beside)], 95)
    short_s = percentile(_seconds(answered(beside)), 95)
    long_s = percentile(_seconds(answered(longs)), 50)
    return [
        Check("short requests keep their TTFT goal beside long ones", ttft_ms <= ttft_goal_ms, f"p95 {ttft_ms:.0f} of {ttft_goal_ms:g} ms"),
        Check("short requests do not wait for long ones", short_s < long_s, f"short p95 {short_s:.2f} s, long p50 {long_s:.2f} s"),
    ]


def _seconds(records: Sequence[RequestRecord]) -> list[float]:
    return [record.finished_s - record.arrival_s for record in records]


def _panels(phases: dict[str, list[RequestRecord]], ttft_goal_ms: float) -> list[Panel]:
    short = {name: records for name, records in phases.items() if name != "long"}
    ttft = [distribution(name, [1000 * (r.first_token_s - r.arrival_s) for r in records]) for name, records in short.items()]
    e2e = [distribution(name, _seconds(records)) for name, records in phases.items()]
    return [
        Panel("time to first token", "ms", "share of requests", ttft, marks={f"goal {ttft_goal_ms:g} ms": ttft_goal_ms}, x_scale="log"),
        Panel("submission to last token", "seconds", "share of requests", e2e),
    ]
