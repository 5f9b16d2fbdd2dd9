"""Which block holds which prefix. Pure bookkeeping: neither torch nor redis.

A full block is found by the hash of its tokens and of everything before them: ``SHA-256(key of the block before +
its tokens)``, begun with a salt (automatic prefix caching, vLLM; the salt keeps others from computing keys). The
hash only finds; what counts is that the tokens are the same, and the block before is the one that was found
before. So even a collision cannot hand one request another's content.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

ROOT = 0  # node before the first block


def sha256(data: bytes) -> bytes:
    """The hash in use: 32 bytes."""
    return hashlib.sha256(data).digest()


@dataclass(frozen=True, slots=True)
class _Entry:
    block_id: int
    node: int  # names this prefix; never used again after the entry is dropped
    parent: int  # node of the prefix that is one block shorter
    key: bytes
    content: bytes


class PrefixIndex:
    """Finds blocks by prefix. Does not know whether a block is in use: that is `BlockPool`'s.

    Args:
        block_size: tokens in a block.
        salt: start of every chain; a fresh random one where None.
        hash_function: bytes -> bytes; anything but `sha256` is for tests of collisions.
    """

    def __init__(self, block_size: int, salt: bytes | None = None, hash_function: Callable[[bytes], bytes] = sha256) -> None:
        self.block_size = block_size
        self._salt = secrets.token_bytes(16) if salt is None else salt
        self._hash = hash_function
        self._by_key: dict[bytes, _Entry] = {}
        self._by_block: dict[int, _Entry] = {}
        self._last_node = ROOT

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._by_block

    def contents(self, token_ids: Sequence[int]) -> list[bytes]:
        """The tokens of each full block, as bytes."""
        data = array("q", token_ids).tobytes()
        width = 8 * self.block_size
        return [data[i : i + width] for i in range(0, len(data) - width + 1, width)]

    def extend_keys(self, keys: list[bytes], contents: Sequence[bytes]) -> None:
        """Append to a chain of keys those of the blocks that follow it."""
        key = keys[-1] if keys else self._salt
        for content in contents:
            key = self._hash(key + content)
            keys.append(key)

    def find(self, key: bytes, parent: int, content: bytes) -> tuple[int, int] | None:
        """Block and node of a prefix: the one of node ``parent``, then ``content``. None where no block holds it."""
        entry = self._by_key.get(key)
        if entry is None or entry.parent != parent or entry.content != content:
            return None
        return entry.block_id, entry.node

    def insert(self, block_id: int, key: bytes, parent: int, content: bytes) -> tuple[int, int | None]:
        """Record what a block holds. Returns the prefix's node, and the block that had the key and lost it, if any.

        Where another block holds the same prefix already, that one stays, and this one is not recorded.
        """
        found = self.find(key, parent, content)
        if found is not None:
            return found[1], None
        loser = self._by_key.get(key)  # another prefix, or this one below a node that was dropped
        if loser is not None:
            self.drop(loser.block_id)
        self._last_node += 1
        entry = _Entry(block_id, self._last_node, parent, key, content)
        self._by_key[key] = self._by_block[block_id] = entry
        return entry.node, None if loser is None else loser.block_id

    def drop(self, block_id: int) -> None:
        """Forget what a block holds."""
        entry = self._by_block.pop(block_id)
        del self._by_key[entry.key]
