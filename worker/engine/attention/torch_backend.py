"""The reference attention backend: plain torch operations, any device, any shape.

Pages are gathered through the block tables and attended to under a mask: all decodes at once, every chunk by itself.
Slots that no query sees are replaced by zeros before use, so that a NaN there cannot leak (0 * NaN is NaN, so masking
only the scores would not suffice).
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from worker.engine.attention.metadata import StepMetadata
from worker.engine.quantization import with_scale, without_scale

_GATHERED_ELEMENTS = 1 << 25  # of K that one batch of decodes may gather at once


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
    """Arguments and result as in `interface.AttentionBackend`."""
    write_kv(key, value, k_cache, v_cache, meta)
    out = query.new_empty(query.shape[0], query.shape[1], value.shape[2])
    for rows, tokens in _groups(meta, k_cache):
        grouped = query[tokens].unflatten(0, (rows.stop - rows.start, -1)).transpose(1, 2)
        tables, unused, visible = _visibility(meta, rows, grouped.shape[2], window)
        keys, values = (_gather(cache, tables, unused, query.dtype) for cache in (k_cache, v_cache))
        attended = _attention(grouped, keys, values, visible, scale, softcap, sinks)
        out[tokens] = attended.transpose(1, 2).flatten(0, 1)
    return out


def write_kv(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, meta: StepMetadata) -> None:
    """Store K and V of each token at its slot; a negative slot is skipped."""
    where = meta.scratch.get("slots")
    if where is None:
        tokens = (meta.slot_mapping >= 0).nonzero()[:, 0]
        slots = meta.slot_mapping[tokens]
        where = meta.scratch["slots"] = tokens, slots // meta.block_size, slots % meta.block_size
    tokens, blocks, offsets = where
    for cache, rows in ((k_cache, key[tokens]), (v_cache, value[tokens])):
        cache[blocks, :, offsets] = with_scale(rows) if cache.dtype == torch.int8 else rows


def _groups(meta: StepMetadata, k_cache: Tensor) -> list[tuple[slice, slice]]:
    """Sequences that are attended to together, as (rows of the batch, their tokens): decodes in batches, chunks one by one."""
    groups: list[tuple[slice, slice]] | None = meta.scratch.get("groups")
    if groups is None:
        starts = meta.query_start_loc.tolist()
        row_elements = max(1, meta.max_seq_len * k_cache.shape[1] * k_cache.shape[3])
        most = max(1, _GATHERED_ELEMENTS // row_elements)
        bounds = [*range(0, meta.num_decodes, most), *range(meta.num_decodes, len(starts))]
        groups = [(slice(a, b), slice(starts[a], starts[b])) for a, b in pairwise(bounds) if starts[a] < starts[b]]
        meta.scratch["groups"] = groups
    return groups


def _visibility(meta: StepMetadata, rows: slice, query_len: int, window: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """What sequences of ``query_len`` queries each can see; the same in every layer with that window.

    Returns:
        ``[b, n]``, the blocks that hold it; ``[b, 1, S, 1]``, which of their slots no query sees; ``[b, 1, q, S]``, which each query sees.
    """
    known: tuple[Tensor, Tensor, Tensor] | None = meta.scratch.get((rows.start, window))
    if known is not None:
        return known
    block_size, lengths = meta.block_size, meta.seq_lens[rows].long()
    first = torch.zeros_like(lengths) if window is None else (lengths - query_len - window + 1).clamp_(min=0) // block_size
    last = (lengths + block_size - 1) // block_size
    columns = first[:, None] + torch.arange(max(1, int((last - first).max())), device=lengths.device)
    held = columns < last[:, None]
    tables = meta.block_tables[rows].long().gather(1, columns.where(held, 0)).where(held, 0)
    positions = (columns[:, :, None] * block_size + torch.arange(block_size, device=lengths.device)).flatten(1)[:, None, :]
    queries = (lengths[:, None] - query_len + torch.arange(query_len, device=lengths.device))[:, :, None]
    visible = positions <= queries
    if window is not None:
        visible &= positions > queries - window
    found = tables, ~visible.any(1)[:, None, :, None], visible[:, None]
    meta.scratch[rows.start, window] = found
    return found


def _gather(cache: Tensor, tables: Tensor, unused: Tensor, dtype: torch.dtype) -> Tensor:
    """``[b, Hkv, S, D]``: the slots of these blocks in order, zeros in the unused ones."""
    slots = cache[tables].transpose(1, 2).flatten(2, 3)
    return (without_scale(slots, dtype) if cache.dtype == torch.int8 else slots).masked_fill(unused, 0)


def _attention(
    query: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """``[b, Hq, q, D]`` over ``[b, Hkv, S, D]`` to ``[b, Hq, q, Dv]``."""
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=visible, scale=scale, enable_gqa=True)
    heads = query.unflatten(1, (keys.shape[1], -1)).float()
    scores = heads @ keys.float().unsqueeze(2).transpose(3, 4) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible.unsqueeze(2), -torch.inf)
    if sinks is not None:
        sink = sinks.float().view(1, *heads.shape[1:3], 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], -1)
    weights = scores.softmax(-1)[..., : keys.shape[2]]
    out: Tensor = (weights @ values.float().unsqueeze(2)).flatten(1, 2).to(query.dtype)
    return out
