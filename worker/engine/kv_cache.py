"""The paged KV cache: one pair of tensors per attention layer, and the CPU memory to which blocks are swapped."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from producer.errors import ModelUnavailable
from worker.engine.attention.layers import AttentionLayer
from worker.engine.config import GPU_KV_SHARE, SCALE_BYTES, EngineConfig, most_blocks
from worker.engine.native import memory
from worker.engine.step import StepPlan

_CPU_DEFAULT_BYTES = 1 << 30
_CPU_SHARE = 0.25  # of the free memory


class KVCache:
    """K and V of every layer: ``[num_blocks, num_kv_heads, block_size, head_dim]``, zeros at first.

    In int8 a token's row is `SCALE_BYTES` longer: its scale is in the block, so copying blocks copies scales.
    Blocks are counted over all layers together: block 7 of a request is block 7 in every layer.

    Args:
        layers: in the order of the model's modules; their sizes may differ.
    """

    def __init__(
        self,
        layers: Sequence[AttentionLayer],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        num_cpu_blocks: int = 0,
    ) -> None:
        self.num_blocks = num_blocks
        self.num_cpu_blocks = num_cpu_blocks
        self.layers: list[tuple[Tensor, Tensor]] = _allocate(layers, num_blocks, block_size, dtype, device)
        self._cpu_layers: list[tuple[Tensor, Tensor]] = []
        if num_cpu_blocks:
            pinned = device.type == "cuda"
            self._cpu_layers = _allocate(layers, num_cpu_blocks, block_size, dtype, torch.device("cpu"), pinned=pinned)

    def copy_blocks(self, plan: StepPlan) -> None:
        """Copy what a plan swaps out, then what it swaps in. Must be called once per plan, before its step.

        On CUDA nothing waits: the copies are queued in order with the steps, on the steps' stream. A block on either side may be
        reused at once, because whatever writes it next is queued behind the copy that reads it; the host touches neither.
        """
        if plan.swap_out:
            _copy(self.layers, self._cpu_layers, plan.swap_out)
        if plan.swap_in:
            _copy(self._cpu_layers, self.layers, plan.swap_in)

    def clear(self, num_blocks: int) -> None:
        """Zero the first ``num_blocks`` blocks."""
        for k_cache, v_cache in self.layers:
            k_cache[:num_blocks].zero_()
            v_cache[:num_blocks].zero_()


def block_bytes(layers: Sequence[AttentionLayer], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers."""
    elements = sum(layer.num_kv_heads * (_width(layer.head_dim, dtype) + _width(layer.value_dim, dtype)) for layer in layers)
    return elements * block_size * dtype.itemsize


def _width(dim: int, dtype: torch.dtype) -> int:
    """Elements of a token's row in the cache."""
    return dim + SCALE_BYTES if dtype == torch.int8 else dim


def choose_num_blocks(config: EngineConfig, bytes_per_block: int, free_bytes: int, device: torch.device, max_model_len: int) -> int:
    """How many blocks the configuration, or else the device's memory, allows.

    With neither ``num_blocks`` nor ``kv_memory_bytes``: on a CPU 1 GiB, or a quarter of the free memory if that is less; on a
    GPU nine tenths of the free memory. Never more than ``max_batch_size`` requests of full context can use.

    Args:
        free_bytes: the most of the device's memory that the cache may take.

    Raises:
        ModelUnavailable: not even one block fits.
    """
    if config.num_blocks is not None:
        return config.num_blocks
    budget = config.kv_memory_bytes
    if budget is None:
        budget = int(free_bytes * GPU_KV_SHARE) if device.type == "cuda" else min(_CPU_DEFAULT_BYTES, int(free_bytes * _CPU_SHARE))
    most = most_blocks(config.max_batch_size, max_model_len, config.block_size)
    num_blocks = min(budget // bytes_per_block, most)
    if num_blocks < 1:
        raise ModelUnavailable(f"{budget} bytes hold not one KV block of {bytes_per_block} bytes: give more kv_memory_bytes")
    return num_blocks


def free_memory_bytes(device: torch.device) -> int:
    """The device's unused memory; on a CPU what the kernel can make available, within the container's limit."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(_available_bytes(), _left_in_container_bytes())


def peak_memory_bytes(device: torch.device, work: Callable[[], object]) -> int:
    """Most memory that a piece of work takes from a CUDA device's driver, including fragments; none of it is kept."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    work()
    peak = torch.cuda.max_memory_reserved(device) - before
    torch.cuda.empty_cache()
    return peak


def _available_bytes() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def _left_in_container_bytes(folder: Path = Path("/sys/fs/cgroup")) -> int:
    """What a limit of control groups (version 2) leaves; page cache that can be dropped does not count as used."""
    try:
        limit, current = ((folder / name).read_text().strip() for name in ("memory.max", "memory.current"))
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:  # no such limit here
        return sys.maxsize
    return sys.maxsize if limit == "max" else max(0, int(limit) - int(current) + int(statistics["inactive_file"]))


def _allocate(
    layers: Sequence[AttentionLayer], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device, *, pinned: bool = False
) -> list[tuple[Tensor, Tensor]]:
    def zeros(layer: AttentionLayer, dim: int) -> Tensor:
        shape = (num_blocks, layer.num_kv_heads, block_size, _width(dim, dtype))
        if device.type == "cpu" and not pinned:
            return memory.zeros(shape, dtype)
        return torch.zeros(shape, dtype=dtype, device=device, pin_memory=pinned)

    return [(zeros(layer, layer.head_dim), zeros(layer, layer.value_dim)) for layer in layers]


def _copy(sources: Sequence[tuple[Tensor, Tensor]], targets: Sequence[tuple[Tensor, Tensor]], pairs: Sequence[tuple[int, int]]) -> None:
    """Copy (source block, target block) pairs in every layer, neighbours together. On CUDA the copies go to the current stream."""
    runs = list(_runs(pairs))
    for source_pair, target_pair in zip(sources, targets, strict=True):
        for source, target in zip(source_pair, target_pair, strict=True):
            for first_source, first_target, count in runs:
                target[first_target : first_target + count].copy_(source[first_source : first_source + count], non_blocking=True)


def _runs(pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """The longest runs in which both blocks count up: (first source, first target, blocks)."""
    start = 0
    for i in range(1, len(pairs) + 1):
        if i == len(pairs) or pairs[i] != (pairs[i - 1][0] + 1, pairs[i - 1][1] + 1):
            yield (*pairs[start], i - start)
            start = i
