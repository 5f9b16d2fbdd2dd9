"""A scheduler under a simulated model: the contents of the KV cache are tracked slot by slot, and checked on every step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count

from producer.keys import Tier
from producer.sampling import SamplingParams
from worker.engine.config import EngineConfig
from worker.engine.preemption import PreemptionCosts
from worker.engine.prefix_index import PrefixIndex
from worker.engine.request import Request, RequestStatus
from worker.engine.scheduler import Scheduler
from worker.engine.step import ScheduledChunk, StepPlan

CHEAP_SWAP = PreemptionCosts(recompute_s_per_token=1.0, swap_s_per_block=1e-9)
_names = count()


def make_request(
    prompt: int | Sequence[int],
    max_tokens: int = 4,
    *,
    tier: Tier = "realtime",
    source: str = "",
    deadline_at_s: float | None = None,
    arrival: int = 0,
    output: Sequence[int] = (),
) -> Request:
    """A request of its own name; a prompt given by its length shares no token with any other."""
    name = next(_names)
    token_ids = [1_000 * (name + 1) + i for i in range(prompt)] if isinstance(prompt, int) else list(prompt)
    return Request(
        id=f"r{name}",
        prompt_token_ids=token_ids,
        params=SamplingParams(),
        max_tokens=max_tokens,
        tier=tier,
        source=source,
        deadline_at_s=deadline_at_s,
        arrival=arrival or name,
        output_token_ids=list(output),
    )


def fingerprints(request: Request) -> list[int]:
    """What the KV cache has to hold at each position: it depends on all tokens up to there."""
    prints, last = [], 0
    for token in request.prompt_token_ids + request.output_token_ids:
        last = hash((last, token))
        prints.append(last)
    return prints


class Simulation:
    """Runs plans like an engine does, with ``sample(request)`` as the model; None ends the request.

    Args:
        step_s: how long a step of so many tokens takes; where it is given the scheduler learns it, and ``now_s`` goes on by it.
    """

    def __init__(
        self,
        config: EngineConfig,
        num_blocks: int,
        num_cpu_blocks: int = 0,
        *,
        sample: Callable[[Request], int | None] = lambda request: 7 + len(request.output_token_ids),
        costs: PreemptionCosts | None = None,
        clock: Callable[[], float] | None = None,
        index: PrefixIndex | None = None,
        step_s: Callable[[int], float] | None = None,
    ) -> None:
        self.config = config
        self.now_s = 0.0
        self.step_s = step_s
        clock = clock or (lambda: self.now_s)
        self.scheduler = Scheduler(config, num_blocks, num_cpu_blocks, clock=clock, costs=costs, index=index)
        self.sample = sample
        self.live: list[Request] = []
        self.num_steps = 0
        self.first_token_step: dict[Request, int] = {}
        self.finish_step: dict[Request, int] = {}
        self._device: dict[tuple[int, int], int] = {}  # (block, offset) -> fingerprint
        self._cpu: dict[tuple[int, int], int] = {}
        self._overallocated: set[Request] = set()  # blocks taken in a step that failed

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add(request)
            self.live.append(request)

    def fork(self, parent: Request, child: Request) -> None:
        self.scheduler.fork(parent, child)
        self.live.append(child)

    def finish(self, request: Request) -> None:
        self.scheduler.finish(request)
        if request in self.live:
            self.live.remove(request)
            self.finish_step[request] = self.num_steps
        assert not request.block_ids
        assert not request.cpu_block_ids
        self.check_blocks()

    def schedule(self) -> StepPlan:
        """Plan a step, check the plan, and make its copies."""
        owing_one = [r for r in self.live if r.status is RequestStatus.RUNNING and r.num_owed_tokens == 1]
        plan = self.scheduler.schedule()
        self._overallocated.difference_update(plan.preempted)
        self._check_plan(plan, owing_one)
        self.check_blocks()
        self._copy(plan)
        return plan

    def compute(self, chunks: Sequence[ScheduledChunk]) -> None:
        """Write the chunks' keys and values, then check all that their queries see."""
        size = self.config.block_size
        for request, start, num_tokens, _ in chunks:
            prints = fingerprints(request)
            for position in range(start, start + num_tokens):
                self._device[request.block_ids[position // size], position % size] = prints[position]
        for request, start, num_tokens, _ in chunks:
            seen = [self._device.get((request.block_ids[i // size], i % size)) for i in range(start + num_tokens)]
            assert seen == fingerprints(request)[: start + num_tokens], f"{request.id} attends to what is not its own"

    def complete(self, plan: StepPlan) -> None:
        """Advance, and take in what the model sampled."""
        self.scheduler.advance(plan)
        for chunk in plan.chunks:
            request = chunk.request
            if len(request.block_ids) <= self.scheduler._blocks.blocks_for(request.num_computed_tokens):
                self._overallocated.discard(request)
            if chunk.last and request.status is RequestStatus.RUNNING:
                token = self.sample(request)
                if token is not None:
                    request.output_token_ids.append(token)
                    self.first_token_step.setdefault(request, self.num_steps)
                if token is None or len(request.output_token_ids) >= request.max_tokens:
                    self.finish(request)
        self.check_blocks()

    def step(self) -> StepPlan:
        """One whole step that succeeds."""
        self.num_steps += 1
        plan = self.schedule()
        self.compute(plan.chunks)
        self.complete(plan)
        if self.step_s is not None and plan.chunks:
            seconds = self.step_s(plan.num_tokens)
            self.now_s += seconds
            self.scheduler.pace.observe(plan, seconds)
        return plan

    def failed_step(self, culprit: bool) -> StepPlan:
        """A step that raises. With a culprit, halves are run until it is found: the rest has advanced, it is finished."""
        self.num_steps += 1
        plan = self.schedule()
        self._overallocated.update(chunk.request for chunk in plan.chunks)
        if culprit and plan.chunks:
            middle = len(plan.chunks) // 2
            for part in (plan.chunks[:middle], plan.chunks[middle + 1 :]):
                self.compute(part)
                self.complete(StepPlan(chunks=part))
            self.finish(plan.chunks[middle].request)
        return plan

    def run(self, max_steps: int = 10_000) -> int:
        """Step until nothing is left; returns the number of steps."""
        for steps in range(max_steps):
            if not self.scheduler.has_work():
                return steps
            assert self.step().chunks, "work, but no progress"
        raise AssertionError(f"not done in {max_steps} steps: {[(r.id, r.status) for r in self.live]}")

    def _copy(self, plan: StepPlan) -> None:
        for pairs in (plan.swap_out, plan.swap_in):
            assert len({target for _, target in pairs}) == len(pairs), "a block is written twice"
        assert not {cpu for _, cpu in plan.swap_out} & {cpu for cpu, _ in plan.swap_in}
        for source, target, pairs in ((self._device, self._cpu, plan.swap_out), (self._cpu, self._device, plan.swap_in)):
            values = [[source.get((a, i)) for i in range(self.config.block_size)] for a, _ in pairs]
            for (_, b), row in zip(pairs, values, strict=True):
                for i, value in enumerate(row):
                    target.pop((b, i), None)
                    if value is not None:
                        target[b, i] = value

    def _check_plan(self, plan: StepPlan, owing_one: list[Request]) -> None:
        size, blocks = self.config.block_size, self.scheduler._blocks
        assert plan.num_tokens <= self.config.max_batch_tokens
        assert len(self.scheduler._running) <= self.config.max_batch_size
        singles = [chunk.num_tokens == 1 for chunk in plan.chunks]
        assert singles == sorted(singles, reverse=True), "decodes come first"
        planned = {chunk.request for chunk in plan.chunks}
        assert len(planned) == len(plan.chunks), "one chunk a request"
        undelayed = [r for r in owing_one if r.status is RequestStatus.RUNNING and (self.step_s is None or r.tier == "realtime")]
        assert all(r in planned for r in undelayed), "a decode is held up"
        if self.step_s is not None:
            self._check_pace(plan)
        assert not planned & set(plan.preempted)
        for request, start, num_tokens, last in plan.chunks:
            assert request.status is RequestStatus.RUNNING
            assert num_tokens > 0
            assert start == request.num_computed_tokens
            assert last == (start + num_tokens == request.num_tokens)
            table = request.block_ids
            assert len(table) >= blocks.blocks_for(start + num_tokens)
            written = table[start // size : blocks.blocks_for(start + num_tokens)]
            assert all(blocks.pool.ref_count(b) == 1 for b in written), "a shared block is written to"
            if request not in self._overallocated:
                assert len(table) == blocks.blocks_for(start + num_tokens), "more than one partial block"

    def _check_pace(self, plan: StepPlan) -> None:
        pace = self.scheduler.pace
        tokens = Counter[Tier]()
        for chunk in plan.chunks:
            tokens[chunk.request.tier] += chunk.num_tokens
        decodes = sum(chunk.request.tier == "realtime" and chunk.num_tokens == 1 for chunk in plan.chunks)
        if pace.begin_step(realtime_is_quiet=True):
            assert tokens["batch"] <= pace.batch_tokens(decodes, tokens["realtime"] - decodes), "batch work makes the step too long"

    def check_blocks(self) -> None:
        """Every block is free, cached or used; references, guarantees and promises are those of the tables."""
        blocks, pool = self.scheduler._blocks, self.scheduler._blocks.pool
        assert pool.num_free + pool.num_cached + pool.num_used == pool.num_blocks
        assert len({*pool._free, *pool._cached}) == pool.num_free + pool.num_cached
        refs = Counter(b for r in self.live for b in r.block_ids)
        guarantees = Counter(b for r in self.live for b in r.block_ids if r.guaranteed)
        assert refs == Counter({b: n for b, n in enumerate(pool._refs) if n})
        assert guarantees == Counter({b: n for b, n in enumerate(pool._guarantees) if n})
        assert not refs.keys() & {*pool._free, *pool._cached}
        assert pool.num_guaranteed == len(guarantees)
        running = [r for r in self.live if r.status is RequestStatus.RUNNING]
        for guaranteed, outstanding in ((True, blocks._outstanding_guaranteed), (False, blocks._outstanding_best_effort)):
            assert outstanding == sum(r.max_blocks - len(r.block_ids) for r in running if r.guaranteed is guaranteed)
        assert blocks.num_committed <= pool.num_blocks, "more promised than there is"
        assert len(self.scheduler._running) == len(running)
        assert len(self.scheduler._queues) == len(self.live) - len(running)
        held = [b for r in self.live for b in r.cpu_block_ids]
        assert len(held) == len(set(held))
        assert blocks.cpu_pool.num_free + len(held) == blocks.cpu_pool.num_blocks
