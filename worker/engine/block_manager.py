"""Which requests hold which blocks, and how many they may still need. Pure bookkeeping: neither torch nor redis.

A *guaranteed* request was promised every block it can ever need, and admission keeps ``committed <= num_blocks``. Any
other (*best effort*) may find that no block is left, and is then preempted. Blocks are taken as tokens are scheduled, so a
sequence wastes at most the end of its last block.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import NamedTuple

from worker.engine.arithmetic import ceil_div
from worker.engine.block_pool import BlockPool, CpuBlockPool
from worker.engine.prefix_index import ROOT, PrefixIndex
from worker.engine.request import UNKNOWN_TOKEN, Request, RequestStatus


class Prefix(NamedTuple):
    """The blocks that a waiting request can start with.

    Attributes:
        block_ids: in order; found in the prefix index, or held since `BlockManager.fork`.
        node: of the whole prefix in the index.
        num_idle: how many of the blocks are cached, and so become unavailable to others when they are used.
        num_unguaranteed: how many of the blocks are not guaranteed yet.
    """

    block_ids: list[int]
    node: int
    num_idle: int
    num_unguaranteed: int


class BlockManager:
    """Owns the block tables (`Request.block_ids`, `Request.cpu_block_ids`), and counts the blocks still to be taken.

    Args:
        num_blocks: blocks of the KV cache.
        num_cpu_blocks: blocks of CPU memory to swap to.
        index: finds computed blocks by prefix; None shares blocks only by `fork`.
    """

    def __init__(self, block_size: int, num_blocks: int, num_cpu_blocks: int, index: PrefixIndex | None) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks, index)
        self.cpu_pool = CpuBlockPool(num_cpu_blocks)
        self.num_prefix_queries = 0  # tokens
        self.num_prefix_hits = 0
        self._index = index
        self._outstanding_guaranteed = 0  # blocks promised to guaranteed requests, not yet taken
        self._outstanding_best_effort = 0  # blocks that best-effort requests may still need
        self._forked: dict[Request, None] = {}  # waiting requests that hold blocks

    @property
    def has_prefix_index(self) -> bool:
        return self._index is not None

    @property
    def num_committed(self) -> int:
        """Blocks that guaranteed requests hold or were promised."""
        return self.pool.num_guaranteed + self._outstanding_guaranteed

    @property
    def num_best_effort_demand(self) -> int:
        """Blocks that best-effort requests hold without sharing them with a guaranteed one, or may still need."""
        return self.pool.num_used - self.pool.num_guaranteed + self._outstanding_best_effort

    @property
    def num_spare(self) -> int:
        """Available blocks that no guaranteed request will take; may be negative."""
        return self.pool.num_available - self._outstanding_guaranteed

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` positions."""
        return ceil_div(num_tokens, self.block_size)

    def lookup(self, request: Request) -> Prefix:
        """The longest computed prefix that a waiting request can start with. Changes only `Request.block_keys`."""
        if request.block_ids:
            return self._describe(request.block_ids, ROOT)
        if self._index is None:
            return Prefix([], ROOT, 0, 0)
        contents = self._index.contents(request.tokens(0, self._num_shareable(request) * self.block_size))
        self._index.extend_keys(request.block_keys, contents[len(request.block_keys) :])
        block_ids: list[int] = []
        node = ROOT
        for key, content in zip(request.block_keys, contents, strict=False):
            found = self._index.find(key, node, content)
            if found is None:
                break
            block_ids.append(found[0])
            node = found[1]
        return self._describe(block_ids, node)

    def num_idle(self, block_ids: Sequence[int]) -> int:
        """How many of the blocks no request holds."""
        return sum(self.pool.ref_count(block_id) == 0 for block_id in block_ids)

    def awaits(self, request: Request, in_flight: Set[bytes]) -> bool:
        """Whether a waiting request could start with a block that is being computed in this very step."""
        if not in_flight or self._index is None or request.block_ids:
            return False
        limit = self._num_shareable(request)
        if len(request.block_keys) < limit:
            self.lookup(request)  # extends them
        return not in_flight.isdisjoint(request.block_keys[:limit])

    def keys_completed_by(self, request: Request, end: int) -> list[bytes]:
        """Prefix keys of the blocks that are full once the request is computed up to ``end``."""
        return request.block_keys[request.num_computed_tokens // self.block_size : end // self.block_size]

    def admit(self, request: Request, prefix: Prefix, *, guaranteed: bool) -> list[tuple[int, int]]:
        """Give a request its prefix; it takes the rest as it grows. Returns the pairs to swap in: (CPU block, block).

        A swapped request takes the blocks of its computed tokens at once; they must be available.
        """
        if request.block_ids:
            del self._forked[request]
            if guaranteed:
                self.pool.guarantee(request.block_ids)
        else:
            self.pool.share(prefix.block_ids, guaranteed=guaranteed)
            request.block_ids = prefix.block_ids
        request.guaranteed = guaranteed
        request.prefix_node = prefix.node
        request.num_indexed_blocks = 0 if prefix.node == ROOT else len(prefix.block_ids)
        self._add_outstanding(request, request.max_blocks - len(request.block_ids))
        if request.status is RequestStatus.SWAPPED:
            return self._swap_in(request)
        request.num_computed_tokens = len(request.block_ids) * self.block_size
        self._count_prefix(request)
        return []

    def missing(self, request: Request, end: int) -> int:
        """Blocks that the request lacks to be computed up to ``end``."""
        return self.blocks_for(end) - len(request.block_ids)

    def grow(self, request: Request, count: int) -> None:
        """Append ``count`` blocks to a table; that many must be available."""
        block_ids = self.pool.allocate(count, guaranteed=request.guaranteed)
        assert block_ids is not None, "the caller makes room first"
        request.block_ids.extend(block_ids)
        self._add_outstanding(request, -count)
        assert len(request.block_ids) <= request.max_blocks, f"{request.id} outgrows its max_blocks"

    def release(self, request: Request) -> None:
        """Take back everything that a request holds or could still take, whatever its status."""
        if request.status is RequestStatus.RUNNING:
            self._add_outstanding(request, len(request.block_ids) - request.max_blocks)
        self._forked.pop(request, None)
        self.pool.release(request.block_ids, guaranteed=request.guaranteed)
        self.cpu_pool.release(request.cpu_block_ids)
        request.block_ids = []
        request.cpu_block_ids = []
        request.guaranteed = False
        request.num_indexed_blocks = 0
        request.prefix_node = ROOT

    def swap_out(self, request: Request) -> list[tuple[int, int]]:
        """Move a running request's computed blocks to CPU memory, where there must be room: (block, CPU block) pairs."""
        computed = request.block_ids[: self.blocks_for(request.num_computed_tokens)]
        cpu_block_ids = self.cpu_pool.allocate(len(computed))
        assert cpu_block_ids is not None, "the caller checks first"
        self.release(request)
        request.cpu_block_ids = cpu_block_ids
        return list(zip(computed, cpu_block_ids, strict=True))

    def index_full_blocks(self, request: Request) -> None:
        """Make the blocks that are now full of computed tokens known to the prefix index."""
        assert self._index is not None
        first, size = request.num_indexed_blocks, self.block_size
        token_ids = request.tokens(first * size, request.num_computed_tokens // size * size)
        if token_ids and token_ids[-1] == UNKNOWN_TOKEN:
            del token_ids[-size:]
        contents = self._index.contents(token_ids)
        self._index.extend_keys(request.block_keys, contents[len(request.block_keys) - first :])
        for i, content in enumerate(contents, first):
            request.prefix_node = self.pool.record(request.block_ids[i], request.block_keys[i], request.prefix_node, content)
        request.num_indexed_blocks = first + len(contents)

    def forget(self, request: Request) -> None:
        """Remove the blocks that a request holds from the prefix index. Requests that share them keep them."""
        for block_id in request.block_ids:
            if self._index is not None and block_id in self._index:
                self._index.drop(block_id)

    def fork(self, parent: Request, child: Request) -> None:
        """Let a waiting child hold the parent's full computed prompt blocks."""
        num_tokens = min(parent.num_computed_tokens, child.max_cached_tokens, parent.num_prompt_tokens)
        block_ids = parent.block_ids[: num_tokens // self.block_size]
        if block_ids:
            self.pool.share(block_ids, guaranteed=False)
            self._forked[child] = None
            child.block_ids = block_ids

    def drop_forked(self) -> bool:
        """Take back the blocks that one waiting request holds; False if none holds any."""
        if not self._forked:
            return False
        request, _ = self._forked.popitem()
        self.pool.release(request.block_ids, guaranteed=False)
        request.block_ids = []
        return True

    def assert_idle(self) -> None:
        """Assert that no request holds a block or was promised one."""
        pool = self.pool
        assert pool.num_free + pool.num_cached == pool.num_blocks, "a block was lost"
        assert pool.num_guaranteed == 0
        assert self._outstanding_guaranteed == self._outstanding_best_effort == 0
        assert self.cpu_pool.num_free == self.cpu_pool.num_blocks, "a CPU block was lost"

    def _add_outstanding(self, request: Request, count: int) -> None:
        if request.guaranteed:
            self._outstanding_guaranteed += count
        else:
            self._outstanding_best_effort += count

    def _num_shareable(self, request: Request) -> int:
        swapped = request.status is RequestStatus.SWAPPED
        return (request.num_computed_tokens if swapped else request.max_cached_tokens) // self.block_size

    def _describe(self, block_ids: list[int], node: int) -> Prefix:
        pool = self.pool
        num_unguaranteed = sum(not pool.is_guaranteed(block_id) for block_id in block_ids)
        return Prefix(block_ids, node, self.num_idle(block_ids), num_unguaranteed)

    def _swap_in(self, request: Request) -> list[tuple[int, int]]:
        shared = len(request.block_ids)
        source = request.cpu_block_ids[shared:]
        self.grow(request, len(source))
        self.cpu_pool.release(request.cpu_block_ids)
        request.cpu_block_ids = []
        return list(zip(source, request.block_ids[shared:], strict=True))

    def _count_prefix(self, request: Request) -> None:
        if request.num_preemptions == 0 and self._index is not None:
            request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
            self.num_prefix_queries += request.num_tokens
            self.num_prefix_hits += request.num_computed_tokens
