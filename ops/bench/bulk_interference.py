"""What a bulk job costs realtime callers: time to the first token and to the whole answer, alone and beside one, in turn.

    python -m ops.bench.bulk_interference [--model demo] [--seconds 30] [--rounds 2] [--callers 4] [--realtime-step-ms 25] [--json]

Embedded Valkey, one worker, callers that block and ask again at once, and an rq worker that streams a file through the batch tier.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.table import Table

from producer.client import Client
from producer.load.stats import percentiles
from producer.wire import Result
from worker.embedded import EmbeddedQueue, embedded_queue
from worker.engine.config import EngineConfig

PROMPT = "Explain in two sentences why the sky is blue."
OUTPUT_TOKENS = 32
LINE = {"prompt": "Write a short story about a river and a mill. " * 8, "max_tokens": 64, "ignore_eos": True}
LINES = 100_000  # more than any phase consumes
SETTLE_S = 5.0  # until the job's requests fill the batch

Figures = dict[str, float]


def main(argv: Sequence[str] | None = None) -> None:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--callers", type=int, default=4)
    parser.add_argument("--realtime-step-ms", type=float, default=EngineConfig().realtime_step_ms, help="as the worker's option")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    results: dict[str, list[Result]] = {"alone": [], "beside a bulk job": []}
    worker = ("--model", options.model, "--realtime-step-ms", str(options.realtime_step_ms), "--log-level", "warning")
    with embedded_queue(*worker) as queue, queue.client() as client:
        ask(client, options.callers, 2.0)  # warms up
        for _ in range(options.rounds):
            results["alone"] += ask(client, options.callers, options.seconds)
            with bulk_job(queue):
                results["beside a bulk job"] += ask(client, options.callers, options.seconds)
    rows = {name: figures(of_phase) for name, of_phase in results.items()}
    if options.json:
        print(json.dumps(rows, indent=2))
    else:
        Console().print(table(rows))


def ask(client: Client, callers: int, seconds: float) -> list[Result]:
    """Answers to ``callers`` callers, each of which asks again as soon as it is answered."""
    end_s = time.monotonic() + seconds

    def call(_: int) -> Iterator[Result]:
        while time.monotonic() < end_s:
            yield client.submit_and_wait(PROMPT, max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True, timeout=300.0)

    with ThreadPoolExecutor(callers) as pool:
        return [result for results in pool.map(lambda number: list(call(number)), range(callers)) for result in results]


@contextlib.contextmanager
def bulk_job(queue: EmbeddedQueue) -> Iterator[None]:
    """A bulk job that runs within the ``with`` and is cancelled at the end."""
    headrace = [sys.executable, "-c", "from producer.cli import main; main()", "bulk"]
    where = ["--redis", queue.url]
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "in.jsonl"
        lines.write_text((json.dumps(LINE) + "\n") * LINES)
        submit = [*headrace, "submit", str(lines), "--output", f"{folder}/out.jsonl", *where]
        job_id = subprocess.run(submit, check=True, capture_output=True, text=True).stdout.strip()
        with subprocess.Popen([*headrace, "worker", "--burst", *where], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as worker:
            try:
                time.sleep(SETTLE_S)
                yield
            finally:  # otherwise leaving the `with` would wait for all of its lines
                subprocess.run([*headrace, "cancel", job_id, *where], check=True, stdout=subprocess.DEVNULL)
                worker.wait(120)


def figures(results: Sequence[Result]) -> Figures:
    """Percentiles in milliseconds."""
    ttft = percentiles("ttft_ms", [result.timings.ttft_ms for result in results])
    e2e = percentiles("e2e_ms", [result.timings.total_ms for result in results])
    return {"requests": len(results), **ttft, **e2e}


def table(rows: dict[str, Figures]) -> Table:
    """One row per phase."""
    out = Table(title="realtime callers, ms")
    for heading in ("", "requests", "TTFT p50", "p95", "p99", "E2E p50", "p95", "p99"):
        out.add_column(heading, justify="right" if heading else "left")
    for name, row in rows.items():
        out.add_row(name, *(f"{value:.0f}" for value in row.values()))
    return out


if __name__ == "__main__":
    main()
