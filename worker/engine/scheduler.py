"""Decides what each step computes. Pure bookkeeping: neither torch nor redis.

One rule: a request owes ``num_tokens - num_computed_tokens`` tokens, and a step has a token budget. Decodes
(requests that owe exactly one) come first, then prefill chunks (Orca, Yu et al. 2022; Sarathi-Serve, Agrawal et al. 2024).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from producer.errors import ContextLengthExceeded
from producer.keys import Tier
from worker.engine.block_pool import BlockPool
from worker.engine.config import EngineConfig
from worker.engine.request import Request, RequestStatus, ScheduledChunk, StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """What the scheduler holds at this moment, and what it has counted since it was made.

    Attributes:
        free_blocks, cached_blocks, used_blocks, total_blocks: of the KV cache; the first three add up to the last.
        prefix_queries, prefix_hits: prompt tokens looked up in the prefix cache, and found there.
        recompute_preemptions, swap_preemptions: by kind.
        wasted_slots: token slots in allocated blocks that hold nothing.
        allocated_slots: token slots in allocated blocks.
    """

    running_realtime: int = 0
    running_batch: int = 0
    waiting_realtime: int = 0
    waiting_batch: int = 0
    free_blocks: int = 0
    cached_blocks: int = 0
    used_blocks: int = 0
    total_blocks: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    recompute_preemptions: int = 0
    swap_preemptions: int = 0
    wasted_slots: int = 0
    allocated_slots: int = 0


class Scheduler:
    """Owns the order of requests and the blocks of the KV cache; used by the engine's thread alone."""

    def __init__(
        self,
        config: EngineConfig,
        num_blocks: int,
        num_cpu_blocks: int = 0,
        max_model_len: int = 2**31 - 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.max_model_len = max_model_len
        self.num_cpu_blocks = num_cpu_blocks
        self._clock = clock
        self._pool = BlockPool(num_blocks, config.block_size)
        self._waiting: deque[Request] = deque()
        self._running: dict[Request, None] = {}
        self._reserved_blocks = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._running or self._waiting)

    def add(self, request: Request) -> None:
        """Take a request in. Raises `ContextLengthExceeded` where it can never fit."""
        self._check_fits(request)
        self._waiting.append(request)

    def schedule(self) -> StepPlan:
        """Plan the next step; empty only where there is nothing to run. Changes no request's progress: see `advance`."""
        plan = StepPlan()
        budget = self.config.max_batch_tokens
        for request in [r for r in self._running if r.num_owed_tokens == 1]:
            budget -= self._plan_chunk(plan, request, budget)
        for request in [r for r in self._running if r.num_owed_tokens > 1]:
            budget -= self._plan_chunk(plan, request, budget)
        while budget > 0 and self._admit():
            budget -= self._plan_chunk(plan, next(reversed(self._running)), budget)
        return plan

    def advance(self, plan: StepPlan) -> None:
        """The planned chunks (or these of them) were computed."""
        for chunk in plan.chunks:
            if chunk.request.status is RequestStatus.RUNNING:
                chunk.request.num_computed_tokens = chunk.start + chunk.num_tokens

    def finish(self, request: Request) -> None:
        """End a request in whatever state it is, and take its blocks back."""
        if request.status is RequestStatus.FINISHED:
            return
        if request.status is RequestStatus.RUNNING:
            del self._running[request]
            self._reserved_blocks -= self._pool.blocks_for(request.max_total_tokens)
        else:
            self._waiting.remove(request)
        self._pool.release(request.block_ids)
        request.block_ids = []
        request.move_to(RequestStatus.FINISHED)
        assert self.has_work() or self._pool.num_free == self._pool.num_blocks

    def fork(self, parent: Request, child: Request) -> None:
        """Take in ``child``, another output of ``parent``'s prompt."""
        assert child.prompt_token_ids == parent.prompt_token_ids
        self.add(child)

    def room(self, tier: Tier) -> int:
        """How many further requests of a tier are worth fetching now."""
        del tier
        return max(0, self.config.max_batch_size + 2 - self.num_running - self.num_waiting)

    def stats(self) -> SchedulerStats:
        """Counts of this moment."""
        slots = self._pool.num_used * self._pool.block_size
        return SchedulerStats(
            running_realtime=sum(r.tier == "realtime" for r in self._running),
            running_batch=sum(r.tier == "batch" for r in self._running),
            waiting_realtime=sum(r.tier == "realtime" for r in self._waiting),
            waiting_batch=sum(r.tier == "batch" for r in self._waiting),
            free_blocks=self._pool.num_free,
            used_blocks=self._pool.num_used,
            total_blocks=self._pool.num_blocks,
            allocated_slots=slots,
            wasted_slots=slots - sum(r.num_computed_tokens for r in self._running),
        )

    def _check_fits(self, request: Request) -> None:
        capacity = self._pool.num_blocks * self._pool.block_size
        for needed, limit, what in (
            (request.num_prompt_tokens + request.max_tokens, self.max_model_len, "context"),
            (request.max_total_tokens, capacity, "KV cache"),
        ):
            if needed > limit:
                message = (
                    f"prompt ({request.num_prompt_tokens} tokens) plus max_tokens ({request.max_tokens}) "
                    f"exceeds the {what} of {limit} tokens"
                )
                raise ContextLengthExceeded(message, request_id=request.id, field="max_tokens")

    def _admit(self) -> bool:
        if not self._waiting or len(self._running) >= self.config.max_batch_size:
            return False
        request = self._waiting[0]
        reservation = self._pool.blocks_for(request.max_total_tokens)
        if self._reserved_blocks + reservation > self._pool.num_blocks:
            return False
        self._waiting.popleft()
        self._reserved_blocks += reservation
        request.move_to(RequestStatus.RUNNING)
        self._running[request] = None
        return True

    def _plan_chunk(self, plan: StepPlan, request: Request, budget: int) -> int:
        owed = request.num_owed_tokens
        count = min(owed, budget)
        if count <= 0:
            return 0
        start = request.num_computed_tokens
        missing = self._pool.blocks_for(start + count) - len(request.block_ids)
        if missing > 0:
            blocks = self._pool.allocate(missing)
            assert blocks is not None, "admission reserves every block a request can need"
            request.block_ids.extend(blocks)
        plan.chunks.append(ScheduledChunk(request, start, count, last=count == owed))
        return count
