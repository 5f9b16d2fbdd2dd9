"""A recognised decoder on a CUDA device: four matrix products per layer, and one kernel between each two.

The modules of transformers launch some forty kernels per layer, most of which move a few kilobytes. Even replayed as a graph they
take longer than reading the weights. Here a layer has about ten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import structlog
import torch
from torch import Tensor
from torch.nn.functional import linear

from worker.engine.arithmetic import ceil_div
from worker.engine.attention.layers import AttentionLayer
from worker.engine.attention.metadata import StepMetadata
from worker.engine.attention.triton_backend import next_power, paged_attention
from worker.engine.fused.structure import DecoderStructure, LayerStructure, NotRecognised, recognise
from worker.engine.fused.triton_kernels import add_norm_kernel, gated_activation_kernel, rotate_and_write_kernel
from worker.engine.quantization import Linear, linear_int8, stacked, store_weight

_ACTIVATION_COLUMNS = 1024
_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


log = structlog.get_logger("headrace.engine")


def fuse(model: Any, config: Any, attention: Sequence[AttentionLayer], max_positions: int) -> CudaDecoder | None:
    """The fused decoder of a transformers model, or None if its structure is not one that is computed here (logged).

    Arguments as of `structure.recognise`.
    """
    try:
        structure = recognise(model, config, attention, max_positions, _DTYPES, multiple=1)
    except NotRecognised as reason:
        log.info("no fused decoder, the model's own modules serve", reason=str(reason))
        return None
    return CudaDecoder(structure)


@dataclass(frozen=True, slots=True, eq=False)
class _Weights:
    """A linear layer, or several merged into one; an int8 weight has a ``scale``."""

    weight: Tensor
    bias: Tensor | None
    scale: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.scale is None:
            return linear(x, self.weight, self.bias)
        return linear_int8(x, self.weight, self.scale, self.bias)


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    structure: LayerStructure
    qkv: _Weights
    o: _Weights
    gate_up: _Weights
    down: _Weights
    qk_norms: Tensor | None


class CudaDecoder:
    """Computes steps over a paged cache, once it is bound to one; nothing in it waits for the device, so its steps may be captured.

    The linear layers that it merges become views of the merged ones: the model's modules continue to work, on the same memory.
    """

    def __init__(self, structure: DecoderStructure) -> None:
        self._structure = structure
        self._layers = [_merge_layer(layer) for layer in structure.layers]
        self._head = _merge([structure.head])

    def bind(self, caches: Sequence[tuple[Tensor, Tensor]]) -> None:
        """From now on compute over these caches, as `attention.triton_backend` takes them: (K, V) of each layer in order.

        The previous ones are released.
        """
        self._caches = list(caches)

    def __call__(self, input_ids: Tensor, positions: Tensor, meta: StepMetadata, logits_rows: Tensor) -> tuple[Tensor, Tensor]:
        """Compute a step.

        Args:
            input_ids: int64 ``[T]``; positions alike.
            logits_rows: int64 ``[rows]``, the tokens whose logits are wanted.

        Returns:
            Logits ``[rows, vocab]``, and the hidden states of all rows after the final norm, ``[T, hidden]``.
        """
        structure = self._structure
        stream = structure.embedding[input_ids]
        if structure.embedding_factor != 1.0:
            stream *= structure.embedding_factor
        delta, delta_norm = None, None
        for layer, cache in zip(self._layers, self._caches, strict=True):
            normed = self._add_norm(stream, delta, delta_norm, layer.structure.attn_norm)
            delta = layer.o(self._attend(layer, cache, normed, positions, meta))
            normed = self._add_norm(stream, delta, layer.structure.attn_out_norm, layer.structure.mlp_norm)
            delta, delta_norm = layer.down(self._activate(layer.gate_up(normed))), layer.structure.mlp_out_norm
        hidden = self._add_norm(stream, delta, delta_norm, structure.final_norm)
        return self._logits(hidden[logits_rows]), hidden

    def _add_norm(self, stream: Tensor, delta: Tensor | None, delta_norm: Tensor | None, norm: Tensor) -> Tensor:
        """Add ``delta`` (normed if there is a ``delta_norm``) to ``stream``, in place; returns the normed stream."""
        normed = torch.empty_like(stream)
        width = stream.shape[1]
        add_norm_kernel[(stream.shape[0],)](
            *(stream, delta, delta_norm, norm, normed, self._structure.residual_factor, self._structure.norm_eps),
            WIDTH=width,
            COLUMNS=next_power(width),
            HAS_DELTA=delta is not None,
            HAS_DELTA_NORM=delta_norm is not None,
            num_warps=min(16, max(1, next_power(width) // 512)),
        )
        return normed

    def _attend(self, layer: _Layer, cache: tuple[Tensor, Tensor], normed: Tensor, positions: Tensor, meta: StepMetadata) -> Tensor:
        attention, rope = layer.structure.attention, layer.structure.rope
        k_cache, v_cache = cache
        qkv = layer.qkv(normed)
        query = qkv.new_empty(qkv.shape[0], attention.num_heads, attention.head_dim)
        rotate_and_write_kernel[(qkv.shape[0], attention.num_heads + 2 * attention.num_kv_heads)](
            *(qkv, query, k_cache, v_cache, meta.slot_mapping, positions, rope, layer.qk_norms, self._structure.norm_eps),
            *(k_cache.stride(0), v_cache.stride(0)),
            NUM_HEADS=attention.num_heads,
            NUM_KV_HEADS=attention.num_kv_heads,
            HEAD_DIM=attention.head_dim,
            HALF=0 if rope is None else rope.shape[1] // 2,
            BLOCK_SIZE=k_cache.shape[2],
            DIMS=next_power(attention.head_dim),
            HAS_NORMS=layer.qk_norms is not None,
            num_warps=1,
        )
        attended = paged_attention(query, k_cache, v_cache, meta, scale=attention.scale, window=attention.window, softcap=attention.softcap)
        return attended.flatten(1)

    def _activate(self, gate_up: Tensor) -> Tensor:
        width = gate_up.shape[1] // 2
        out = gate_up.new_empty(gate_up.shape[0], width)
        columns = min(next_power(width), _ACTIVATION_COLUMNS)
        is_gelu = self._structure.activation != "silu"
        gated_activation_kernel[(gate_up.shape[0], ceil_div(width, columns))](gate_up, out, WIDTH=width, COLUMNS=columns, IS_GELU=is_gelu)
        return out

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = self._head(hidden)
        if self._structure.logits_factor != 1.0:
            logits *= self._structure.logits_factor
        cap = self._structure.logits_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap


def _merge_layer(layer: LayerStructure) -> _Layer:
    norms = None
    if layer.q_norm is not None and layer.k_norm is not None:
        norms = torch.stack([layer.q_norm, layer.k_norm])
    qkv, gate_up = _merge(layer.qkv), _merge((layer.gate, layer.up))
    if qkv.weight.is_cuda:
        torch.cuda.empty_cache()  # frees the parts, so that at most one layer's weights exist twice
    return _Layer(
        structure=layer,
        qkv=qkv,
        o=_merge([layer.o]),
        gate_up=gate_up,
        down=_merge([layer.down]),
        qk_norms=norms,
    )


def _merge(modules: Sequence[Linear]) -> _Weights:
    """Merge several matrices into one; each module's weight becomes a view of its rows."""
    weight, bias, scale = stacked(modules)
    for module, rows in zip(modules, weight.split([module.out_features for module in modules]), strict=True):
        store_weight(module, rows)
    return _Weights(weight, bias, scale)
