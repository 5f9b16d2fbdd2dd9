"""Decides which requests enter the batch. Pure bookkeeping: neither torch nor redis.

Realtime requests are guaranteed: admitted only if every block they can need is available or can be freed by preempting.
Batch requests take what is left, may be promised `EngineConfig.batch_overcommit` times that, and give way to
realtime down to the tier's floor. To prevent starvation, a batch request that enters while no other runs is guaranteed
too, and realtime leaves room for it (`_batch_reserve`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from producer.keys import Tier
from worker.engine.block_manager import BlockManager, Prefix
from worker.engine.config import EngineConfig
from worker.engine.preemption import Preemption
from worker.engine.queues import WaitingQueue, WaitingQueues
from worker.engine.request import Request, RequestStatus
from worker.engine.running import RunningSet
from worker.engine.step import Step, StepPlan

MAX_PUT_ASIDE = 4  # requests per step that wait for a prefix in flight; bounds the cost of looking past them
WATERMARK = 0.01  # share of all blocks that stays available after a batch request is admitted


@dataclass(frozen=True, slots=True)
class Shares:
    """The tiers' shares of slots, blocks and tokens per step.

    Attributes:
        batch_slots, batch_blocks, batch_tokens: what realtime's reservation leaves to the batch tier while realtime is busy.
        floor_slots, floor_tokens: what the batch tier keeps; 0 slots mean that it may starve.
    """

    batch_slots: int
    batch_blocks: int
    batch_tokens: int
    floor_slots: int
    floor_tokens: int

    @classmethod
    def of(cls, config: EngineConfig, num_blocks: int) -> Shares:
        """The shares under a configuration. A batch of one leaves no slot to the floor."""
        left, size, tokens = 1.0 - config.realtime_reserved, config.max_batch_size, config.max_batch_tokens
        floor_slots = min(max(_share(config.batch_floor, size), 1), size - 1) if config.batch_floor else 0
        floor_tokens = max(_share(config.batch_floor, tokens), 1) if floor_slots else 0
        return cls(
            batch_slots=max(_share(left, size), floor_slots),
            batch_blocks=max(_share(left, num_blocks), _share(config.batch_floor, num_blocks) if floor_slots else 0),
            batch_tokens=max(_share(left, tokens), floor_tokens),
            floor_slots=floor_slots,
            floor_tokens=floor_tokens,
        )


def _share(part: float, whole: int) -> int:
    return int(part * whole + 1e-9)  # 0.1 of 10 is 1, despite the rounding of 1.0 - 0.9


class Admission:
    """Moves requests from the waiting queues to the running set, and holds all the rules for that."""

    def __init__(
        self,
        config: EngineConfig,
        shares: Shares,
        blocks: BlockManager,
        running: RunningSet,
        queues: WaitingQueues,
        preemption: Preemption,
    ) -> None:
        self._shares = shares
        self._max_batch_size = config.max_batch_size
        self._overcommit = config.batch_overcommit
        self._blocks = blocks
        self._running = running
        self._queues = queues
        self._preemption = preemption
        self._num_blocks = blocks.pool.num_blocks
        self._watermark = math.ceil(WATERMARK * self._num_blocks)
        self._batch_has_turn = False  # between realtime and batch requests so big that they exclude each other
        self._refused: dict[WaitingQueue, tuple[Request, int]] = {}
        self._epoch = 0
        self._mean_blocks = 1.0

    @property
    def realtime_is_quiet(self) -> bool:
        """No realtime request waits or runs: the batch tier may take everything."""
        return not self._running.count["realtime"] and not len(self._queues.realtime)

    def note_arrival(self, request: Request) -> None:
        """Learn how many blocks a request needs, for `room`."""
        self._mean_blocks += (request.max_blocks - self._mean_blocks) / 16

    def note_finished(self, request: Request, was: RequestStatus) -> None:
        """A request, until now in status ``was``, has just finished: those refused before may fit now."""
        if was is RequestStatus.RUNNING and request.tier == "batch":
            self._batch_has_turn = False  # it has had its turn, although it was not guaranteed
        self._epoch += 1

    def admit_realtime(self, step: Step) -> Request | None:
        """Admit the next realtime request if there are a slot and all of its blocks; else None."""
        free_slots = self._max_batch_size - len(self._running) - self._unfilled_floor()
        if free_slots <= 0 and self._running.count["batch"] <= self._shares.floor_slots:
            return None
        queue = self._queues.realtime
        request = self._next(queue, step)
        if request is None:
            return None
        prefix = self._blocks.lookup(request)
        if not self._can_guarantee(request, prefix, self._batch_reserve(request)):
            self._refused[queue] = (request, self._epoch)
            return None
        if free_slots <= 0 and not self._preemption.preempt_newest(step.plan):
            return None
        self._batch_has_turn |= self._is_oversized(request)
        return self._enter(queue, step, prefix, guaranteed=True)

    def admit_batch(self, step: Step) -> Request | None:
        """Admit the next batch request if it fits beside realtime's share; else None.

        A step that preempts admits none: it would be the preempted request again. A step that swaps in admits no
        newcomer: it might take blocks, so that the swapped request gives way again before it is copied.
        """
        if step.plan.preempted:
            return None
        if self._running.count["batch"] >= self._batch_slots() or len(self._running) >= self._max_batch_size:
            return None
        queue = self._queues.oversized if len(self._queues.oversized) and self.realtime_is_quiet else self._queues.batch
        request = self._next(queue, step)
        if request is None or (step.plan.swap_in and request.status is RequestStatus.WAITING):
            return None
        prefix = self._blocks.lookup(request)
        if not self._running.count["batch"] and self._may_guarantee_batch(request) and self._can_guarantee(request, prefix):
            return self._enter(queue, step, prefix, guaranteed=True)
        while not self._fits_best_effort(request, prefix):
            if len(self._running) or not self._blocks.drop_forked():
                self._refused[queue] = (request, self._epoch)
                return None
            prefix = self._blocks.lookup(request)
        return self._enter(queue, step, prefix, guaranteed=False)

    def admit_static(self, step: Step) -> Request | None:
        """Admit the next request of any tier to a static batch, in which all are guaranteed; None if it does not fit."""
        queue = next((queue for queue in self._queues if len(queue)), None)
        request = queue.peek() if queue is not None else None
        if queue is None or request is None or len(self._running) >= self._max_batch_size:
            return None
        prefix = self._blocks.lookup(request)
        return self._enter(queue, step, prefix, guaranteed=True) if self._can_guarantee(request, prefix) else None

    def may_fill_floor(self, step: Step) -> bool:
        """Whether a batch request that waits for the tier's floor may enter in this step."""
        return not step.plan.preempted and self._unfilled_floor() > 0

    def put_back(self, step: Step) -> None:
        """Return the requests put aside in this step to the queues."""
        for request in step.put_aside:
            self._queues.of(request).push(request, lift=False)

    def room(self, tier: Tier) -> int:
        """How many further requests of a tier could be admitted soon; see `Scheduler.room`."""
        waiting, waiting_blocks = self._waiting_before(tier)
        allowance = max(2, self._max_batch_size // 8)
        if tier == "realtime":
            slots = self._max_batch_size - self._running.count["realtime"] - self._batch_floor_in_use()
            blocks = self._num_blocks - self._blocks.num_committed
        else:
            slots = min(self._batch_slots() - self._running.count["batch"], self._max_batch_size - len(self._running))
            blocks = int(self._overcommit * (self._num_blocks - self._blocks.num_committed)) - self._blocks.num_best_effort_demand
            allowance = 0 if len(self._queues.realtime) else allowance
        by_blocks = int((blocks - waiting_blocks) / self._mean_blocks)
        at_least = 1 if not waiting and slots > 0 else 0  # so that the next one's need becomes known
        return max(at_least, min(slots + allowance - waiting, by_blocks))

    def _waiting_before(self, tier: Tier) -> tuple[int, int]:
        """How many requests of a tier are ahead of the next one to be fetched, and the blocks they need.

        While realtime is busy the oversized requests of the batch tier do not count; at most one batch of them is held meanwhile.
        """
        queues = self._queues
        if tier == "realtime" or self.realtime_is_quiet:
            return queues.count(tier), queues.num_blocks(tier)
        return len(queues.batch) + max(len(queues.oversized) - self._max_batch_size, 0), queues.batch.num_blocks

    def _next(self, queue: WaitingQueue, step: Step) -> Request | None:
        """The first of a queue whose next block is not in flight; None if it was refused and nothing has changed since."""
        while (request := queue.peek()) is not None:
            if self._refused.get(queue) == (request, self._epoch):
                return None
            if not self._blocks.awaits(request, step.in_flight):
                return request
            if len(step.put_aside) >= MAX_PUT_ASIDE:
                return None
            step.put_aside.append(queue.pop())
        return None

    def _enter(self, queue: WaitingQueue, step: Step, prefix: Prefix, *, guaranteed: bool) -> Request:
        request = queue.pop()
        if request.status is RequestStatus.WAITING:
            self._charge_prompt(request, prefix)
        elif request.status is RequestStatus.SWAPPED:
            self._make_room_to_swap_in(request, prefix, step.plan)
        step.plan.swap_in += self._blocks.admit(request, prefix, guaranteed=guaranteed)
        request.move_to(RequestStatus.RUNNING)
        self._running.add(request)
        if request is self._running.guaranteed_batch:
            self._batch_has_turn = False
        return request

    def _make_room_to_swap_in(self, request: Request, prefix: Prefix, plan: StepPlan) -> None:
        """A request that gives way may have been the last holder of some of its prefix, which then comes from the available blocks."""
        num_swapped_in = len(request.cpu_block_ids) - len(prefix.block_ids)
        while self._blocks.pool.num_available < (needed := num_swapped_in + self._blocks.num_idle(prefix.block_ids)):
            reclaimed = self._preemption.reclaim(needed, plan)
            assert reclaimed, "it was admitted because it fits"

    def _charge_prompt(self, request: Request, prefix: Prefix) -> None:
        assert request.account is not None
        num_uncached = request.num_prompt_tokens - len(prefix.block_ids) * self._blocks.block_size
        request.account.served += request.account.prompt_cost * max(num_uncached, 0)

    def _can_guarantee(self, request: Request, prefix: Prefix, reserve: int = 0) -> bool:
        needed = request.max_blocks - len(prefix.block_ids) + prefix.num_unguaranteed
        return self._blocks.num_committed + needed + reserve <= self._num_blocks

    def _fits_best_effort(self, request: Request, prefix: Prefix) -> bool:
        """Whether the blocks that a batch request needs now are there, and those that it may need later are not promised too often.

        One that was preempted before gets no overcommitted blocks: it might run out again.
        """
        blocks, watermark = self._blocks, self._watermark if len(self._running) else 0
        capacity = self._num_blocks - blocks.num_committed
        if not self.realtime_is_quiet:
            capacity = min(capacity, self._shares.batch_blocks)
        overcommit = 1.0 if request.num_preemptions else self._overcommit
        rest = request.max_blocks - len(prefix.block_ids)
        if blocks.num_best_effort_demand + prefix.num_idle + rest + watermark > overcommit * capacity:
            return False
        needed_now = blocks.blocks_for(request.num_tokens) - len(prefix.block_ids)
        return blocks.num_spare - prefix.num_idle - watermark >= needed_now

    def _batch_slots(self) -> int:
        if self.realtime_is_quiet:
            return self._max_batch_size
        return self._shares.floor_slots if len(self._queues.realtime) else self._shares.batch_slots

    def _unfilled_floor(self) -> int:
        return max(0, min(self._shares.floor_slots - self._running.count["batch"], len(self._queues.batch)))

    def _batch_floor_in_use(self) -> int:
        return min(self._shares.floor_slots, self._running.count["batch"] + len(self._queues.batch))

    def _batch_reserve(self, request: Request) -> int:
        """Blocks that a realtime request must leave to the oldest batch request, while none is guaranteed."""
        if not self._shares.floor_slots or self._running.guaranteed_batch is not None:
            return 0
        if self._is_oversized(request) and not self._batch_has_turn:
            return 0
        eldest = self._running.eldest_best_effort(self._shares.batch_blocks) or self._queues.batch.peek()
        return 0 if eldest is None else eldest.max_blocks

    def _may_guarantee_batch(self, request: Request) -> bool:
        return self._shares.floor_slots > 0 and request.max_blocks <= self._shares.batch_blocks

    def _is_oversized(self, request: Request) -> bool:
        """Whether a realtime request needs blocks from the batch tier's share."""
        return request.max_blocks > self._num_blocks - self._shares.batch_blocks
