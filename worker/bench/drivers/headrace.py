"""Headrace's bare engine (also with ``policy="static"``)."""

from __future__ import annotations

import time
from collections.abc import Iterator

from producer.sampling import SamplingParams
from worker.bench.drivers.loop import begin, drive, serve
from worker.bench.records import Run, StepRecord
from worker.bench.workloads import BenchRequest
from worker.engine.config import EngineConfig
from worker.engine.engine import Engine
from worker.engine.request import Request
from worker.engine_api import kernel_names


def main() -> None:
    out, options = begin()
    engine = Engine(EngineConfig(**options))
    serve(out, lambda requests: run(engine, requests))


def run(engine: Engine, requests: list[BenchRequest]) -> Run:
    """Drive the engine through the requests.

    Raises:
        RuntimeError: one of them failed.
    """
    steps: list[StepRecord] = []
    start_s = time.monotonic()

    def step() -> Iterator[tuple[int, int]]:
        before = engine.last_step
        outputs = engine.step()
        if engine.last_step is not None and engine.last_step is not before:
            steps.append(_step_record(engine, time.monotonic() - start_s))
        for output in outputs:
            if output.error_code:
                raise RuntimeError(f"request {output.request.id}: {output.error_code} {output.error_message}")
            yield int(output.request.id), len(output.token_ids)

    records = drive(requests, lambda request: engine.add(_request(request)), step, engine.has_work)
    return Run("headrace", records, steps, kernel_names(engine))


def _step_record(engine: Engine, end_s: float) -> StepRecord:
    step, stats = engine.last_step, engine.stats()
    assert step is not None
    kv = stats.kv_usage, stats.kv_waste
    return StepRecord(end_s, step.seconds, step.batch_size, step.idle_seconds, *kv, dict(step.phase_seconds), step.num_tokens)


def _request(request: BenchRequest) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True)
    return Request(str(request.id), list(request.prompt_token_ids), params, request.max_tokens, arrival=request.id)


if __name__ == "__main__":
    main()
