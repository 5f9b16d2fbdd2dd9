"""vLLM's offline engine, run by the interpreter of an environment that has it (``--vllm-python``)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from worker.bench.drivers.loop import begin, drive, serve
from worker.bench.records import Run, StepRecord
from worker.bench.workloads import BenchRequest


def main() -> None:
    out, options = begin()
    from vllm import LLM  # type: ignore[import-not-found, unused-ignore]  # lives in an environment of its own

    engine = LLM(**options).llm_engine
    serve(out, lambda requests: _run(engine, requests))


def _run(engine: Any, requests: list[BenchRequest]) -> Run:
    """Runs the requests; a step's batch size is the number of requests that got a token in it."""
    from vllm import SamplingParams

    seen: dict[int, int] = {}
    steps: list[StepRecord] = []
    start_s = time.monotonic()

    def add(request: BenchRequest) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True, detokenize=False)
        engine.add_request(str(request.id), {"prompt_token_ids": request.prompt_token_ids}, params)

    def step() -> Iterator[tuple[int, int]]:
        began_s = time.monotonic()
        outputs = engine.step()
        ended_s = time.monotonic()
        steps.append(StepRecord(ended_s - start_s, ended_s - began_s, len(outputs)))
        for output in outputs:
            request_id, total = int(output.request_id), len(output.outputs[0].token_ids)
            yield request_id, total - seen.get(request_id, 0)
            seen[request_id] = total

    return Run("vllm", drive(requests, add, step, engine.has_unfinished_requests), steps)


if __name__ == "__main__":
    main()
