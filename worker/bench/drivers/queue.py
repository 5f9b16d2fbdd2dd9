"""Headrace as it is used: embedded Valkey, a worker process, and callers that block, a thread each."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from producer.client import Client
from producer.load.stats import RequestRecord
from worker.bench.drivers.loop import claim_stdout, new_records, serve, settings
from worker.bench.records import Run
from worker.bench.workloads import BenchRequest
from worker.embedded import embedded_queue


def main() -> None:
    out, options = claim_stdout(), settings()
    callers: int = options.pop("callers")
    flags = [flag for name, value in options.items() for flag in _flag(name.replace("_", "-"), value)]
    with embedded_queue("--log-level", "warning", *flags) as queue, queue.client() as client, ThreadPoolExecutor(callers) as pool:
        serve(out, lambda requests: Run("headrace-queue", _run(client, pool, requests), {"callers": callers}))


def _flag(name: str, value: object) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}", str(value)]


def _run(client: Client, pool: ThreadPoolExecutor, requests: list[BenchRequest]) -> list[RequestRecord]:
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

    for done in [pool.submit(call, request) for request in sorted(requests, key=lambda request: request.arrival_s)]:
        done.result()
    return list(records.values())


if __name__ == "__main__":
    main()
