"""The kernels' functions and structures as ctypes sees them. Field order mirrors the headers'."""

from __future__ import annotations

import ctypes
import functools
from typing import ClassVar

import torch
from torch import Tensor

from worker.engine.native.build import load_library

_POINTER, _INT32, _INT64, _FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float

DTYPE_CODES = {torch.bfloat16: 0, torch.float32: 1}
PHASES = ("embed", "norm", "qkv", "place", "attention", "o", "gate_up", "down", "logits")  # of a step, in the order of `enum phase`
GROUP = 16  # tokens in a group of the packed cache; block sizes are multiples of it


def pointer(tensor: Tensor | None) -> int | None:
    """The address of its first element; keeps nothing alive."""
    return None if tensor is None else tensor.data_ptr()


class LayerStruct(ctypes.Structure):
    """``struct attn_layer``: one layer's cache and the shape of its attention."""

    _fields_: ClassVar = [
        ("k_cache", _POINTER),
        ("v_cache", _POINTER),
        ("sinks", _POINTER),
        ("dtype", _INT32),
        ("num_heads", _INT32),
        ("num_kv_heads", _INT32),
        ("head_dim", _INT32),
        ("v_dim", _INT32),
        ("block_size", _INT32),
        ("window", _INT32),
        ("scale", _FLOAT),
        ("softcap", _FLOAT),
        ("int8_cache", _INT32),
    ]

    @classmethod
    def of(
        cls,
        cache: tuple[Tensor, Tensor],
        dtype: torch.dtype,
        *,
        num_heads: int,
        head_dim: int,
        value_dim: int,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None = None,
    ) -> LayerStruct:
        """Attention of ``dtype`` over a layer's (K, V); points into cache and sinks, which must outlive it."""
        k_cache, v_cache = cache
        _, num_kv_heads, block_size, _ = k_cache.shape
        return cls(
            k_cache=k_cache.data_ptr(),
            v_cache=v_cache.data_ptr(),
            sinks=pointer(sinks),
            dtype=DTYPE_CODES[dtype],
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            v_dim=value_dim,
            block_size=block_size,
            window=window or 0,
            scale=scale,
            softcap=softcap or 0.0,
            int8_cache=k_cache.dtype == torch.int8,
        )


class BatchStruct(ctypes.Structure):
    """``struct attn_batch``: the ragged batch of one step. Keeps no tensor alive."""

    _fields_: ClassVar = [
        ("query_start", _POINTER),
        ("seq_lens", _POINTER),
        ("block_tables", _POINTER),
        ("slots", _POINTER),
        ("table_stride", _INT64),
        ("num_seqs", _INT32),
        ("num_tokens", _INT32),
    ]


class MatrixStruct(ctypes.Structure):
    """``struct matrix``: packed weights."""

    _fields_: ClassVar = [("tiles", _POINTER), ("bias", _POINTER), ("scale", _POINTER), ("n", _INT32), ("k", _INT32)]


class DecoderLayerStruct(ctypes.Structure):
    """``struct decoder_layer``."""

    _fields_: ClassVar = [
        ("attn", LayerStruct),
        ("qkv", MatrixStruct),
        ("o", MatrixStruct),
        ("gate_up", MatrixStruct),
        ("down", MatrixStruct),
        ("attn_norm", _POINTER),
        ("mlp_norm", _POINTER),
        ("attn_out_norm", _POINTER),
        ("mlp_out_norm", _POINTER),
        ("q_norm", _POINTER),
        ("k_norm", _POINTER),
        ("rope", _POINTER),
    ]


class DecoderStruct(ctypes.Structure):
    """``struct decoder``."""

    _fields_: ClassVar = [
        ("layers", ctypes.POINTER(DecoderLayerStruct)),
        ("embedding", _POINTER),
        ("final_norm", _POINTER),
        ("head", MatrixStruct),
        ("num_layers", _INT32),
        ("widest", _INT32),
        ("hidden", _INT32),
        ("intermediate", _INT32),
        ("vocab", _INT32),
        ("rotary_dim", _INT32),
        ("activation", _INT32),
        ("norm_eps", _FLOAT),
        ("embedding_factor", _FLOAT),
        ("residual_factor", _FLOAT),
        ("logits_factor", _FLOAT),
        ("logits_softcap", _FLOAT),
    ]


class StepStruct(ctypes.Structure):
    """``struct step``."""

    _fields_: ClassVar = [
        ("batch", BatchStruct),
        ("token_ids", _POINTER),
        ("positions", _POINTER),
        ("logits_rows", _POINTER),
        ("hidden", _POINTER),
        ("logits", _POINTER),
        ("likeliest", _POINTER),
        ("phase_seconds", _POINTER),
        ("num_logits", _INT32),
    ]


class LikelyTokensStruct(ctypes.Structure):
    """``struct likely_tokens``."""

    _fields_: ClassVar = [
        ("logits", _POINTER),
        ("top", _POINTER),
        ("temperature", _POINTER),
        ("floor", _POINTER),
        ("count", _POINTER),
        ("tail", _POINTER),
        ("begin", _POINTER),
        ("tokens", _POINTER),
        ("values", _POINTER),
        ("weights", _POINTER),
        ("num_rows", _INT32),
        ("vocab", _INT32),
    ]


@functools.cache
def kernels() -> ctypes.CDLL | None:
    """The library with its functions typed, or None if it is not available."""
    lib = load_library()
    return None if lib is None else typed(lib)


def typed(lib: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the arguments of the library's functions."""
    layer, batch = ctypes.POINTER(LayerStruct), ctypes.POINTER(BatchStruct)
    lib.headrace_isa.restype = ctypes.c_char_p
    lib.headrace_workspace_bytes.argtypes = [layer, _INT32, _INT32, _INT32]
    lib.headrace_workspace_bytes.restype = _INT64
    lib.headrace_attend.argtypes = [layer, batch, *(_POINTER, _INT64) * 4, _INT32, _POINTER]
    lib.headrace_attend.restype = None
    decoder = ctypes.POINTER(DecoderStruct)
    lib.headrace_decoder_workspace_bytes.argtypes = [decoder, _INT32, _INT32, _INT32, _INT32]
    lib.headrace_decoder_workspace_bytes.restype = _INT64
    lib.headrace_decoder_step.argtypes = [decoder, ctypes.POINTER(StepStruct), _INT32, _POINTER]
    lib.headrace_decoder_step.restype = None
    for function in (lib.headrace_measure_likely_tokens, lib.headrace_list_likely_tokens):
        function.argtypes = [ctypes.POINTER(LikelyTokensStruct), _INT32]
        function.restype = None
    return lib
