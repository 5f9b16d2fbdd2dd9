"""Preempts requests, by recompute or swap. Pure bookkeeping: neither torch nor redis."""

from __future__ import annotations

from dataclasses import dataclass

from worker.engine.block_manager import BlockManager
from worker.engine.queues import WaitingQueues
from worker.engine.request import Request, RequestStatus
from worker.engine.running import RunningSet
from worker.engine.step import StepPlan

_CUDA_FLOPS_PER_S = 2e14  # of a prefill in bfloat16
_PCIE_BYTES_PER_S = 2e10


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionCosts:
    """The cost of losing a request's blocks; only the ratio matters, so an engine may inject what it measured.

    It ignores that the prefix cache may still have some of the blocks when the request comes back.

    Attributes:
        recompute_s_per_token: to prefill one token again. The default is a 0.1B model's on two CPU cores.
        swap_s_per_block: to copy one block of all layers one way. The default is 0.4 MB at 4 GB/s.
    """

    recompute_s_per_token: float = 5e-4
    swap_s_per_block: float = 1e-4

    @classmethod
    def on_cuda(cls, num_weights: int, block_bytes: int) -> PreemptionCosts:
        """By a model's size and typical rates: two operations per weight and token (counting all experts), PCIe 4 between the memories."""
        return cls(recompute_s_per_token=2 * num_weights / _CUDA_FLOPS_PER_S, swap_s_per_block=block_bytes / _PCIE_BYTES_PER_S)


class Preemption:
    """Takes blocks back from best-effort requests, newest first."""

    def __init__(self, blocks: BlockManager, running: RunningSet, queues: WaitingQueues, costs: PreemptionCosts) -> None:
        self.costs = costs
        self.num_recomputes = 0
        self.num_swaps = 0
        self._blocks = blocks
        self._running = running
        self._queues = queues

    def reclaim(self, count: int, plan: StepPlan, spared: Request | None = None) -> bool:
        """Make ``count`` blocks available, if necessary by preempting all requests except ``spared``; returns whether they are."""
        pool = self._blocks.pool
        while pool.num_available < count:
            if not self._blocks.drop_forked() and not self.preempt_newest(plan, spared):
                return False
        return True

    def preempt_newest(self, plan: StepPlan, spared: Request | None = None) -> bool:
        """Preempt one request other than ``spared``; False if there is none."""
        victim = self._running.victim(spared)
        if victim is None:
            return False
        self._preempt(victim, plan)
        return True

    def _preempt(self, request: Request, plan: StepPlan) -> None:
        self._running.remove(request)
        if self._swap_is_cheaper(request):
            plan.swap_out += self._blocks.swap_out(request)
            request.move_to(RequestStatus.SWAPPED)
            self.num_swaps += 1
        else:
            self._blocks.release(request)
            request.forget_computation()
            request.move_to(RequestStatus.PREEMPTED)
            self.num_recomputes += 1
        request.num_preemptions += 1
        plan.preempted.append(request)
        self._queues.of(request).push(request)

    def _swap_is_cheaper(self, request: Request) -> bool:
        num_blocks = self._blocks.blocks_for(request.num_computed_tokens)
        if num_blocks == 0 or num_blocks > self._blocks.cpu_pool.num_allocatable:
            return False
        costs = self.costs
        return 2 * num_blocks * costs.swap_s_per_block < request.num_computed_tokens * costs.recompute_s_per_token
