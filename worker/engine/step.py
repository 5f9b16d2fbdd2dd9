"""A step: its plan, its making, and its results. Neither torch nor redis."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from producer.wire import FinishReason, TokenLogprob
from worker.engine.request import Request


class ScheduledChunk(NamedTuple):
    """Positions ``start .. start+num_tokens-1`` of one request, to be computed in this step."""

    request: Request
    start: int
    num_tokens: int
    last: bool  # ends at the request's last known token: the step yields the next token, the score or the embedding


@dataclass(slots=True)
class StepPlan:
    """What one step computes: decodes first, then prefill chunks; at most one chunk per request.

    ``swap_out`` and ``swap_in`` are (device block, CPU block) and (CPU block, device block) pairs to be copied
    before the step runs, ``swap_out`` first.
    """

    chunks: list[ScheduledChunk] = field(default_factory=list)
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def longest_context(self) -> int:
        """The most tokens to which a token of the step attends."""
        return max((chunk.start + chunk.num_tokens for chunk in self.chunks), default=0)


@dataclass(slots=True)
class Step:
    """A step in the making: `Scheduler.schedule` fills it, then turns it into a plan.

    Attributes:
        budget: tokens left.
        is_bounded: whether batch work is bounded for realtime's sake (`pace`).
        batch_budget: tokens of prefills that the batch tier may still add to a bounded step.
        turns: batch decodes that wait for their turn in a bounded step.
        in_flight: prefix keys of the blocks that this step computes.
        put_aside: waiting requests that wait for blocks in flight, until the next step.
    """

    budget: int
    is_bounded: bool = False
    batch_budget: int = sys.maxsize
    turns: list[ScheduledChunk] = field(default_factory=list)
    plan: StepPlan = field(default_factory=StepPlan)
    decodes: list[ScheduledChunk] = field(default_factory=list)
    prefills: list[ScheduledChunk] = field(default_factory=list)
    in_flight: set[bytes] = field(default_factory=set)
    put_aside: list[Request] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Sampled:
    """The model's result for one ``last`` chunk: the next token (kind ``generate``), or why there is none.

    ``embedding`` with kind ``embed``; a score is summed in `Request.score`.
    """

    token_id: int = -1
    logprob: TokenLogprob | None = None
    embedding: list[float] | None = None
    error_code: str | None = None  # e.g. BATCH_FAILED for a row of NaN


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step did for one request. The last one of a request has ``finish_reason`` or ``error_code`` set.

    Attributes:
        index: position in the output of the first of ``token_ids``.
        finish_reason: ``stop`` (EOS or stop token; stop strings are the detokeniser's) or ``length``.
        stop_reason: the stop token id, if one ended it.
        error_code: wire code of the failure, ``error_message`` its text.
    """

    request: Request
    index: int
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    error_code: str | None = None
    error_message: str = ""
    score: float | None = None
    embedding: list[float] | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None or self.error_code is not None


@dataclass(frozen=True, slots=True)
class StepStats:
    """One step in figures.

    Attributes:
        seconds: how long it took.
        idle_seconds: how long the device did nothing before it although there was work.
        batch_size: requests in it.
        num_tokens: tokens computed.
        phase_seconds: the host's time since the previous one, by `step_clock.Phase`.
    """

    seconds: float
    idle_seconds: float
    batch_size: int
    num_tokens: int
    phase_seconds: Mapping[str, float] = field(default_factory=dict)
