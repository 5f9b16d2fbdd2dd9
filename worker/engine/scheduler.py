"""Decides what each step computes. Pure bookkeeping: neither torch nor redis.

One rule: a request owes ``num_tokens - num_computed_tokens`` tokens, and a step has a token budget. Decodes
(requests that owe exactly one) come first, so no prefill ever delays one; then prefills in chunks, realtime
before batch (Orca, Yu et al. 2022; Sarathi-Serve, Agrawal et al. 2024).

`admission` decides which requests enter the batch, `queues` and `fairness` which is next, `preemption` which are preempted,
`pace` how much batch work a step may hold beside realtime, and `block_manager` which blocks a request holds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from producer.keys import Tier
from worker.engine.admission import Admission, Shares
from worker.engine.block_manager import BlockManager
from worker.engine.config import EngineConfig
from worker.engine.pace import Pace
from worker.engine.preemption import Preemption, PreemptionCosts
from worker.engine.prefix_index import PrefixIndex
from worker.engine.queues import WaitingQueues
from worker.engine.request import Request, RequestStatus, check_fits
from worker.engine.running import RunningSet
from worker.engine.step import ScheduledChunk, Step, StepPlan

LONG_PREFILL_STEPS = 4  # a prefill that would fill more steps than this shares its steps with others


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """What the scheduler holds now, and what it has counted since it was made.

    Attributes:
        free_blocks, cached_blocks, used_blocks, total_blocks: of the KV cache; the first three add up to the last.
        used_cpu_blocks, total_cpu_blocks: of the memory to which requests are swapped.
        prefix_queries, prefix_hits: tokens looked up in the prefix cache on first admission, and found there.
        recompute_preemptions, swap_preemptions: preemptions by kind.
        allocated_slots, wasted_slots: token slots in the block tables of running requests, and those that hold nothing.
            A block counts once for every table; meant to be read between `Scheduler.advance` and `Scheduler.schedule`.
    """

    running_realtime: int = 0
    running_batch: int = 0
    waiting_realtime: int = 0
    waiting_batch: int = 0
    free_blocks: int = 0
    cached_blocks: int = 0
    used_blocks: int = 0
    total_blocks: int = 0
    used_cpu_blocks: int = 0
    total_cpu_blocks: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    recompute_preemptions: int = 0
    swap_preemptions: int = 0
    allocated_slots: int = 0
    wasted_slots: int = 0

    @property
    def num_held(self) -> int:
        """Requests, running or waiting."""
        return self.running_realtime + self.running_batch + self.waiting_realtime + self.waiting_batch

    @property
    def kv_usage(self) -> float:
        """Share of the KV cache's blocks that requests hold, 0..1."""
        return self.used_blocks / self.total_blocks if self.total_blocks else 0.0

    @property
    def kv_waste(self) -> float:
        """Share of the slots of running requests' blocks that hold nothing, 0..1."""
        return self.wasted_slots / self.allocated_slots if self.allocated_slots else 0.0


