"""Shared by the drivers: the line protocol with the benchmark, and the arrival loop. Standard library only."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import IO, Any

from producer.load.stats import RequestRecord
from worker.bench.records import Run
from worker.bench.workloads import BenchRequest


def begin() -> tuple[IO[str], dict[str, Any]]:
    """Must be a driver's first call. Returns the stream for its answers, and its settings, which are its one argument as a JSON object.

    Standard output is reserved for the protocol: whatever the engine prints then goes to stderr. SIGTERM ends the driver cleanly at any
    time; Ctrl-C, which a terminal sends to every process, is left to the benchmark.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    settings: dict[str, Any] = json.loads(sys.argv[1])
    return out, settings


def serve(out: IO[str], run: Callable[[list[BenchRequest]], Run]) -> None:
    """Write ``ready``, then answer each line of requests on standard input with a line of measurements."""
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        requests = [BenchRequest(**request) for request in json.loads(line)]
        print(json.dumps(run(requests).to_json()), file=out, flush=True)


def drive(
    requests: Iterable[BenchRequest],
    add: Callable[[BenchRequest], None],
    step: Callable[[], Iterable[tuple[int, int]]],
    has_work: Callable[[], bool],
) -> list[RequestRecord]:
    """Add each request at its arrival and step while there is work.

    Args:
        step: runs one step; yields (request id, number of new tokens).
    """
    waiting = deque(sorted(requests, key=lambda request: request.arrival_s))
    records = new_records(waiting)
    start_s = time.monotonic()
    while waiting or has_work():
        now_s = time.monotonic() - start_s
        while waiting and waiting[0].arrival_s <= now_s:
            add(waiting.popleft())
        if has_work():
            new_tokens = list(step())
            now_s = time.monotonic() - start_s
            for request_id, count in new_tokens:
                records[request_id].add_tokens(count, now_s)
        elif waiting:
            time.sleep(max(0.0, waiting[0].arrival_s - now_s))
    return list(records.values())


def new_records(requests: Iterable[BenchRequest]) -> dict[int, RequestRecord]:
    return {r.id: RequestRecord(r.id, len(r.prompt_token_ids), r.arrival_s) for r in requests}


def in_batches(requests: Iterable[BenchRequest], size: int, generate: Callable[[Sequence[BenchRequest]], None]) -> list[RequestRecord]:
    """Static batching: ``generate`` what has arrived, at least one and at most ``size``, to its end; then again.

    A caller has its answer when its batch ends.
    """
    waiting = deque(sorted(requests, key=lambda request: request.arrival_s))
    records = new_records(waiting)
    start_s = time.monotonic()
    while waiting:
        time.sleep(max(0.0, waiting[0].arrival_s - (time.monotonic() - start_s)))
        now_s = max(waiting[0].arrival_s, time.monotonic() - start_s)
        arrived = sum(request.arrival_s <= now_s for request in waiting)
        batch = [waiting.popleft() for _ in range(min(size, arrived))]
        generate(batch)
        end_s = time.monotonic() - start_s
        for request in batch:
            record = records[request.id]
            record.first_token_s = record.finished_s = end_s
            record.num_output_tokens = request.max_tokens
    return list(records.values())
