"""Launches a step before the tokens of the previous one are read, so that the device never waits for the host.

This is known as asynchronous scheduling (vLLM) or overlap scheduling (SGLang). Sampled tokens stay on the device, where the next
step reads them, and the host reads them while that step runs. Until then the last output token of a request is
`request.UNKNOWN_TOKEN`.

A request whose last token turns out to end it has already been launched once too often; that step's result for it is dropped. The
step's writes are harmless: the blocks belonged to the request at launch, and their next owner writes later on the same stream.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import cycle

import torch

from worker.engine.device_sampler import DeviceTokens, is_device_sampled, sample_on_device
from worker.engine.input_batch import Forward, InputBatch
from worker.engine.request import UNKNOWN_TOKEN, Request, RequestStatus
from worker.engine.sampler import FAILED
from worker.engine.step import Sampled, StepPlan
from worker.engine.step_clock import StepClock
from worker.engine.unread import UnreadTokens, to_device


class Moment:
    """A point in the device's queue of work, and the time when the device reaches it."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        if self._event is not None:
            self._event.record()
        self._host_s = time.monotonic()

    def wait(self) -> None:
        """Wait until the device has reached it."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: Moment) -> float:
        """Seconds between two points on the device, which must have reached both."""
        if self._event is None or earlier._event is None:
            return self._host_s - earlier._host_s
        return float(earlier._event.elapsed_time(self._event)) / 1000.0


class PendingStep:
    """A step that was launched, and whose tokens are being copied to the host.

    Args:
        sampled: the plan's chunks that yield a token; row i of ``tokens`` is for chunk ``sampled[i]``.
        begun: before its first work.
        behind: the step that the device computes before it; None if the device may have had nothing to do.

    Attributes:
        ended: after its last work.
        seconds, idle_seconds: its duration, and how long the device did nothing before it; known with its result.
    """

    def __init__(self, plan: StepPlan, sampled: Sequence[int], tokens: DeviceTokens, begun: Moment, behind: PendingStep | None) -> None:
        self.token_ids = tokens.token_ids
        self.row_of: dict[Request, int] = {plan.chunks[i].request: row for row, i in enumerate(sampled)}
        self.plan = plan
        self.seconds = self.idle_seconds = 0.0
        self._read = torch.where(tokens.good, tokens.token_ids, UNKNOWN_TOKEN).to("cpu", non_blocking=True)
        self._begun = begun
        self._before = behind.ended if behind is not None else begun
        self.ended: Moment = Moment(tokens.token_ids.device)

    def mark_unknown(self) -> None:
        """Let each request that continues owe its unread token, so that the next step can be planned."""
        for request in self.row_of:
            if request.status is RequestStatus.RUNNING and len(request.output_token_ids) + 1 < request.max_tokens:
                request.output_token_ids.append(UNKNOWN_TOKEN)

    def result(self) -> list[Sampled | None]:
        """Wait for the tokens, and remove the unknown ones from the requests. Returns what `ModelRunner.run` does."""
        self.ended.wait()
        self.seconds = self.ended.seconds_since(self._begun)
        self.idle_seconds = max(self._begun.seconds_since(self._before), 0.0)
        for request in self.row_of:
            if request.output_token_ids[-1:] == [UNKNOWN_TOKEN]:
                request.output_token_ids.pop()
        token_ids = self._read.tolist()
        rows = [self.row_of.get(chunk.request) for chunk in self.plan.chunks]
        return [None if row is None else FAILED if token_ids[row] == UNKNOWN_TOKEN else Sampled(token_ids[row]) for row in rows]


class RunAhead:
    """Launches steps one after the other, each with the unread tokens of the previous one.

    Args:
        inputs: two, used in turn: the host fills one while the device may still read the other.
        forward: must not wait for the device.
        clock: records the phases of launches.
    """

    def __init__(self, inputs: tuple[InputBatch, InputBatch], forward: Forward, clock: StepClock) -> None:
        self._inputs = cycle(inputs)
        self._forward = forward
        self._clock = clock

    def can_launch(self, plan: StepPlan) -> bool:
        """Whether nothing in the plan needs the host between the model and its result."""
        return all(chunk.request.kind == "generate" and (not chunk.last or is_device_sampled(chunk.request)) for chunk in plan.chunks)

    @torch.inference_mode()
    def launch(self, plan: StepPlan, behind: PendingStep | None) -> PendingStep:
        """Queue a plan's work on the device, after a step whose tokens are not read yet, if any.

        Raises what the model raises; then nothing was launched.
        """
        chunks = plan.chunks
        inputs = next(self._inputs).build(chunks)
        sampled = [i for i, chunk in enumerate(chunks) if chunk.last]
        requests = [chunks[i].request for i in sampled]
        ends = [inputs.token_starts[i + 1] - 1 for i in sampled]
        begun = Moment(inputs.input_ids.device)
        unread = _unread_tokens(behind, requests)
        if unread is not None:
            target = to_device([ends[row] for row in unread.rows], torch.int64, inputs.input_ids.device)
            inputs.input_ids[0].index_copy_(0, target, unread.token_ids)
        self._clock.lap("inputs")
        logits = self._forward(inputs, to_device(ends, torch.int64, inputs.input_ids.device))
        self._clock.lap("model")
        pending = PendingStep(plan, sampled, sample_on_device(logits, requests, unread), begun, behind)
        self._clock.lap("sample")
        return pending


def _unread_tokens(behind: PendingStep | None, requests: Sequence[Request]) -> UnreadTokens | None:
    """The previous step's tokens of the requests that have `UNKNOWN_TOKEN` in their place; None if there are none."""
    rows = [row for row, request in enumerate(requests) if request.output_token_ids[-1:] == [UNKNOWN_TOKEN]]
    if not rows:
        return None
    assert behind is not None, "a token that nobody sampled"
    sampled = to_device([behind.row_of[requests[row]] for row in rows], torch.int64, behind.token_ids.device)
    return UnreadTokens(rows, behind.token_ids[sampled])
