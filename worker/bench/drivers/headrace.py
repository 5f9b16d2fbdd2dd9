"""Headrace's bare engine (also with ``policy="static"``)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from producer.sampling import SamplingParams
from worker.bench.drivers.loop import claim_stdout, drive, serve, settings
from worker.bench.records import Run
from worker.bench.workloads import BenchRequest
from worker.engine.config import EngineConfig
from worker.engine.engine import Engine
from worker.engine.request import Request


def main() -> None:
    out, options = claim_stdout(), settings()
    name = options.pop("name", "headrace")
    engine = Engine(EngineConfig(**options))
    serve(out, lambda requests: _run(engine, name, requests))


def _run(engine: Engine, name: str, requests: list[BenchRequest]) -> Run:
    samples: list[dict[str, Any]] = []
    start_s = time.monotonic()

    def step() -> Iterator[tuple[int, int]]:
        outputs = engine.step()
        stats, last = engine.stats(), engine.last_step
        if last is not None:
            shares = {"used_blocks": stats.used_blocks, "wasted_slots": stats.wasted_slots, "allocated_slots": stats.allocated_slots}
            samples.append({"time_s": time.monotonic() - start_s, **asdict(last), **shares})
        for output in outputs:
            if output.error_code:
                raise RuntimeError(f"request {output.request.id}: {output.error_code} {output.error_message}")
            yield int(output.request.id), len(output.token_ids)

    records = drive(requests, lambda request: engine.add(_request(request)), step, engine.has_work)
    return Run(name, records, {"steps": samples})


def _request(request: BenchRequest) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True)
    return Request(str(request.id), list(request.prompt_token_ids), params, request.max_tokens, arrival=request.id)


if __name__ == "__main__":
    main()
