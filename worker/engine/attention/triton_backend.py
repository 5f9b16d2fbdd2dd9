"""The attention backend for CUDA devices, on Triton kernels (see `triton_kernels`).

All launch shapes follow from the model and the batch size; nothing is tuned while serving, nothing is read back from the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from triton.runtime import driver

from worker.engine.arithmetic import ceil_div
from worker.engine.attention.metadata import StepMetadata
from worker.engine.attention.triton_cache_write import write_kv_kernel
from worker.engine.attention.triton_kernels import MIN_SPLIT, Shape, paged_attention_kernel, reduce_splits_kernel

_MOST_SHARED_BYTES = 96 * 1024  # of shared memory per program, although a card may have more: since Ampere all have at least 99 KB
_OTHER_SHARED_BYTES = 3 * 1024  # of a card's shared memory, left for what the compiler adds
_MIN_DECODE_SPLITS = 8
_MAX_DECODE_SPLITS = 64
_MAX_PREFILL_SPLITS = 16
_JOINED_SPLITS = 16


@dataclass(frozen=True, slots=True)
class Tiles:
    """How one program of the attention kernel works.

    Attributes:
        decode_rows, prefill_rows: height of a tile: queries times the heads of a group.
        keys: keys of one tile.
        warps, stages: warps of a program and depth of its load pipeline.
    """

    decode_rows: int
    prefill_rows: int
    keys: int
    warps: int
    stages: int


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: StepMetadata,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """See `interface.AttentionBackend`. The caches have the query's dtype, and each of their blocks is contiguous."""
    query, key, value = (_dense_rows(tensor) for tensor in (query, key, value))
    write_kv(key, value, k_cache, v_cache, meta.slot_mapping)
    return paged_attention(query, k_cache, v_cache, meta, scale=scale, window=window, softcap=softcap, sinks=sinks)


