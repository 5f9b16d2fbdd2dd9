"""The KV cache's blocks as numbers: which are free, which are used. Neither torch nor redis."""

from __future__ import annotations

from collections.abc import Sequence


class BlockPool:
    """Hands out and takes back the ids ``0..num_blocks-1`` of fixed-size blocks (PagedAttention, Kwon et al. 2023).

    Args:
        num_blocks: blocks of the KV cache.
        block_size: tokens in a block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` positions."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int] | None:
        """Take ``count`` blocks; None where there are not that many."""
        if count > len(self._free):
            return None
        return [self._free.pop() for _ in range(count)]

    def release(self, block_ids: Sequence[int]) -> None:
        """Give blocks back."""
        self._free.extend(reversed(block_ids))
        assert len(self._free) <= self.num_blocks, "a block was released twice"
