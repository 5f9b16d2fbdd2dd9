from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from producer.errors import ModelUnavailable
from worker.engine import kv_cache
from worker.engine.attention.layers import AttentionLayer
from worker.engine.config import EngineConfig
from worker.engine.kv_cache import KVCache, block_bytes, choose_num_blocks, free_memory_bytes
from worker.engine.step import StepPlan

CPU = torch.device("cpu")
GIB = 1 << 30


def layer(num_kv_heads: int, head_dim: int, value_dim: int) -> AttentionLayer:
    return AttentionLayer(
        name="a",
        num_heads=num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        scale=1.0,
        window=None,
        softcap=None,
        has_sinks=False,
    )


LAYERS = [layer(2, 8, 8), layer(1, 16, 4)]


def test_layers_may_differ_in_heads_and_dims_and_start_at_zero() -> None:
    cache = KVCache(LAYERS, 5, 16, torch.bfloat16, CPU)
    assert [(k.shape, v.shape) for k, v in cache.layers] == [((5, 2, 16, 8), (5, 2, 16, 8)), ((5, 1, 16, 16), (5, 1, 16, 4))]
    assert all(tensor.dtype == torch.bfloat16 and not tensor.any() for pair in cache.layers for tensor in pair)


def test_block_bytes_are_those_of_the_tensors() -> None:
    cache = KVCache(LAYERS, 3, 16, torch.float32, CPU)
    assert block_bytes(LAYERS, 16, torch.float32) * 3 == sum(tensor.nbytes for pair in cache.layers for tensor in pair)


def filled(num_blocks: int, num_cpu_blocks: int) -> KVCache:
    """Each block full of its own number in every layer."""
    cache = KVCache(LAYERS, num_blocks, 16, torch.float32, CPU, num_cpu_blocks)
    for pair in cache.layers:
        for tensor in pair:
            tensor.add_(torch.arange(num_blocks).view(-1, 1, 1, 1))
    return cache


def contents(cache: KVCache) -> list[float]:
    """What each block holds, the same everywhere in it and in all layers."""
    values = torch.stack([tensor.flatten(1).amax(1) for pair in cache.layers for tensor in pair])
    assert torch.equal(values, torch.stack([tensor.flatten(1).amin(1) for pair in cache.layers for tensor in pair]))
    assert (values == values[0]).all()
    return values[0].tolist()


def test_swapped_blocks_come_back_elsewhere_unchanged() -> None:
    cache = filled(6, 4)
    cache.copy_blocks(StepPlan(swap_out=[(1, 3), (5, 0)]))
    cache.clear(6)
    cache.copy_blocks(StepPlan(swap_in=[(3, 4), (0, 2)]))
    assert contents(cache) == [0, 0, 5, 0, 1, 0]


def test_a_plan_swaps_out_before_it_swaps_in() -> None:
    cache = filled(3, 2)
    cache.copy_blocks(StepPlan(swap_out=[(2, 0)]))
    cache.copy_blocks(StepPlan(swap_out=[(1, 1)], swap_in=[(0, 1)]))
    assert contents(cache) == [0, 2, 2]
    cache.copy_blocks(StepPlan(swap_in=[(1, 0)]))
    assert contents(cache) == [1, 2, 2]


def test_clearing_leaves_later_blocks() -> None:
    cache = filled(4, 0)
    cache.clear(2)
    assert contents(cache) == [0, 0, 2, 3]


@pytest.mark.parametrize(
    ("settings", "free_bytes", "device", "expected"),
    [
        ({"num_blocks": 7}, 0, "cpu", 7),
        ({"num_blocks": 7, "kv_memory_bytes": 1}, 0, "cpu", 7),
        ({"kv_memory_bytes": 10_500}, 0, "cpu", 10),
        ({}, 8 * GIB, "cpu", GIB // 1000),
        ({}, GIB, "cpu", GIB // 4 // 1000),
        ({}, 10 * GIB, "cuda", 9 * GIB // 1000),
        ({"max_batch_size": 2}, 8 * GIB, "cpu", 2 * 63),
    ],
)
def test_number_of_blocks(settings: dict[str, int], free_bytes: int, device: str, expected: int) -> None:
    max_model_len = 1000 if "max_batch_size" in settings else 1 << 30
    assert choose_num_blocks(EngineConfig(**settings), 1000, free_bytes, torch.device(device), max_model_len) == expected


def test_no_room_for_a_block_is_an_error_that_names_the_sizes() -> None:
    with pytest.raises(ModelUnavailable, match=r"999 bytes .* 1000 bytes"):
        choose_num_blocks(EngineConfig(kv_memory_bytes=999), 1000, GIB, CPU, 100)


@pytest.mark.parametrize(("limit", "left"), [("max", sys.maxsize), ("5000", 5000 - 3000 + 700), ("2000", 0)])
def test_a_containers_limit_counts(limit: str, left: int, tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text("3000\n")
    (tmp_path / "memory.stat").write_text("anon 2000\ninactive_file 700\n")
    assert kv_cache._left_in_container_bytes(tmp_path) == left


def test_without_control_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert kv_cache._left_in_container_bytes(tmp_path) == sys.maxsize


def test_free_memory_is_less_than_there_is() -> None:
    assert 0 < free_memory_bytes(CPU) < 1 << 50
