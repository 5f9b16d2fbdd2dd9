"""Attention through FlashInfer's paged kernels, if installed and asked for (``attention="flashinfer"``).

Written for FlashInfer 0.7's interface (`BatchPrefillWithPagedKVCacheWrapper`, layout HND, which is our cache's), and never run on a
GPU yet: the probe at load compares its numbers with the model's own before anything is served. FlashInfer plans each step on the
host, so its steps wait for the device and are not captured as graphs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from worker.engine.attention.layers import AttentionLayer
from worker.engine.attention.metadata import StepMetadata

_WORKSPACE_BYTES = 256 << 20
_HEAD_DIMS = frozenset({64, 128, 256})


class Pages(NamedTuple):
    """A step's block tables as FlashInfer takes them, int32.

    Attributes:
        starts: ``[B+1]``, where each sequence's pages begin in ``ids``.
        ids: all sequences' pages, one after the other.
        last_lens: ``[B]``, keys in each sequence's last page.
    """

    starts: Tensor
    ids: Tensor
    last_lens: Tensor


class _Kind(NamedTuple):
    """What a plan is made for; layers of one kind share it."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    scale: float
    window: int | None
    softcap: float | None


def supports(layers: Sequence[AttentionLayer], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether FlashInfer is installed and has kernels for every layer."""
    fits = all(layer.head_dim == layer.value_dim and layer.head_dim in _HEAD_DIMS and not layer.has_sinks for layer in layers)
    installed = importlib.util.find_spec("flashinfer") is not None
    return installed and fits and device.type == "cuda" and dtype in {torch.float16, torch.bfloat16}


class FlashInferAttention:
    """A backend whose instances are called as `interface.AttentionBackend`; ask `supports` first."""

    def __init__(self, device: torch.device) -> None:
        self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrappers: dict[_Kind, Any] = {}
        self._planned: dict[_Kind, StepMetadata] = {}

    def __call__(
        self,
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
        from worker.engine.attention.triton_backend import write_kv  # triton comes with torch for CUDA

        assert sinks is None, "ask supports() first"
        write_kv(key.contiguous(), value.contiguous(), k_cache, v_cache, meta.slot_mapping)
        kind = _Kind(query.shape[1], k_cache.shape[1], query.shape[2], query.dtype, scale, window, softcap)
        out: Tensor = self._wrapper(kind, meta).run(query.contiguous(), (k_cache, v_cache))
        return out

    def _wrapper(self, kind: _Kind, meta: StepMetadata) -> Any:
        """The wrapper of a kind of layers, planned for this step."""
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        if kind not in self._wrappers:
            self._wrappers[kind] = BatchPrefillWithPagedKVCacheWrapper(self._workspace, kv_layout="HND")
        wrapper = self._wrappers[kind]
        if self._planned.get(kind) is not meta:
            wrapper.plan(
                meta.query_start_loc,
                *step_pages(meta),
                kind.num_heads,
                kind.num_kv_heads,
                kind.head_dim,
                meta.block_size,
                causal=True,
                sm_scale=kind.scale,
                window_left=-1 if kind.window is None else kind.window - 1,
                logits_soft_cap=kind.softcap,
                q_data_type=kind.dtype,
                kv_data_type=kind.dtype,
            )
            self._planned[kind] = meta
        return wrapper


def step_pages(meta: StepMetadata) -> Pages:
    """The pages of a step, made once for all layers."""
    pages = meta.scratch.get(step_pages)
    if pages is None:
        counts = (meta.seq_lens + meta.block_size - 1) // meta.block_size
        starts = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
        held = torch.arange(meta.block_tables.shape[1], device=counts.device) < counts[:, None]
        last_lens = meta.seq_lens - (counts - 1) * meta.block_size
        pages = meta.scratch[step_pages] = Pages(starts, meta.block_tables[held], last_lens)
    assert isinstance(pages, Pages)
    return pages
