"""The Triton kernel that writes a step's keys and values into the paged cache.

Tensors: key ``[T, Hkv, D]``, value ``[T, Hkv, Dv]``, caches ``[num_blocks, Hkv, block_size, D or Dv]``, each block contiguous.
Offsets of blocks and tokens are 64-bit: a cache may have more than 2**31 elements.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, misc"
# Triton compiles this function from its source; its arguments are device values that Python's types cannot describe.
# ruff: noqa: N803, PLR0913, PLR0917 - constexpr names are upper case by Triton's convention, and a launch's state is its arguments

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=("key_token_stride", "key_head_stride", "value_token_stride", "value_head_stride"))
def write_kv_kernel(
    key,
    value,
    k_cache,
    v_cache,
    slot_mapping,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    k_block_stride,
    v_block_stride,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    DIMS: tl.constexpr,
    VALUE_DIMS: tl.constexpr,
):
    """Copy ``HEADS`` heads of one token's K and V to its slot. A negative slot is skipped. Grid: (tokens, heads / HEADS)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot >= 0:
        block = slot // BLOCK_SIZE
        offset = slot % BLOCK_SIZE
        head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
        d = tl.arange(0, DIMS)[None, :]
        mask = (head < NUM_KV_HEADS) & (d < HEAD_DIM)
        rows = tl.load(key + token * key_token_stride + head * key_head_stride + d, mask=mask)
        tl.store(k_cache + block * k_block_stride + (head * BLOCK_SIZE + offset) * HEAD_DIM + d, rows, mask=mask)
        d = tl.arange(0, VALUE_DIMS)[None, :]
        mask = (head < NUM_KV_HEADS) & (d < VALUE_DIM)
        rows = tl.load(value + token * value_token_stride + head * value_head_stride + d, mask=mask)
        tl.store(v_cache + block * v_block_stride + (head * BLOCK_SIZE + offset) * VALUE_DIM + d, rows, mask=mask)
