from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from worker.engine.block_pool import BlockPool, CpuBlockPool
from worker.engine.prefix_index import ROOT, PrefixIndex


def make_index() -> PrefixIndex:
    return PrefixIndex(block_size=2, salt=b"salt")


def make_pool(num_blocks: int) -> BlockPool:
    return BlockPool(num_blocks, make_index())


def record(pool: BlockPool, block_id: int, name: bytes, parent: int = ROOT) -> int:
    return pool.record(block_id, b"key-" + name, parent, name)


def find(index: PrefixIndex, name: bytes, parent: int = ROOT) -> tuple[int, int] | None:
    return index.find(b"key-" + name, parent, name)


def test_blocks_are_given_and_taken_back() -> None:
    pool = make_pool(3)
    assert pool.allocate(4, guaranteed=False) is None
    blocks = pool.allocate(3, guaranteed=False)
    assert blocks is not None
    assert sorted(blocks) == [0, 1, 2]
    assert (pool.num_free, pool.num_cached, pool.num_used) == (0, 0, 3)
    assert pool.allocate(1, guaranteed=False) is None
    pool.release(blocks, guaranteed=False)
    assert (pool.num_free, pool.num_cached, pool.num_used) == (3, 0, 0)


def test_a_block_released_twice_is_a_bug() -> None:
    pool = make_pool(1)
    blocks = pool.allocate(1, guaranteed=False)
    assert blocks is not None
    pool.release(blocks, guaranteed=False)
    with pytest.raises(AssertionError):
        pool.release(blocks, guaranteed=False)


def test_a_recorded_block_is_cached_until_it_is_needed_then_the_least_recently_used_goes_first() -> None:
    index = make_index()
    pool = BlockPool(3, index)
    a, b, c = pool.allocate(3, guaranteed=False) or []
    for block, name in ((a, b"a"), (b, b"b"), (c, b"c")):
        record(pool, block, name)
        pool.release([block], guaranteed=False)
    assert (pool.num_free, pool.num_cached, pool.num_available) == (0, 3, 3)
    pool.share([a], guaranteed=False)  # used again, so now the most recent
    pool.release([a], guaranteed=False)
    assert pool.allocate(2, guaranteed=False) == [b, c]
    assert find(index, b"a") is not None
    assert find(index, b"b") is None


def test_the_end_of_a_sequence_is_evicted_before_its_beginning() -> None:
    pool = make_pool(3)
    blocks = pool.allocate(3, guaranteed=False) or []
    node = ROOT
    for block, name in zip(blocks, (b"a", b"b", b"c"), strict=True):
        node = record(pool, block, name, node)
    pool.release(blocks, guaranteed=False)
    assert pool.allocate(1, guaranteed=False) == [blocks[2]]


def test_a_second_block_of_the_same_prefix_is_not_recorded() -> None:
    index = make_index()
    pool = BlockPool(2, index)
    first, second = pool.allocate(2, guaranteed=False) or []
    node = record(pool, first, b"a")
    assert record(pool, second, b"a") == node
    pool.release([second], guaranteed=False)
    assert pool.num_free == 1
    assert find(index, b"a") == (first, node)


def test_a_key_that_collides_finds_neither_prefix_of_another() -> None:
    index = make_index()
    pool = BlockPool(2, index)
    first, second = pool.allocate(2, guaranteed=False) or []
    pool.record(first, b"same key", ROOT, b"mine")
    assert index.find(b"same key", ROOT, b"yours") is None
    pool.release([first], guaranteed=False)
    node = pool.record(second, b"same key", ROOT, b"yours")
    assert index.find(b"same key", ROOT, b"yours") == (second, node)
    assert index.find(b"same key", ROOT, b"mine") is None
    assert (pool.num_free, pool.num_cached) == (1, 0), "the loser of the key is plainly free"


def test_content_below_another_prefix_is_not_found_even_where_the_keys_collide() -> None:
    index = PrefixIndex(block_size=1, salt=b"", hash_function=lambda data: data[-8:])  # blind to what comes before
    keys: dict[str, list[bytes]] = {"ax": [], "bx": []}
    a, b, x = index.contents([1, 2, 3])
    index.extend_keys(keys["ax"], [a, x])
    index.extend_keys(keys["bx"], [b, x])
    assert keys["ax"][1] == keys["bx"][1]
    node_a, _ = index.insert(0, keys["ax"][0], ROOT, a)
    node_b, _ = index.insert(1, keys["bx"][0], ROOT, b)
    node_ax, _ = index.insert(2, keys["ax"][1], node_a, x)
    assert index.find(keys["ax"][1], node_a, x) == (2, node_ax)
    assert index.find(keys["bx"][1], node_b, x) is None


def test_a_block_whose_prefix_was_evicted_is_found_again_below_the_new_one() -> None:
    index = make_index()
    pool = BlockPool(4, index)
    first, tail = pool.allocate(2, guaranteed=False) or []
    record(pool, tail, b"tail", record(pool, first, b"first"))
    pool.release([first], guaranteed=False)
    assert first in (pool.allocate(3, guaranteed=False) or []), "its prefix is gone, it is still in use"
    new_node = record(pool, first, b"first")
    assert find(index, b"tail", new_node) is None
    node = record(pool, tail, b"tail", new_node)
    assert find(index, b"tail", new_node) == (tail, node)