class Scheduler:
    """Owns the order of requests and the blocks of the KV cache; used only by the engine's thread.

    Args:
        num_blocks: blocks of the KV cache.
        num_cpu_blocks: blocks of CPU memory to swap to.
        max_model_len: context limit in tokens, prompt and output together.
        clock: monotonic seconds.
        costs: of the two kinds of preemption.
        index: the prefix index, for tests; None makes one if the configuration wants it.
    """

    def __init__(
        self,
        config: EngineConfig,
        num_blocks: int,
        num_cpu_blocks: int = 0,
        max_model_len: int = 2**31 - 1,
        clock: Callable[[], float] = time.monotonic,
        costs: PreemptionCosts | None = None,
        index: PrefixIndex | None = None,
    ) -> None:
        assert config.max_batch_tokens, "see EngineConfig.for_device"
        self.config = config
        self.max_model_len = max_model_len
        self._clock = clock
        self._block_size = config.block_size
        if index is None and config.enable_prefix_caching:
            index = PrefixIndex(config.block_size)
        self._blocks = BlockManager(config.block_size, num_blocks, num_cpu_blocks, index)
        self._running = RunningSet()
        self._shares = Shares.of(config, num_blocks)
        self.pace = Pace(config, keeps_floor=self._shares.floor_slots > 0, clock=clock)
        self._queues = WaitingQueues(config.source_weights, self._shares.batch_blocks)
        self._preemption = Preemption(self._blocks, self._running, self._queues, costs or PreemptionCosts())
        self._admission = Admission(config, self._shares, self._blocks, self._running, self._queues, self._preemption)
        self._num_added = 0
        self._num_steps = 0
        self._filling_since_s = 0.0

    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(len(self._running) or len(self._queues))

    def add(self, request: Request) -> None:
        """Let a request wait for its first step. Raises `ContextLengthExceeded` if it can never fit."""
        assert request.status is RequestStatus.WAITING
        self.check_fits(request)
        if not len(self._queues):
            self._filling_since_s = self._clock()
        self._num_added += 1
        request.sort_key = (math.inf if request.deadline_at_s is None else request.deadline_at_s, request.arrival, self._num_added)
        request.max_blocks = self._blocks.blocks_for(request.max_kv_tokens)
        self._queues.of(request).push(request)
        self._admission.note_arrival(request)

    def check_fits(self, request: Request) -> None:
        """Raises `ContextLengthExceeded` if a request can never fit the context or the KV cache."""
        check_fits(request, self.max_model_len, self._blocks.pool.num_blocks * self._block_size)

    def fork(self, parent: Request, child: Request) -> None:
        """Take in another output of the parent's prompt (``n`` > 1), which shares the prompt's full computed blocks.

        The child computes the rest of the prompt itself, so no block is ever copied. Raises as `add` does.
        """
        assert child.prompt_token_ids == parent.prompt_token_ids, "a child has its parent's prompt"
        self.add(child)
        self._blocks.fork(parent, child)

    def schedule(self) -> StepPlan:
        """Plan the next step: at most one chunk per request, those of one token first.

        Empty only if nothing waits or runs, or while a static batch is being filled. No request's progress
        changes before `advance`, so after a failed step nothing is lost. The copies of every plan must be made exactly once.
        """
        self._blocks.cpu_pool.settle()
        self._num_steps += 1
        step = Step(self.config.max_batch_tokens)
        prefills = self._plan_decodes(step)
        if self.config.policy == "static":
            self._plan_static(step, prefills)
        else:
            self._plan_continuous(step, prefills)
        return self._close(step)

    def advance(self, plan: StepPlan) -> None:
        """The chunks of a plan, or of a part of one, have been computed. From now on full blocks may be shared."""
        block_size, caching, running = self._block_size, self._blocks.has_prefix_index, RequestStatus.RUNNING
        for request, start, num_tokens, last in plan.chunks:
            if request.status is not running:
                continue
            request.num_computed_tokens = end = start + num_tokens
            if last and request.account is not None:
                request.account.served += request.account.output_cost
            if caching and end // block_size > request.num_indexed_blocks:
                self._blocks.index_full_blocks(request)

    def finish(self, request: Request) -> None:
        """End a request in any status, and take its blocks back. Does nothing to a finished one."""
        was = request.status
        if was is RequestStatus.FINISHED:
            return
        if was is RequestStatus.RUNNING:
            self._running.remove(request)
        self._blocks.release(request)
        request.move_to(RequestStatus.FINISHED)
        if was is not RequestStatus.RUNNING:
            self._queues.of(request).note_finished(request, was)
        self._admission.note_finished(request, was)
        if not self.has_work():
            self._blocks.assert_idle()

    def waits_for_quiet(self, request: Request) -> bool:
        """Whether a request needs so many blocks that it has to wait until realtime is quiet, and realtime is not."""
        if request.status is RequestStatus.RUNNING or self._admission.realtime_is_quiet:
            return False
        return self._queues.of(request) is self._queues.oversized

    def forget_blocks(self, request: Request) -> None:
        """Let no other request begin with what a running one has computed: it may be what made it fail."""
        self._blocks.forget(request)

    def wait_s(self) -> float:
        """How long, in seconds, `schedule` waits for a static batch to fill unless more requests arrive; else 0."""
        num_blocks = self._queues.num_blocks("realtime") + self._queues.num_blocks("batch")
        full = len(self._queues) >= self.config.max_batch_size or num_blocks >= self._blocks.pool.num_blocks
        if self.config.policy != "static" or full or len(self._running) or not len(self._queues):
            return 0.0
        return max(0.0, self._filling_since_s + self.config.max_wait_ms / 1000.0 - self._clock())

    def room(self, tier: Tier) -> int:
        """How many further requests of a tier are worth fetching now.

        Counts the free slots and blocks that the tier may use, and a few more requests that may wait, so that a slot that
        becomes free is filled in the next step. With the static policy, what the next batch lacks.
        """
        if self.config.policy == "static":
            return max(0, self.config.max_batch_size - len(self._queues))
        return self._admission.room(tier)

    def stats(self) -> SchedulerStats:
        """The present counts. O(running requests)."""
        blocks, pool, cpu_pool = self._blocks, self._blocks.pool, self._blocks.cpu_pool
        slots = sum(len(request.block_ids) for request in self._running) * self._block_size
        return SchedulerStats(
            running_realtime=self._running.count["realtime"],
            running_batch=self._running.count["batch"],
            waiting_realtime=self._queues.count("realtime"),
            waiting_batch=self._queues.count("batch"),
            free_blocks=pool.num_free,
            cached_blocks=pool.num_cached,
            used_blocks=pool.num_used,
            total_blocks=pool.num_blocks,
            used_cpu_blocks=cpu_pool.num_blocks - cpu_pool.num_free,
            total_cpu_blocks=cpu_pool.num_blocks,
            prefix_queries=blocks.num_prefix_queries,
            prefix_hits=blocks.num_prefix_hits,
            recompute_preemptions=self._preemption.num_recomputes,
            swap_preemptions=self._preemption.num_swaps,
            allocated_slots=slots,
            wasted_slots=slots - sum(request.num_computed_tokens for request in self._running),
        )

    def _plan_decodes(self, step: Step) -> list[Request]:
        """Plan every decode, making room for those that need a block; returns the running requests that owe more.

        If batch work is bounded, its decodes are left for `_plan_turns`.
        """
        bounded = self.pace.begin_step(realtime_is_quiet=self._admission.realtime_is_quiet)
        decodes: list[ScheduledChunk] = []
        prefills = []
        for request in self._running:
            computed = request.num_computed_tokens
            owed = len(request.prompt_token_ids) + len(request.output_token_ids) - computed
            if owed > 1:
                prefills.append(request)
            elif owed == 1:
                chunk = ScheduledChunk(request, computed, 1, True)
                (step.turns if bounded and request.tier == "batch" else decodes).append(chunk)
        step.is_bounded = bounded
        self._add_decodes(step, decodes)
        return prefills

    def _plan_turns(self, step: Step) -> int:
        """Bound batch work by what realtime's part of the step leaves; returns how many of its decodes are in the step.

        They take turns if not all fit; one that sits a step out keeps its blocks.
        """
        num_realtime = len(step.decodes)
        num_prefilled = self.config.max_batch_tokens - step.budget - num_realtime
        tokens = self.pace.batch_tokens(num_realtime, num_prefilled)
        turns = step.turns
        while turns and (room := min(tokens - (len(step.decodes) - num_realtime), step.budget)) > 0:
            running = [chunk for chunk in turns if chunk.request.status is RequestStatus.RUNNING]
            going, turns = self.pace.take_turns(running, room)
            self._add_decodes(step, going)  # a request preempted for it leaves a turn to the others
        num_decodes = len(step.decodes) - num_realtime
        step.batch_budget = max(tokens - num_decodes, 0)
        return num_decodes

    def _add_decodes(self, step: Step, decodes: list[ScheduledChunk]) -> None:
        size, num_before = self._block_size, len(step.decodes)
        step.decodes += decodes
        growing = [request for request, start, _, _ in decodes if start == len(request.block_ids) * size]
        if growing:
            self._grow_decodes(step, growing)
        step.budget -= len(step.decodes) - num_before

    def _grow_decodes(self, step: Step, growing: list[Request]) -> None:
        while self._blocks.pool.num_available < len(growing):
            reclaimed = self._blocks.drop_forked() or self._preemption.preempt_newest(step.plan)
            assert reclaimed, "guaranteed requests were promised their blocks"
            growing = [request for request in growing if request.status is RequestStatus.RUNNING]
            step.decodes = [chunk for chunk in step.decodes if chunk.request.status is RequestStatus.RUNNING]
        for request in growing:
            self._blocks.grow(request, 1)

    def _plan_continuous(self, step: Step, prefills: list[Request]) -> None:
        """Realtime prefills first, minus the batch tier's floor; then batch prefills, within their tier's share."""
        quiet = self._admission.realtime_is_quiet
        realtime = [request for request in prefills if request.tier == "realtime"]
        batch = [request for request in prefills if request.tier == "batch" and request.status is RequestStatus.RUNNING]
        num_batch_decodes = 0 if step.is_bounded else self._running.count["batch"] - len(batch)
        floor = self._batch_floor(step, num_batch_decodes) if batch or step.turns or self._admission.may_fill_floor(step) else 0
        self._plan_prefills(step, realtime, self._admission.admit_realtime, step.budget - floor)
        if step.is_bounded:
            num_batch_decodes = self._plan_turns(step)
        share = step.budget if quiet else max(self._shares.batch_tokens - num_batch_decodes, floor)
        self._plan_prefills(step, batch, self._admission.admit_batch, min(step.budget, share, step.batch_budget))

    def _batch_floor(self, step: Step, num_batch_decodes: int) -> int:
        """How many of the remaining tokens realtime prefills must leave to batch work that wants them; at most half."""
        floor_tokens = self.pace.floor_tokens(len(step.decodes)) if step.is_bounded else self._shares.floor_tokens - num_batch_decodes
        return max(0, min(floor_tokens, step.budget // 2))

    def _plan_static(self, step: Step, prefills: list[Request]) -> None:
        """Fill a batch when the last one has ended, then run its prefills in order; no request enters meanwhile."""
        if not len(self._running) and self.wait_s() == 0.0:
            while (newcomer := self._admission.admit_static(step)) is not None:
                prefills.append(newcomer)
        for request in prefills:
            self._plan_chunk(step, request, step.budget)

    def _plan_prefills(self, step: Step, prefills: list[Request], admit: Callable[[Step], Request | None], budget: int) -> None:
        """Share a budget among the prefills of one tier, running ones and newcomers.

        Running prefills continue in order, then newcomers enter in theirs, as long as there is budget. Long ones (see
        `LONG_PREFILL_STEPS`) leave half of the budget to the others, if these want it, and take turns.
        """
        reserved = step.budget - budget  # for the other tier
        long = [request for request in prefills if self._is_long(request)]
        kept = budget // 2 if long else 0
        for request in prefills:
            if not self._is_long(request):
                self._plan_chunk(step, request, step.budget - reserved - kept)
        while step.budget - reserved > kept and (newcomer := admit(step)) is not None:
            if self._is_long(newcomer):
                long.append(newcomer)
                kept = budget // 2
            else:
                self._plan_chunk(step, newcomer, step.budget - reserved - kept)
        first = self._num_steps % len(long) if long else 0
        for request in long[first:] + long[:first]:
            self._plan_chunk(step, request, step.budget - reserved)

    def _is_long(self, request: Request) -> bool:
        return request.num_owed_tokens > LONG_PREFILL_STEPS * self.config.max_batch_tokens

    def _plan_chunk(self, step: Step, request: Request, budget: int) -> None:
        owed, start = request.num_owed_tokens, request.num_computed_tokens
        count = self._make_room(step, request, min(owed, budget))
        if count <= 0:
            return
        if request.first_step_s is None:
            request.first_step_s = self._clock()
        step.budget -= count
        step.in_flight.update(self._blocks.keys_completed_by(request, start + count))
        chunks = step.decodes if count == 1 else step.prefills
        chunks.append(ScheduledChunk(request, start, count, count == owed))

    def _make_room(self, step: Step, request: Request, count: int) -> int:
        """Give a request the blocks for ``count`` more tokens; returns for how many of them there was room.

        Guaranteed requests and the oldest of the others get theirs by preempting; the rest get what is available.
        """
        if count <= 0 or request.status is not RequestStatus.RUNNING:
            return 0
        missing = self._blocks.missing(request, request.num_computed_tokens + count)
        if missing <= 0:
            return count
        if missing > self._blocks.pool.num_available:
            self._reclaim_for(step, request, missing)
            missing = min(missing, self._blocks.pool.num_available)
            count = min(count, (len(request.block_ids) + missing) * self._block_size - request.num_computed_tokens)
        self._blocks.grow(request, missing)
        return count

    def _reclaim_for(self, step: Step, request: Request, missing: int) -> None:
        if request.guaranteed or request is self._running.eldest_best_effort(request.max_blocks):
            enough = self._preemption.reclaim(missing, step.plan, spared=request)
            assert enough or not request.guaranteed, "guaranteed requests were promised their blocks"

    def _close(self, step: Step) -> StepPlan:
        self._admission.put_back(step)
        chunks = step.decodes + step.prefills
        if step.plan.preempted:  # some of them after they had been planned
            chunks = [chunk for chunk in chunks if chunk.request.status is RequestStatus.RUNNING]
        step.plan.chunks = chunks
        return step.plan
