"""The core of the engine with asynchronous scheduling."""

from __future__ import annotations

from typing import Any

from tests.generation import Loop
from worker.engine.model_loader import LoadedModel
from worker.engine.request import RequestStatus
from worker.engine.run_ahead import PendingStep


class AheadLoop(Loop):
    """As `Loop`, but each step is launched before the tokens of the previous one are read."""

    def __init__(self, loaded: LoadedModel, **settings: Any) -> None:
        super().__init__(loaded, run_ahead=True, **settings)
        self.pending: PendingStep | None = None

    def step(self) -> None:
        plan = self.scheduler.schedule()
        self.runner.copy_blocks(plan)
        if not plan.chunks:
            self._collect()
            return
        assert self.runner.run_ahead is not None
        pending = self.runner.run_ahead.launch(plan, self.pending)
        self._collect()
        self.scheduler.advance(plan)
        pending.mark_unknown()
        self.pending = pending

    def _collect(self) -> None:
        pending, self.pending = self.pending, None
        if pending is None:
            return
        for chunk, sampled in zip(pending.plan.chunks, pending.result(), strict=True):
            request = chunk.request
            if sampled is None or request.status is RequestStatus.FINISHED:
                continue
            assert sampled.error_code is None
            request.output_token_ids.append(sampled.token_id)
            if len(request.output_token_ids) == request.max_tokens:
                self.scheduler.finish(request)
