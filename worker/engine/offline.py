"""The engine without a queue: prompts in, results out, for notebooks, tests and scripts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from producer.errors import error_from_code
from producer.wire import GenerateRequest, Result, Timings, TokenLogprob
from worker.engine.detokenizer import Detokenizer
from worker.engine.output_collector import Ending, OutputCollector, ending_of
from worker.engine.request import Request
from worker.engine.step import StepOutput

if TYPE_CHECKING:
    from worker.engine.engine import Engine


def run_to_end(engine: Engine, wire_requests: Sequence[GenerateRequest]) -> list[Result]:
    """Run requests together until all have ended.

    Returns:
        One result per request, in order; only the `Timings` that the engine can know are set.

    Raises:
        HeadraceError: the first error of any request; no request is left in the engine.
    """
    assert not engine.has_work(), "somebody else's outputs would be lost"
    runs = [_Run(engine, wire_request) for wire_request in wire_requests]
    owners = {part.request.id: (run, part) for run in runs for part in run.parts}
    try:
        for run in runs:
            engine.add_all(run.collector.requests)
        while engine.has_work():
            for output in engine.step():
                run, part = owners[output.request.id]
                run.take(part, output)
                if part.stopped and not output.finished:
                    engine.abort(part.request.id)
    finally:
        for request_id in owners:
            engine.abort(request_id)
    return [run.result(engine.model_name) for run in runs]


class _Run:
    """One wire request's run through the engine."""

    def __init__(self, engine: Engine, wire_request: GenerateRequest) -> None:
        requests = engine.inputs.prepare_all(wire_request)
        self.collector = OutputCollector(wire_request.id, requests)
        self.parts = [_Part(request, engine.make_detokenizer(request), i) for i, request in enumerate(requests)]
        self._start_s = time.monotonic()
        self._first_s: float | None = None
        self._end_s = self._start_s

    def take(self, part: _Part, output: StepOutput) -> None:
        if output.error_code is not None:
            raise error_from_code(output.error_code, output.error_message, request_id=self.collector.request_id)
        now_s = time.monotonic()
        self._first_s = self._first_s or now_s
        ending = part.take(output)
        if ending is not None:
            self.collector.put(part.request, ending)
            self._end_s = now_s

    def result(self, model: str) -> Result:
        ttft_s = (self._first_s or self._end_s) - self._start_s
        timings = Timings(ttft_ms=1000 * ttft_s, total_ms=1000 * (self._end_s - self._start_s))
        return self.collector.result(timings=timings, model=model)


class _Part:
    """One engine request's output."""

    def __init__(self, request: Request, detokenizer: Detokenizer, index: int) -> None:
        self.request = request
        self.stopped = False
        self._index = index
        self._detokenizer = detokenizer
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] | None = None if request.params.logprobs is None else []

    def take(self, output: StepOutput) -> Ending | None:
        """Add a step's output; returns the request's ending if this was the last one."""
        delta = self._detokenizer.push(output.token_ids, output.finished)
        self._token_ids += output.token_ids[: delta.num_tokens_kept]
        if self._logprobs is not None:
            self._logprobs += (output.logprobs or [])[: delta.num_tokens_kept]
        self.stopped = delta.stopped_by is not None
        if not (self.stopped or output.finished):
            return None
        return ending_of(output, self._index, self._detokenizer.emitted_text, self._token_ids, self._logprobs, delta.stopped_by)
