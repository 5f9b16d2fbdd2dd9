"""Triton kernels: paged attention over mixed batches, reduction of split sequences.

The attention kernel is an online softmax over tiles of the paged KV cache (FlashAttention-2, Dao 2023; PagedAttention,
Kwon et al. 2023). Particular to this one:

- One launch serves prefill chunks and decodes: the first ``num_prefill_items`` programs take tiles of chunks, the others take
  decodes, each kind with its own tile height. A batch of decodes only runs a specialisation without the chunk half.
- The query heads of one KV head are rows of one tile (GQA packing), so K and V are read once per group.
- A long sequence is split over programs (Flash-Decoding, Dao et al. 2023). The split is computed from the lengths on the device; the
  grid depends only on the batch size, so a captured launch is valid for any lengths. Programs without work leave at once.
- Softmax is in base 2; sums and accumulators are float32 whatever the cache holds.

Offsets of blocks and tokens are 64-bit: a cache may have more than 2**31 elements. Every load outside a sequence's keys is
masked, so the contents of unused cache pages (including NaN) never reach a result.

Tensors: query ``[T, Hq, D]``, caches ``[num_blocks, Hkv, block_size, D or Dv]``, each block contiguous, out ``[T, Hq, Dv]``
contiguous, partial_out ``[rows, Hq, Dv]`` and partial_lse ``[rows, Hq]`` float32, with one row per token and split. Helpers take
related values as tuples: ``caches`` (k_cache, v_cache, k_block_stride, v_block_stride), ``batch`` (query_start_loc, seq_lens,
block_tables, table_stride), ``scoring`` (scale, softcap, window).
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, misc"
# Triton compiles these functions from their source; their arguments are device values that Python's types cannot describe.
# ruff: noqa: N803, N806, PLR0913, PLR0917, SIM102 - constexpr names are upper case by Triton's convention, a launch's state is its
# arguments, and a condition known at compile time must stand alone to cut code out

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

MIN_SPLIT = tl.constexpr(256)  # keys; a shorter split costs more in the reduction than it saves
LOG2_E = tl.constexpr(1.4426950408889634)

_VARYING = ("num_seqs", "num_decodes", "num_prefill_items", "decode_splits", "prefill_splits", "table_stride", "window")


class Shape(NamedTuple):
    """What a kernel is compiled for.

    Attributes:
        group: query heads of one KV head.
        decode_rows, prefill_rows: rows of a tile, each one query and one head of the group.
        keys: of one tile.
        dims, value_dims: ``head_dim`` and ``value_dim`` rounded up to powers of two.
        window, softcap, sinks: whether there are any.
    """

    num_kv_heads: int
    group: int
    head_dim: int
    value_dim: int
    block_size: int
    decode_rows: int
    prefill_rows: int
    keys: int
    dims: int
    value_dims: int
    window: bool
    softcap: bool
    sinks: bool


@triton.jit(do_not_specialize=(*_VARYING, "query_token_stride", "query_head_stride"))
def paged_attention_kernel(
    query,
    k_cache,
    v_cache,
    out,
    partial_out,
    partial_lse,
    sinks,
    query_start_loc,
    seq_lens,
    block_tables,
    scale,
    softcap,
    window,
    num_seqs,
    num_decodes,
    num_prefill_items,
    decode_splits,
    prefill_splits,
    table_stride,
    query_token_stride,
    query_head_stride,
    k_block_stride,
    v_block_stride,
    SHAPE: tl.constexpr,
    HAS_PREFILL: tl.constexpr,
):
    """Attention of a mixed batch. Grid: (num_prefill_items + num_decodes * decode_splits, KV heads)."""
    queries = (query, query_token_stride, query_head_stride)
    caches = (k_cache, v_cache, k_block_stride, v_block_stride)
    results = (out, partial_out, partial_lse)
    batch = (query_start_loc, seq_lens, block_tables, table_stride)
    scoring = (scale, softcap, window)
    item = tl.program_id(0)
    if HAS_PREFILL:
        if item < num_prefill_items:
            BLOCK_Q: tl.constexpr = SHAPE.prefill_rows // SHAPE.group
            last_first = num_prefill_items - 1 - item  # a chunk's last tiles see the most keys: they begin first
            number = last_first // prefill_splits
            seq = _find_sequence(query_start_loc, number, num_decodes, num_seqs, BLOCK_Q)
            first_token = tl.load(query_start_loc + seq) - tl.load(query_start_loc + num_decodes)
            tile = number - (first_token // BLOCK_Q + seq - num_decodes)
            base = num_decodes * decode_splits + first_token * prefill_splits
            place = (seq, tile, last_first % prefill_splits, prefill_splits, base)
            _attend_tile(queries, caches, results, sinks, batch, scoring, place, SHAPE, SHAPE.prefill_rows, True)
    if item >= num_prefill_items:
        item -= num_prefill_items
        seq = item // decode_splits
        place = (seq, 0, item % decode_splits, decode_splits, seq * decode_splits)
        _attend_tile(queries, caches, results, sinks, batch, scoring, place, SHAPE, SHAPE.decode_rows, False)


@triton.jit
def _attend_tile(queries, caches, results, sinks, batch, scoring, place, SHAPE: tl.constexpr, ROWS: tl.constexpr, IS_PREFILL: tl.constexpr):
    """One split of one tile: ``ROWS // group`` queries of one sequence, times the heads of KV head ``program_id(1)``.

    ``place``: (sequence, tile, split, number of splits, partial row of the sequence's first token in its first split).
    """
    query_start_loc, seq_lens, block_tables, table_stride = batch
    seq, tile, split, num_splits, partial_base = place
    BLOCK_Q: tl.constexpr = ROWS // SHAPE.group
    VALUE_DIMS: tl.constexpr = SHAPE.value_dims
    kv_head = tl.program_id(1)
    first_token = tl.load(query_start_loc + seq)
    query_len = tl.load(query_start_loc + seq + 1) - first_token
    first_query = tile * BLOCK_Q
    num_queries = tl.minimum(BLOCK_Q, query_len - first_query)
    first_position = tl.load(seq_lens + seq) - query_len + first_query
    low, high, split_size = _split_keys(first_position, num_queries, scoring[2], num_splits, SHAPE.keys, SHAPE.window)
    first_key = low // SHAPE.keys * SHAPE.keys + split * split_size

    if (num_queries > 0) & ((first_key < high) | (split == 0)):
        m = tl.arange(0, ROWS)
        row_query = m // SHAPE.group
        is_row = row_query < num_queries
        row_head = kv_head * SHAPE.group + m % SHAPE.group
        row_token = (first_token + first_query + row_query).to(tl.int64)
        q = _load_queries(queries, row_token, row_head, is_row, SHAPE)
        row_max, row_sum = _start_sums(sinks, row_head, is_row, split, SHAPE.sinks)
        acc = tl.zeros((ROWS, VALUE_DIMS), tl.float32)
        positions = first_position + tl.minimum(row_query, num_queries - 1)
        table = block_tables + seq.to(tl.int64) * table_stride
        last_key = tl.minimum(first_key + split_size, high)
        if IS_PREFILL and not SHAPE.window:  # tiles that all rows see completely need no masks
            whole = tl.minimum((first_position + 1) // SHAPE.keys * SHAPE.keys, last_key)
            for n in range(first_key, whole, SHAPE.keys):
                acc, row_max, row_sum = _add_keys(
                    acc, row_max, row_sum, q, positions, n, (low, high), table, kv_head, caches, scoring, SHAPE, False
                )
            first_key = tl.maximum(first_key, whole)
        for n in range(first_key, last_key, SHAPE.keys):
            acc, row_max, row_sum = _add_keys(
                acc, row_max, row_sum, q, positions, n, (low, high), table, kv_head, caches, scoring, SHAPE, True
            )
        is_whole = _num_used_splits(low, high, split_size, SHAPE.keys) <= 1
        partial_row = (partial_base + (first_query + row_query) * num_splits + split).to(tl.int64)
        _store_rows(results, acc, row_max, row_sum, row_token, partial_row, row_head, is_row, is_whole, SHAPE)


@triton.jit
def _load_queries(queries, row_token, row_head, is_row, SHAPE: tl.constexpr):
    query, token_stride, head_stride = queries
    d = tl.arange(0, SHAPE.dims)[None, :]
    rows = query + (row_token * token_stride + row_head * head_stride)[:, None]
    return tl.load(rows + d, mask=is_row[:, None] & (d < SHAPE.head_dim), other=0.0)


@triton.jit
def _start_sums(sinks, row_head, is_row, split, HAS_SINKS: tl.constexpr):
    """Maximum and sum of a softmax over nothing yet. A sink is a key without a value: it enters only the first split's softmax."""
    row_max = tl.full(row_head.shape, float("-inf"), tl.float32)
    row_sum = tl.zeros(row_head.shape, tl.float32)
    if HAS_SINKS:
        if split == 0:
            row_max = tl.load(sinks + row_head, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
            row_sum = tl.full(row_head.shape, 1.0, tl.float32)
    return row_max, row_sum


@triton.jit
def _add_keys(
    acc,
    row_max,
    row_sum,
    q,
    positions,
    first_key,
    limits,
    table,
    kv_head,
    caches,
    scoring,
    SHAPE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add ``SHAPE.keys`` keys to the running softmax. Without masks, every row must see all of them."""
    scale, softcap, window = scoring
    n = first_key + tl.arange(0, SHAPE.keys)
    k, v = _load_tile(n, limits, table, kv_head, caches, SHAPE, MASKED)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if SHAPE.softcap:  # softcap * tanh(scores * scale / softcap); the exponential overflows to the right limits
        scores = softcap * LOG2_E * (1.0 - 2.0 / (1.0 + tl.exp2(scores * (2.0 * LOG2_E * scale / softcap))))
    else:
        scores *= scale * LOG2_E
    if MASKED:
        seen = n[None, :] <= positions[:, None]
        if SHAPE.window:
            seen = seen & (n[None, :] > positions[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)  # of a row that has seen no key yet
    weights = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(row_max - shift)
    row_sum = row_sum * decay + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return acc, new_max, row_sum


@triton.jit
def _load_tile(n, limits, table, kv_head, caches, SHAPE: tl.constexpr, MASKED: tl.constexpr):
    """K and V of the keys ``n``; zeros outside of ``limits``."""
    k_cache, v_cache, k_block_stride, v_block_stride = caches
    low, high = limits
    d = tl.arange(0, SHAPE.dims)[None, :]
    dv = tl.arange(0, SHAPE.value_dims)[None, :]
    k_mask = d < SHAPE.head_dim
    v_mask = dv < SHAPE.value_dim
    if MASKED:
        is_key = (n >= low) & (n < high)
        block = tl.load(table + n // SHAPE.block_size, mask=is_key, other=0).to(tl.int64)
        k_mask = is_key[:, None] & k_mask
        v_mask = is_key[:, None] & v_mask
    else:
        block = tl.load(table + n // SHAPE.block_size).to(tl.int64)
    slot = kv_head * SHAPE.block_size + n % SHAPE.block_size
    k_rows = k_cache + (block * k_block_stride + slot * SHAPE.head_dim)[:, None]
    v_rows = v_cache + (block * v_block_stride + slot * SHAPE.value_dim)[:, None]
    return tl.load(k_rows + d, mask=k_mask, other=0.0), tl.load(v_rows + dv, mask=v_mask, other=0.0)


@triton.jit
def _store_rows(results, acc, row_max, row_sum, row_token, partial_row, row_head, is_row, is_whole, SHAPE: tl.constexpr):
    """Store a tile's result, or a split's partial result with the logarithm of the softmax's sum."""
    out, partial_out, partial_lse = results
    NUM_HEADS: tl.constexpr = SHAPE.num_kv_heads * SHAPE.group
    dv = tl.arange(0, SHAPE.value_dims)[None, :]
    mask = is_row[:, None] & (dv < SHAPE.value_dim)
    result = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    if is_whole:
        row = row_token * NUM_HEADS + row_head
        tl.store(out + row[:, None] * SHAPE.value_dim + dv, result.to(out.dtype.element_ty), mask=mask)
    else:
        row = partial_row * NUM_HEADS + row_head
        tl.store(partial_out + row[:, None] * SHAPE.value_dim + dv, result, mask=mask)
        tl.store(partial_lse + row, row_max + tl.log2(row_sum), mask=is_row)


@triton.jit
def _find_sequence(query_start_loc, target, num_decodes, num_seqs, BLOCK_Q: tl.constexpr):
    """The prefill sequence that owns tile number ``target``, by bisection; with ``BLOCK_Q`` 0, the one that owns the token.

    Tiles are numbered with room for one partial tile per sequence, so a number needs no prefix sum: sequence i begins at tile
    ``first_token_i // BLOCK_Q + i``, both counted from the first prefill sequence. Some numbers therefore have no tile.
    """
    base = tl.load(query_start_loc + num_decodes)
    found = num_decodes
    end = num_seqs
    while end - found > 1:
        middle = (found + end) // 2
        first = tl.load(query_start_loc + middle) - base
        if BLOCK_Q > 0:
            first = first // BLOCK_Q + middle - num_decodes
        if first <= target:
            found = middle
        else:
            end = middle
    return found


@triton.jit
def _split_keys(first_position, num_queries, window, num_splits, KEYS: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """The keys ``low .. high-1`` that any of a tile's queries sees, and the size of a split, in whole tiles.

    Splits begin at ``low`` rounded down to a tile of ``KEYS``.
    """
    low = first_position * 0
    if HAS_WINDOW:
        low = tl.maximum(first_position - window + 1, 0)
    high = first_position + num_queries
    span = high - low // KEYS * KEYS
    return low, high, tl.maximum(tl.cdiv(tl.cdiv(span, num_splits), KEYS) * KEYS, MIN_SPLIT)


@triton.jit
def _num_used_splits(low, high, split_size, KEYS: tl.constexpr):
    """Splits that have keys. With 0 or 1 there is nothing to reduce."""
    return tl.cdiv(high - low // KEYS * KEYS, split_size)


@triton.jit(do_not_specialize=_VARYING)
def reduce_splits_kernel(
    partial_out,
    partial_lse,
    out,
    query_start_loc,
    seq_lens,
    window,
    num_seqs,
    num_decodes,
    decode_splits,
    prefill_splits,
    SHAPE: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_PREFILL: tl.constexpr,
):
    """Join the splits of one query head of one token, ``SPLITS`` at a time, by their shares of the softmax. Grid: (tokens, heads)."""
    token = tl.program_id(0)
    num_splits = decode_splits
    partial_row = token * decode_splits
    seq = token
    BLOCK_Q: tl.constexpr = SHAPE.prefill_rows // SHAPE.group
    if HAS_PREFILL:
        if token >= num_decodes:
            seq = _find_sequence(query_start_loc, token - num_decodes, num_decodes, num_seqs, 0)
            num_splits = prefill_splits
            partial_row = num_decodes * decode_splits + (token - num_decodes) * prefill_splits
    first_token = tl.load(query_start_loc + seq)
    query_len = tl.load(query_start_loc + seq + 1) - first_token
    first_query = (token - first_token) // BLOCK_Q * BLOCK_Q  # of the token's tile, whose split it shares; 0 for a decode
    num_queries = tl.minimum(BLOCK_Q, query_len - first_query)
    first_position = tl.load(seq_lens + seq) - query_len + first_query
    low, high, split_size = _split_keys(first_position, num_queries, window, num_splits, SHAPE.keys, SHAPE.window)
    used = _num_used_splits(low, high, split_size, SHAPE.keys)

    if used > 1:
        head = tl.program_id(1)
        NUM_HEADS: tl.constexpr = SHAPE.num_kv_heads * SHAPE.group
        dv = tl.arange(0, SHAPE.value_dims)
        first_row = partial_row.to(tl.int64) * NUM_HEADS + head
        result = _join_splits(partial_out, partial_lse, first_row, used, dv, SHAPE.value_dim, NUM_HEADS, SPLITS)
        row = token.to(tl.int64) * NUM_HEADS + head
        tl.store(out + row * SHAPE.value_dim + dv, result.to(out.dtype.element_ty), mask=dv < SHAPE.value_dim)


@triton.jit
def _join_splits(partial_out, partial_lse, first_row, used, dv, VALUE_DIM: tl.constexpr, NUM_HEADS: tl.constexpr, SPLITS: tl.constexpr):
    lse_max = float("-inf")
    total = 0.0
    acc = tl.zeros(dv.shape, tl.float32)
    for first_split in range(0, used, SPLITS):
        split = first_split + tl.arange(0, SPLITS)
        rows = first_row + split * NUM_HEADS
        lse = tl.load(partial_lse + rows, mask=split < used, other=float("-inf"))
        mask = (split < used)[:, None] & (dv < VALUE_DIM)[None, :]
        parts = tl.load(partial_out + rows[:, None] * VALUE_DIM + dv[None, :], mask=mask, other=0.0)
        new_max = tl.maximum(lse_max, tl.max(lse, 0))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(lse - shift)
        decay = tl.exp2(lse_max - shift)
        acc = acc * decay + tl.sum(weights[:, None] * parts, 0)
        total = total * decay + tl.sum(weights, 0)
        lse_max = new_max
    return acc / tl.where(total == 0.0, 1.0, total)
