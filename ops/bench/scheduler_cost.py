"""What a step costs in the scheduler alone: 100 running requests, with more and more waiting behind them.

    python -m ops.bench.scheduler_cost [--json]

No model runs. Each step is `schedule` + `advance` of 100 decodes, timed apart from the fake sampling; the waiting
ones cannot enter, which is the common state of a busy worker. ``churn`` has a request finish and another enter in
every step. Figures are medians, microseconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from producer.sampling import SamplingParams
from worker.engine.config import EngineConfig
from worker.engine.request import Request
from worker.engine.scheduler import Scheduler

WAITING = (10, 100, 1_000, 10_000)
RUNNING = 100
PROMPT_TOKENS = 64
OUTPUT_TOKENS = 4_096
SOURCES = 50


@dataclass(frozen=True)
class Row:
    """Microseconds per step; ``decode_us`` per decode request of the steady state."""

    waiting: int
    schedule_us: float
    advance_us: float
    decode_us: float
    churn_us: float


def measure(waiting: int, steps: int) -> Row:
    """Time the steady state, then the state where one request leaves and another enters in every step."""
    scheduler = _full_scheduler(waiting)
    steady = [_timed_step(scheduler)[1:] for _ in range(steps)]
    churn_s = [_churn(scheduler, RUNNING + waiting + i) for i in range(steps)]
    schedule_s, advance_s = (statistics.median(part) for part in zip(*steady, strict=True))
    return Row(
        waiting=waiting,
        schedule_us=schedule_s * 1e6,
        advance_us=advance_s * 1e6,
        decode_us=(schedule_s + advance_s) / RUNNING * 1e6,
        churn_us=statistics.median(churn_s) * 1e6,
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args(argv)
    rows = [measure(waiting, options.steps) for waiting in WAITING]
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    print(f"{'waiting':>8} {'schedule':>10} {'advance':>10} {'a decode':>10} {'churn':>10}   (us a step, {RUNNING} running)")
    for row in rows:
        print(f"{row.waiting:>8} {row.schedule_us:>10.1f} {row.advance_us:>10.1f} {row.decode_us:>10.2f} {row.churn_us:>10.1f}")


def _full_scheduler(waiting: int) -> Scheduler:
    num_blocks = RUNNING * (PROMPT_TOKENS + OUTPUT_TOKENS) // 16
    scheduler = Scheduler(EngineConfig(max_batch_size=RUNNING, max_batch_tokens=RUNNING * PROMPT_TOKENS), num_blocks)
    for number in range(RUNNING + waiting):
        scheduler.add(_request(number))
    _timed_step(scheduler)
    stats = scheduler.stats()
    assert (stats.running_realtime, stats.waiting_realtime) == (RUNNING, waiting)
    return scheduler


def _request(number: int) -> Request:
    return Request(
        id=str(number),
        prompt_token_ids=[number] * PROMPT_TOKENS,
        params=SamplingParams(),
        max_tokens=OUTPUT_TOKENS,
        arrival=number,
        source=str(number % SOURCES),
    )


def _timed_step(scheduler: Scheduler) -> tuple[Request, float, float]:
    """One step; returns a request that ran, and the seconds of `schedule` and `advance`."""
    began = time.perf_counter()
    plan = scheduler.schedule()
    scheduled = time.perf_counter()
    scheduler.advance(plan)
    advanced = time.perf_counter()
    for chunk in plan.chunks:
        chunk.request.output_token_ids.append(1)
    return plan.chunks[0].request, scheduled - began, advanced - scheduled


def _churn(scheduler: Scheduler, number: int) -> float:
    """Seconds of a step, then of a request's end and another's arrival."""
    leaver, schedule_s, advance_s = _timed_step(scheduler)
    began = time.perf_counter()
    scheduler.finish(leaver)
    scheduler.add(_request(number))
    return time.perf_counter() - began + schedule_s + advance_s


if __name__ == "__main__":
    main()
