"""The KV cache's blocks as numbers: free, cached or used. Pure bookkeeping: neither torch nor redis.

Fixed-size blocks and reference counts after PagedAttention (Kwon et al. 2023). A block is *used* while a request's
block table holds it, *cached* while none does but its content may serve a later request with the same prefix, else
*free*; ``free + cached + used == total`` at all times. Every operation is O(1) per block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from worker.engine.prefix_index import PrefixIndex


class BlockPool:
    """Hands out, shares and takes back the blocks ``0..num_blocks-1``.

    A reference may be *guaranteed*: its holder was promised its blocks, so it is never preempted to free them.

    Args:
        num_blocks: blocks of the KV cache.
        index: finds blocks by prefix; None caches nothing.
    """

    def __init__(self, num_blocks: int, index: PrefixIndex | None = None) -> None:
        self.num_blocks = num_blocks
        self.num_guaranteed = 0
        self._index = index
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._refs = [0] * num_blocks
        self._guarantees = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free) - len(self._cached)

    def ref_count(self, block_id: int) -> int:
        """How many block tables hold the block."""
        return self._refs[block_id]

    def is_guaranteed(self, block_id: int) -> bool:
        return self._guarantees[block_id] > 0

    def allocate(self, count: int, *, guaranteed: bool) -> list[int] | None:
        """Take ``count`` blocks of undefined content, free ones first; None if there are not that many."""
        if count > len(self._free) + len(self._cached):
            return None
        block_ids = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for block_id in block_ids:
            self._refs[block_id] = 1
            self._guarantees[block_id] = int(guaranteed)
        self.num_guaranteed += count * guaranteed
        return block_ids

    def share(self, block_ids: Sequence[int], *, guaranteed: bool) -> None:
        """Add a reference to each of these used or cached blocks."""
        for block_id in block_ids:
            if self._refs[block_id] == 0:
                del self._cached[block_id]
            self._refs[block_id] += 1
        if guaranteed:
            self.guarantee(block_ids)

    def guarantee(self, block_ids: Iterable[int]) -> None:
        """Turn one reference to each block into a guaranteed one."""
        for block_id in block_ids:
            assert self._guarantees[block_id] < self._refs[block_id], "guaranteed more often than held"
            self.num_guaranteed += self._guarantees[block_id] == 0
            self._guarantees[block_id] += 1

    def release(self, block_ids: Sequence[int], *, guaranteed: bool) -> None:
        """Drop a reference to each block of a table. The end of the table is evicted first: a prefix is worth more than its tail."""
        for block_id in reversed(block_ids):
            assert self._refs[block_id] > 0, "released more often than held"
            self._refs[block_id] -= 1
            if guaranteed:
                self._guarantees[block_id] -= 1
                self.num_guaranteed -= self._guarantees[block_id] == 0
            if self._refs[block_id] == 0:
                self._retire(block_id)

    def record(self, block_id: int, key: bytes, parent: int, content: bytes) -> int:
        """Make a used block's computed content known to the prefix index; returns the prefix's node there."""
        assert self._index is not None
        node, loser = self._index.insert(block_id, key, parent, content)
        if loser is not None and self._refs[loser] == 0:
            del self._cached[loser]
            self._free.append(loser)
        return node

    def _retire(self, block_id: int) -> None:
        if self._index is not None and block_id in self._index:
            self._cached[block_id] = None
        else:
            self._free.append(block_id)

    def _evict(self) -> int:
        block_id, _ = self._cached.popitem(last=False)
        assert self._index is not None
        self._index.drop(block_id)
        return block_id


class CpuBlockPool:
    """The blocks of CPU memory to which preempted requests are swapped.

    A step copies out before it copies in, so a block from which this step copies in must not be written by the same step:
    released blocks become free only with `settle`.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._leaving: list[int] = []

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._leaving)

    @property
    def num_allocatable(self) -> int:
        """Blocks that `allocate` can hand out in this step."""
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Take ``count`` blocks; None if there are not that many."""
        if count > len(self._free):
            return None
        return [self._free.pop() for _ in range(count)]

    def release(self, block_ids: Iterable[int]) -> None:
        """Give blocks back, to be reused after the step that is being planned."""
        self._leaving.extend(block_ids)

    def settle(self) -> None:
        """A new step begins: blocks released during the last one are free."""
        self._free.extend(self._leaving)
        self._leaving.clear()
        assert len(self._free) <= self.num_blocks, "a CPU block was released twice"