def test_keys_depend_on_salt_tokens_and_all_that_comes_before() -> None:
    def keys(salt: bytes | None, token_ids: list[int]) -> list[bytes]:
        index, chain = PrefixIndex(block_size=2, salt=salt), list[bytes]()
        index.extend_keys(chain, index.contents(token_ids))
        return chain

    base = keys(b"s", [1, 2, 3, 4, 5])
    assert len(base) == 2, "the partial block has none"
    assert keys(b"s", [1, 2, 3, 4]) == base
    assert keys(b"t", [1, 2, 3, 4])[1] != base[1]
    assert keys(b"s", [9, 2, 3, 4])[1] != base[1]
    assert keys(b"s", [3, 4])[0] != base[1]
    assert keys(None, [1, 2]) != keys(None, [1, 2]), "each index has a salt of its own"


def test_guaranteed_blocks_are_counted_once() -> None:
    pool = make_pool(2)
    blocks = pool.allocate(1, guaranteed=True) or []
    pool.share(blocks, guaranteed=True)
    pool.share(blocks, guaranteed=False)
    assert pool.num_guaranteed == 1
    pool.release(blocks, guaranteed=True)
    assert pool.num_guaranteed == 1
    pool.release(blocks, guaranteed=True)
    assert pool.num_guaranteed == 0
    pool.guarantee(blocks)
    assert pool.num_guaranteed == 1


def test_a_cpu_block_given_back_is_not_written_in_the_same_step() -> None:
    pool = CpuBlockPool(2)
    blocks = pool.allocate(2)
    assert blocks is not None
    pool.release(blocks)
    assert pool.num_free == 2
    assert pool.allocate(1) is None
    pool.settle()
    assert pool.allocate(2) is not None


class BlockPoolMachine(RuleBasedStateMachine):
    """Tables take, share, record and give back blocks in any order; a model of reference counts says what must be so."""

    @initialize(num_blocks=st.integers(1, 12))
    def make(self, num_blocks: int) -> None:
        self.index = make_index()
        self.pool = BlockPool(num_blocks, self.index)
        self.tables: list[tuple[list[int], bool]] = []
        self.recorded: dict[int, bytes] = {}

    @rule(count=st.integers(0, 5), guaranteed=st.booleans())
    def allocate(self, count: int, guaranteed: bool) -> None:
        available = self.pool.num_available
        blocks = self.pool.allocate(count, guaranteed=guaranteed)
        assert (blocks is None) == (count > available)
        if blocks is not None:
            self.tables.append((blocks, guaranteed))
            for block in blocks:
                self.recorded.pop(block, None)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), guaranteed=st.booleans())
    def share_prefix(self, data: st.DataObject, guaranteed: bool) -> None:
        blocks, _ = data.draw(st.sampled_from(self.tables))
        shared = blocks[: data.draw(st.integers(0, len(blocks)))]
        self.pool.share(shared, guaranteed=guaranteed)
        self.tables.append((list(shared), guaranteed))

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), name=st.sampled_from([b"a", b"b", b"c"]))
    def record_one(self, data: st.DataObject, name: bytes) -> None:
        blocks, _ = data.draw(st.sampled_from(self.tables))
        if blocks and blocks[0] not in self.recorded:
            record(self.pool, blocks[0], name)
            if name not in self.recorded.values():
                self.recorded[blocks[0]] = name

    @rule(name=st.sampled_from([b"a", b"b", b"c"]), guaranteed=st.booleans())
    def hit(self, name: bytes, guaranteed: bool) -> None:
        found = find(self.index, name)
        expected = {block for block, recorded in self.recorded.items() if recorded == name}
        assert ({found[0]} if found else set()) == expected
        if found:
            self.pool.share([found[0]], guaranteed=guaranteed)
            self.tables.append(([found[0]], guaranteed))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.tables) - 1))
        blocks, guaranteed = self.tables.pop(index)
        self.pool.release(blocks, guaranteed=guaranteed)

    @invariant()
    def every_block_is_free_cached_or_used(self) -> None:
        pool = self.pool
        refs = Counter(block for blocks, _ in self.tables for block in blocks)
        promised = {block for blocks, guaranteed in self.tables if guaranteed for block in blocks}
        assert all(pool.ref_count(block) == refs[block] for block in range(pool.num_blocks))
        assert pool.num_used == len(refs)
        assert pool.num_guaranteed == len(promised)
        assert pool.num_free + pool.num_cached + pool.num_used == pool.num_blocks
        assert pool.num_cached == len(self.recorded.keys() - refs.keys())
        if not refs:
            assert pool.num_free + pool.num_cached == pool.num_blocks


TestBlockPoolMachine = BlockPoolMachine.TestCase
TestBlockPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
