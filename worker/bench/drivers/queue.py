"""Headrace as it is used: embedded Valkey, a worker process, and blocking callers with one thread each.

A blocking caller sees its answer whole. The worker reports when the first token was there, so that time excludes the way back, and
there are no times between tokens: streams would have them, but would be a path other than the one measured.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.pool import ThreadPool
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

from producer.client import Client
from producer.load.stats import RequestRecord
from producer.status import read_status
from worker.bench.drivers.loop import begin, new_records, serve
from worker.bench.records import Run, StepRecord
from worker.bench.workloads import BenchRequest
from worker.embedded import embedded_queue


def main() -> None:
    out, options = begin()
    callers: int = options.pop("callers")
    with TemporaryDirectory(prefix="headrace-bench-") as folder:
        step_log = Path(folder, "steps.jsonl")
        flags = [flag for name, value in options.items() for flag in _flag(name.replace("_", "-"), value)]
        with (
            embedded_queue("--log-level", "warning", "--drain-seconds", "0", "--step-log", str(step_log), *flags) as queue,
            queue.client() as client,
            ThreadPool(callers) as pool,  # does not join its threads, which may still wait for answers when the driver is stopped
        ):
            (worker,) = read_status(client.redis, queue.queue).workers
            kernels = worker.fields["kernels"]
            serve(out, lambda requests: replace(run(client, pool, step_log, requests), kernels=kernels))


def run(client: Client, pool: ThreadPool, step_log: Path, requests: list[BenchRequest]) -> Run:
    """Have the pool's threads send the requests and wait for the answers; the worker writes ``step_log``."""
    start_s, logged_bytes = time.time(), step_log.stat().st_size
    records = _call_all(client, pool, requests)
    with step_log.open("rb") as log:
        log.seek(logged_bytes)
        return Run("queue", records, list(_steps(log, start_s)))


def _flag(name: str, value: object) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}", str(value)]


def _call_all(client: Client, pool: ThreadPool, requests: list[BenchRequest]) -> list[RequestRecord]:
    records = new_records(requests)
    start_s = time.monotonic()

    def call(request: BenchRequest) -> None:
        time.sleep(max(0.0, request.arrival_s - (time.monotonic() - start_s)))
        sent_s = time.monotonic() - start_s
        result = client.submit_and_wait(
            prompt_token_ids=request.prompt_token_ids, temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True, timeout=3600.0
        )
        record = records[request.id]
        record.first_token_s = sent_s + result.timings.ttft_ms / 1000
        record.finished_s = time.monotonic() - start_s
        record.num_output_tokens = result.usage.completion_tokens

    for _ in pool.imap_unordered(call, sorted(requests, key=lambda request: request.arrival_s)):
        pass
    return list(records.values())


def _steps(log: IO[bytes], start_s: float) -> Iterator[StepRecord]:
    """The lines of `worker.service.StepLog`; the last one may still be incomplete."""
    for line in log:
        if line.endswith(b"\n"):
            step: dict[str, Any] = json.loads(line)
            yield StepRecord(
                end_s=step["time_s"] - start_s,
                seconds=step["step_ms"] / 1000,
                batch_size=step["batch_size"],
                idle_s=step["idle_ms"] / 1000,
                kv_usage=step["kv_usage"],
                kv_waste=step["kv_waste"],
                phase_s={phase: milliseconds / 1000 for phase, milliseconds in step["phase_ms"].items()},
                num_tokens=step["num_tokens"],
            )


if __name__ == "__main__":
    main()