def write_kv(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Store K ``[T, Hkv, D]`` and V ``[T, Hkv, Dv]`` at their tokens' slots, in one launch; a negative slot is skipped."""
    num_kv_heads, block_size, head_dim = k_cache.shape[1:]
    dims, value_dims = next_power(head_dim), next_power(v_cache.shape[3])
    heads = min(next_power(num_kv_heads), max(1, 4096 // max(dims, value_dims)))
    write_kv_kernel[(key.shape[0], ceil_div(num_kv_heads, heads))](
        *(key, value, k_cache, v_cache, slot_mapping),
        *(*key.stride()[:2], *value.stride()[:2], k_cache.stride(0), v_cache.stride(0)),
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        VALUE_DIM=v_cache.shape[3],
        BLOCK_SIZE=block_size,
        HEADS=heads,
        DIMS=dims,
        VALUE_DIMS=value_dims,
    )


def paged_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: StepMetadata,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend to keys that are in the cache already; arguments and result as in `interface.AttentionBackend`."""
    shape, tiles = _compiled_for(query, k_cache, v_cache, window is not None, softcap is not None, sinks is not None)
    launch = _plan_launch(query.shape[0], meta, shape, window, _num_multiprocessors(query.device))
    num_heads, value_dim = query.shape[1], shape.value_dim
    out = query.new_empty(query.shape[0], num_heads, value_dim)
    partial_out = query.new_empty(launch.partial_rows, num_heads, value_dim, dtype=torch.float32)
    partial_lse = query.new_empty(launch.partial_rows, num_heads, dtype=torch.float32)
    lengths = meta.query_start_loc, meta.seq_lens
    splits = launch.decode_splits, launch.prefill_splits
    scoring = float(scale), float(softcap or 0.0), window or 0
    num_items = launch.num_prefill_items + meta.num_decodes * launch.decode_splits
    paged_attention_kernel[(num_items, shape.num_kv_heads)](
        *(query, k_cache, v_cache, out, partial_out, partial_lse, sinks, *lengths, meta.block_tables, *scoring),
        *(launch.num_seqs, meta.num_decodes, launch.num_prefill_items, *splits),
        *(meta.block_tables.stride(0), *query.stride()[:2], k_cache.stride(0), v_cache.stride(0)),
        SHAPE=shape,
        HAS_PREFILL=launch.num_seqs > meta.num_decodes,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    if launch.reduced_tokens:
        reduce_splits_kernel[(launch.reduced_tokens, num_heads)](
            *(partial_out, partial_lse, out, *lengths, window or 0, launch.num_seqs, meta.num_decodes, *splits),
            SHAPE=shape,
            SPLITS=_JOINED_SPLITS,
            HAS_PREFILL=launch.prefill_splits > 1,
        )
    return out


def _compiled_for(query: Tensor, k_cache: Tensor, v_cache: Tensor, window: bool, softcap: bool, sinks: bool) -> tuple[Shape, Tiles]:
    num_kv_heads, block_size, head_dim = k_cache.shape[1:]
    heads = num_kv_heads, query.shape[1] // num_kv_heads, head_dim, v_cache.shape[3]
    return _shape_and_tiles(*heads, block_size, query.element_size(), _shared_bytes(query.device), window, softcap, sinks)


@cache
def _shape_and_tiles(
    num_kv_heads: int,
    group: int,
    head_dim: int,
    value_dim: int,
    block_size: int,
    itemsize: int,
    shared_bytes: int,
    window: bool,
    softcap: bool,
    sinks: bool,
) -> tuple[Shape, Tiles]:
    tiles = choose_tiles(group, head_dim, value_dim, itemsize, shared_bytes)
    rows = tiles.decode_rows, tiles.prefill_rows, tiles.keys
    return Shape(
        num_kv_heads, group, head_dim, value_dim, block_size, *rows, _width(head_dim), _width(value_dim), window, softcap, sinks
    ), tiles


def choose_tiles(group: int, head_dim: int, value_dim: int, itemsize: int, shared_bytes: int = _MOST_SHARED_BYTES) -> Tiles:
    """Tiles of a model's attention: as many keys as fit into a stage of the load pipeline, and rows for whole groups of heads.

    Args:
        group: query heads of one KV head.
        itemsize: bytes of an element of the cache.
        shared_bytes: of shared memory that a program may take; at most a third of it is for one stage and one tile of queries.
    """
    widths = _width(head_dim), _width(value_dim)
    key_bytes = sum(widths) * itemsize
    exact = itemsize == 4  # float32 products run in registers, without matrix units: small tiles, or they spill
    stage_bytes = shared_bytes // 3
    keys = max(16, min(16 if exact else 64, _prev_power(stage_bytes // key_bytes)))
    decode_rows = max(16, next_power(group))
    prefill_rows = max(16 if exact else 64 if 64 * max(widths) * itemsize <= stage_bytes else 32, decode_rows)
    pipeline_bytes = shared_bytes - prefill_rows * widths[0] * itemsize
    stages = max(1, min(3, pipeline_bytes // (keys * key_bytes)))
    return Tiles(decode_rows, prefill_rows, keys, 8 if prefill_rows * widths[1] > 64 * 128 else 4, stages)


@dataclass(frozen=True, slots=True)
class _Launch:
    """The size of one step's launches.

    Attributes:
        num_prefill_items: tiles of chunks, times their splits.
        reduced_tokens: this many tokens, the first ones, may have been split.
        partial_rows: one row per token and split.
    """

    num_seqs: int
    num_prefill_items: int
    decode_splits: int
    prefill_splits: int
    reduced_tokens: int
    partial_rows: int


def _plan_launch(num_tokens: int, meta: StepMetadata, shape: Shape, window: int | None, multiprocessors: int) -> _Launch:
    num_seqs, num_decodes = meta.seq_lens.shape[0], meta.num_decodes
    block_q = shape.prefill_rows // shape.group
    # one tile for every block_q tokens, and one partial tile per sequence: a bound that needs no lengths
    num_tiles = (num_tokens - num_decodes) // block_q + num_seqs - num_decodes
    span = meta.max_seq_len if window is None else min(meta.max_seq_len, window + block_q + shape.keys)
    decode_splits = decode_split_count(num_decodes, shape.num_kv_heads, span, multiprocessors)
    prefill_splits = prefill_split_count(num_tiles, shape.num_kv_heads, span, multiprocessors)
    reduced = num_tokens if prefill_splits > 1 else num_decodes if decode_splits > 1 else 0
    partial_rows = num_decodes * decode_splits + (num_tokens - num_decodes) * prefill_splits if reduced else 0
    return _Launch(num_seqs, num_tiles * prefill_splits, decode_splits, prefill_splits, reduced, partial_rows)


def decode_split_count(num_decodes: int, num_kv_heads: int, max_keys: int, multiprocessors: int) -> int:
    """Programs over which a decode's keys may be split: enough to fill the device four times, from a coarse grid of counts.

    The count depends only on the batch size rounded up to a power of two, and shorter sequences use fewer. A sequence is therefore
    split in the same way with and without a captured graph, which pads the batch.
    """
    longest = next_power(ceil_div(max_keys, MIN_SPLIT.value))
    programs = next_power(max(1, num_decodes)) * num_kv_heads
    filling = next_power(ceil_div(4 * multiprocessors, programs))
    return min(longest, max(_MIN_DECODE_SPLITS, min(filling, _MAX_DECODE_SPLITS)))


def prefill_split_count(num_tiles: int, num_kv_heads: int, max_keys: int, multiprocessors: int) -> int:
    """Programs over which a chunk tile's keys may be split: more than one only if the tiles alone leave the device half empty."""
    if num_tiles == 0:
        return 1
    longest = next_power(ceil_div(max_keys, 4 * MIN_SPLIT.value))
    filling = _prev_power(max(1, 2 * multiprocessors // (num_tiles * num_kv_heads)))
    return min(longest, filling, _MAX_PREFILL_SPLITS)


@cache
def _num_multiprocessors(device: torch.device) -> int:
    """A CUDA device's number; Triton's interpreter, on the CPU, counts as a small device."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


@cache
def _shared_bytes(device: torch.device) -> int:
    """Shared memory that a program may take: Turing has 64 KB in all."""
    if device.type != "cuda":
        return _MOST_SHARED_BYTES
    most: int = driver.active.utils.get_device_properties(device.index)["max_shared_mem"]  # the limit that Triton uses
    return min(_MOST_SHARED_BYTES, most - _OTHER_SHARED_BYTES)


def _dense_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _width(dim: int) -> int:
    """Columns of a tile; the matrix units need at least 16."""
    return max(16, next_power(dim))


def next_power(number: int) -> int:
    """The least power of two that is not smaller."""
    return 1 << (number - 1).bit_length()


def _prev_power(number: int) -> int:
    return 1 << (number.bit_length() - 1)
