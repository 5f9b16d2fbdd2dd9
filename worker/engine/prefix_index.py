"""Which block holds which prefix. Pure bookkeeping: neither torch nor redis.

A full block is found by the hash of its tokens and of everything before them: ``SHA-256(key of the previous block +
its tokens)``, starting with a salt (automatic prefix caching, vLLM; the salt keeps others from computing keys). The
hash only finds candidates: the tokens must be the same, and the previous block must be the one found before.
So even a collision cannot give one request another's content.
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
    node: int  # names this prefix; never reused after the entry is dropped
    parent: int  # node of the prefix that is one block shorter
    key: bytes
    content: bytes


class PrefixIndex:
    """Finds blocks by prefix. Whether a block is in use is only known to `BlockPool`.

    Args:
        block_size: tokens in a block.
        salt: start of every chain; None makes a random one.
        hash_function: bytes -> bytes; any other than `sha256` is for tests of collisions.
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
        """Append the keys of the blocks that follow to a chain of keys."""
        key = keys[-1] if keys else self._salt
        for content in contents:
            key = self._hash(key + content)
            keys.append(key)

    def find(self, key: bytes, parent: int, content: bytes) -> tuple[int, int] | None:
        """Block and node of a prefix: that of node ``parent`` followed by ``content``. None if no block holds it."""
        entry = self._by_key.get(key)
        if entry is None or entry.parent != parent or entry.content != content:
            return None
        return entry.block_id, entry.node

    def insert(self, block_id: int, key: bytes, parent: int, content: bytes) -> tuple[int, int | None]:
        """Record what a block holds. Returns the prefix's node, and the block that had the key and lost it, if any.

        If another block already holds the same prefix, that one stays, and this one is not recorded.
        """
        found = self.find(key, parent, content)
        if found is not None:
            return found[1], None
        loser = self._by_key.get(key)  # of another prefix, or of this one below a node that was dropped
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
