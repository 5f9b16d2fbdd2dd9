"""How the cost of a step grows: with the batch, with the context, and with the number of requests that wait.

    python -m ops.bench.growth [--model demo] [--json] [--plot growth.png]

Only decode steps are timed, after all prompts are computed; figures are medians. The scheduler's part is from
`ops.bench.scheduler_cost`, in which no model runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ops.bench import scheduler_cost
from producer.errors import ContextLengthExceeded
from producer.load.plots import draw
from producer.load.report import Panel, Series
from producer.sampling import SamplingParams
from worker.engine.arithmetic import ceil_div
from worker.engine.config import EngineConfig
from worker.engine.engine import Engine
from worker.engine.request import Request

BATCHES = (1, 4, 16, 64, 100)
PROMPT_TOKENS = 32  # of the requests of these batches
CONTEXTS = (128, 1_024, 4_096)
CONTEXT_BATCH = 4  # requests of this context in a step
STEPS = 32  # timed at each point
SCHEDULER_STEPS = 100
BATCH_TOKENS = 512
BLOCK_SIZE = 16
PROMPT_TOKEN_ID = 100  # text in most vocabularies; which does not matter


@dataclass(frozen=True)
class Point:
    """Decode steps of ``batch`` requests, each with ``context`` tokens before the first of them."""

    batch: int
    context: int
    step_ms: float

    @property
    def tokens_per_s(self) -> float:
        return 1000 * self.batch / self.step_ms


@dataclass(frozen=True)
class Growth:
    """The three series; a context that is longer than the model's is missing in ``contexts``."""

    model: str
    batches: Sequence[Point]
    contexts: Sequence[Point]
    waiting: Sequence[scheduler_cost.Row]


def main(argv: Sequence[str] | None = None) -> None:
    """Print tables, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", type=Path, metavar="PNG")
    options = parser.parse_args(argv)
    growth = measure(load_engine(options.model))
    if options.json:
        print(json.dumps(to_json(growth), indent=2))
    else:
        Console().print(*tables(growth))
    if options.plot:
        draw(f"{growth.model}: what a step costs", panels(growth), options.plot)


def load_engine(model: str) -> Engine:
    """An engine whose KV cache holds the largest point. No prefix cache: every context must be computed."""
    points = [*((batch, PROMPT_TOKENS) for batch in BATCHES), *((CONTEXT_BATCH, context) for context in CONTEXTS)]
    blocks = [batch * ceil_div(context + _output_tokens(batch, context), BLOCK_SIZE) for batch, context in points]
    config = EngineConfig(
        model=model, max_batch_tokens=BATCH_TOKENS, block_size=BLOCK_SIZE, num_blocks=max(blocks), enable_prefix_caching=False
    )
    return Engine(config)


def measure(engine: Engine) -> Growth:
    """Every point, after an uncounted one."""
    time_decodes(engine, 1, PROMPT_TOKENS)
    batches = [time_decodes(engine, batch, PROMPT_TOKENS) for batch in BATCHES]
    contexts = list(_contexts(engine))
    waiting = [scheduler_cost.measure(number, steps=SCHEDULER_STEPS) for number in scheduler_cost.WAITING]
    return Growth(engine.model_name, batches, contexts, waiting)


def time_decodes(engine: Engine, batch: int, context: int) -> Point:
    """Compute the prompts, then time the steps in which every request decodes.

    Raises:
        ContextLengthExceeded: the model's context, or the KV cache, holds no such request.
    """
    requests = [_request(number, context, _output_tokens(batch, context)) for number in range(batch)]
    for request in requests:
        engine.add(request)
    times_s: list[float] = []
    while len(times_s) < STEPS:
        assert engine.has_work(), "the requests ended before enough steps were timed"
        began_s = time.perf_counter()
        outputs = engine.step()
        ended_s = time.perf_counter()
        sample = engine.last_step
        if sample is not None and len(outputs) == sample.batch_size == sample.num_tokens == batch:
            times_s.append(ended_s - began_s)
    for request in requests:
        engine.abort(request.id)
    return Point(batch, context, 1000 * statistics.median(times_s))


def _contexts(engine: Engine) -> Iterator[Point]:
    for context in CONTEXTS:
        try:
            yield time_decodes(engine, CONTEXT_BATCH, context)
        except ContextLengthExceeded:
            return  # the next ones are longer


def _output_tokens(batch: int, context: int) -> int:
    """Most tokens that the first request generates: one per step that computes the others' prompts, then the timed ones."""
    return ceil_div(batch * context, BATCH_TOKENS - batch) + STEPS + 2


def _request(number: int, context: int, max_tokens: int) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return Request(str(number), [PROMPT_TOKEN_ID] * context, params, max_tokens, arrival=number)


def to_json(growth: Growth) -> dict[str, Any]:
    """All of it, for machines."""
    courses = {name: [asdict(p) | {"tokens_per_s": p.tokens_per_s} for p in getattr(growth, name)] for name in ("batches", "contexts")}
    return {"model": growth.model, **courses, "waiting": [asdict(row) for row in growth.waiting]}


def tables(growth: Growth) -> tuple[Table, Table, Table]:
    """One table per series."""
    batch = _table(f"tokens/s by batch size ({PROMPT_TOKENS}-token prompts)", "batch", "tokens/s", "ms per step")
    for point in growth.batches:
        batch.add_row(str(point.batch), f"{point.tokens_per_s:.0f}", f"{point.step_ms:.2f}")
    context = _table(f"cost of a step by context ({CONTEXT_BATCH} requests in it)", "context", "ms per step")
    for point in growth.contexts:
        context.add_row(str(point.context), f"{point.step_ms:.2f}")
    missing = CONTEXTS[len(growth.contexts) :]
    context.caption = f"longer than the model's context: {', '.join(map(str, missing))}" if missing else None
    waiting = _table(
        f"scheduler's time by waiting requests ({scheduler_cost.RUNNING} running)", "waiting", "ms per step", "one leaves, one enters"
    )
    for row in growth.waiting:
        waiting.add_row(str(row.waiting), f"{_scheduler_ms(row):.3f}", f"{row.churn_us / 1000:.3f}")
    return batch, context, waiting


def panels(growth: Growth) -> list[Panel]:
    """The same three series as plots."""
    batches = Series("", [p.batch for p in growth.batches], [p.tokens_per_s for p in growth.batches])
    contexts = Series("", [p.context for p in growth.contexts], [p.step_ms for p in growth.contexts])
    waiting = [row.waiting for row in growth.waiting]
    steady = Series(f"{scheduler_cost.RUNNING} decodes", waiting, [_scheduler_ms(row) for row in growth.waiting])
    churn = Series("one leaves, one enters", waiting, [row.churn_us / 1000 for row in growth.waiting])
    return [
        Panel("throughput by batch size", "requests in the batch", "output tokens/s", [batches], x_scale="steps"),
        Panel(f"{CONTEXT_BATCH} decodes by context", "tokens before", "ms per step", [contexts], x_scale="steps"),
        Panel("scheduler by waiting requests", "waiting", "ms per step", [steady, churn], x_scale="steps"),
    ]


def _scheduler_ms(row: scheduler_cost.Row) -> float:
    return (row.schedule_us + row.advance_us) / 1000


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", min_width=len(title))
    for column in columns:
        table.add_column(column, justify="right")
    return table


if __name__ == "__main__":
    main()
