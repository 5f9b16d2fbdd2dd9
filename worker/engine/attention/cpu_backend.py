"""Attention on the CPU in C, straight through block tables: one call per layer writes the cache and attends.

The cache keeps its shape ``[num_blocks, num_kv_heads, block_size, head_dim]``. Inside a (block, head) the
elements are in the order that the kernels need (``native/attention.h``, ``native/int8_cache.h``), so only this backend may read it,
but any code may copy whole blocks.
"""

from __future__ import annotations

import ctypes

import torch

from worker.engine.attention.metadata import StepMetadata
from worker.engine.native import memory
from worker.engine.native.library import DTYPE_CODES, GROUP, BatchStruct, LayerStruct, kernels


def supports(dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> bool:
    """Whether the kernels exist on this machine and serve a layer of that shape."""
    fits = dtype in DTYPE_CODES and num_heads % num_kv_heads == 0 and block_size % GROUP == 0
    return fits and (dtype == torch.float32 or head_dim % 2 == 0) and kernels() is not None


class CpuAttention:
    """A backend whose instances are called as ``attend``. For one thread at a time: it owns its workspace."""

    def __init__(self, lib: ctypes.CDLL | None = None) -> None:
        lib = lib or kernels()
        assert lib is not None, "ask supports() first"
        self._lib = lib
        self._workspace = torch.empty(0, dtype=torch.uint8)
        self._meta: StepMetadata | None = None
        self._batch = BatchStruct()

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        meta: StepMetadata,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write this step's keys and values, then attend: ``[T, Hq, D]`` in, ``[T, Hq, Dv]`` out."""
        query, key, value = (_dense_heads(x) for x in (query, key, value))
        out = query.new_empty(query.shape[0], query.shape[1], value.shape[2])
        sinks = None if sinks is None else sinks.detach().to(torch.float32).contiguous()
        _check_caches(k_cache, v_cache, query.dtype)
        layer = LayerStruct.of(
            (k_cache, v_cache),
            query.dtype,
            num_heads=query.shape[1],
            head_dim=query.shape[2],
            value_dim=value.shape[2],
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )
        batch = self._batch_of(meta, query.shape[0])
        threads = torch.get_num_threads()
        workspace = self._workspace_for(layer, batch, threads)
        rows = [argument for x in (query, key, value, out) for argument in (x.data_ptr(), x.stride(0))]
        self._lib.headrace_attend(ctypes.byref(layer), ctypes.byref(batch), *rows, threads, workspace)
        return out

    def _batch_of(self, meta: StepMetadata, num_tokens: int) -> BatchStruct:
        if meta is not self._meta:
            self._batch = batch_struct(meta, num_tokens)
            self._meta = meta  # keeps alive the tensors that the structure points into
        return self._batch

    def _workspace_for(self, layer: LayerStruct, batch: BatchStruct, threads: int) -> int:
        size = self._lib.headrace_workspace_bytes(ctypes.byref(layer), batch.num_seqs, batch.num_tokens, threads)
        if size > self._workspace.numel():
            self._workspace = memory.zeros((size,), torch.uint8)
        return self._workspace.data_ptr()


def batch_struct(meta: StepMetadata, num_tokens: int) -> BatchStruct:
    """Pointers into a step's metadata, which must outlive it."""
    tables = meta.block_tables
    assert meta.query_start_loc.dtype == meta.seq_lens.dtype == tables.dtype == torch.int32
    assert meta.slot_mapping.dtype == torch.int64
    assert tables.stride(1) == 1 or tables.shape[1] == 1
    return BatchStruct(
        query_start=meta.query_start_loc.data_ptr(),
        seq_lens=meta.seq_lens.data_ptr(),
        block_tables=tables.data_ptr(),
        slots=meta.slot_mapping.data_ptr(),
        table_stride=tables.stride(0),
        num_seqs=meta.seq_lens.shape[0],
        num_tokens=num_tokens,
    )


def _check_caches(k_cache: torch.Tensor, v_cache: torch.Tensor, dtype: torch.dtype) -> None:
    assert k_cache.is_contiguous()
    assert v_cache.is_contiguous()
    assert k_cache.dtype == v_cache.dtype
    assert k_cache.dtype in (dtype, torch.int8)


def _dense_heads(x: torch.Tensor) -> torch.Tensor:
    """Heads and dims of a token must be contiguous; tokens may be any distance apart."""
    dense = x.stride(2) == 1 and x.stride(1) == x.shape[2]
    return x if dense else x.contiguous()
