"""A recognised decoder on the CPU: one native call computes a step from token ids to logits."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import structlog
import torch
from torch import Tensor

from worker.engine.attention.cpu_backend import batch_struct
from worker.engine.attention.layers import AttentionLayer
from worker.engine.attention.metadata import StepMetadata
from worker.engine.fused.packing import PackedMatrix, pack_interleaved, pack_stacked
from worker.engine.fused.structure import ACTIVATIONS, DecoderStructure, LayerStructure, NotRecognised, recognise
from worker.engine.native import memory
from worker.engine.native.library import (
    PHASES,
    DecoderLayerStruct,
    DecoderStruct,
    LayerStruct,
    StepStruct,
    kernels,
    pointer,
)
from worker.engine.quantization import store_weight, stored_weight

log = structlog.get_logger("headrace.engine")


def fuse(model: Any, config: Any, attention: Sequence[AttentionLayer], max_positions: int) -> FusedDecoder | None:
    """The fused decoder of a transformers model, or None if its structure is not one that is computed natively (logged).

    Arguments as of `structure.recognise`.
    """
    try:
        structure = recognise(model, config, attention, max_positions)
    except NotRecognised as reason:
        log.info("no fused decoder, the model's own modules serve", reason=str(reason))
        return None
    return FusedDecoder(structure)


@dataclass(frozen=True, slots=True, eq=False)
class _PackedLayer:
    qkv: PackedMatrix
    o: PackedMatrix
    gate_up: PackedMatrix
    down: PackedMatrix


class FusedDecoder:
    """Computes steps over a paged cache, once it is bound to one. For one thread at a time: it owns its buffers."""

    def __init__(self, structure: DecoderStructure) -> None:
        lib = kernels()
        assert lib is not None, "the attention backend was chosen without kernels"
        self._lib = lib
        self._structure = structure
        self._packed = [_pack_layer(layer) for layer in structure.layers]
        self._head = pack_stacked([structure.head])
        self._workspace = torch.empty(0, dtype=torch.uint8)
        self._logits = torch.empty(0, structure.head.out_features, dtype=torch.float32)
        self._phase_seconds = torch.zeros(len(PHASES), dtype=torch.float64)

    def __call__(self, input_ids: Tensor, positions: Tensor, meta: StepMetadata, logits_rows: Tensor) -> tuple[Tensor, Tensor]:
        """Compute a step.

        Args:
            input_ids: int64 ``[T]``, contiguous; positions alike.
            logits_rows: int64 ``[rows]``, the tokens whose logits are wanted.

        Returns:
            Logits, float32 ``[rows, vocab]``, in a buffer that the next step overwrites; and the hidden states of all
            rows after the final norm, bfloat16 ``[T, hidden]``.
        """
        num_logits = logits_rows.shape[0]
        if num_logits > self._logits.shape[0]:
            self._logits = self._logits.new_empty(num_logits, self._logits.shape[1])
        hidden = self._run(input_ids, positions, meta, logits_rows, logits=self._logits)
        return self._logits[:num_logits], hidden

    def likeliest(self, input_ids: Tensor, positions: Tensor, meta: StepMetadata, rows: Tensor) -> tuple[list[int], Tensor]:
        """As a call, but only the token with the largest logit of each row: -1 if that is not finite or the row has a NaN."""
        tokens = torch.empty(rows.shape[0], dtype=torch.int64)
        hidden = self._run(input_ids, positions, meta, rows, likeliest=tokens)
        return tokens.tolist(), hidden

    def _run(
        self,
        input_ids: Tensor,
        positions: Tensor,
        meta: StepMetadata,
        rows: Tensor,
        logits: Tensor | None = None,
        likeliest: Tensor | None = None,
    ) -> Tensor:
        hidden = torch.empty(input_ids.shape[0], self._structure.embedding.shape[1], dtype=torch.bfloat16)
        step = StepStruct(
            batch=batch_struct(meta, input_ids.shape[0]),
            token_ids=input_ids.data_ptr(),
            positions=positions.data_ptr(),
            logits_rows=rows.data_ptr(),
            hidden=hidden.data_ptr(),
            logits=pointer(logits),
            likeliest=pointer(likeliest),
            phase_seconds=self._phase_seconds.data_ptr(),
            num_logits=rows.shape[0],
        )
        threads = torch.get_num_threads()
        workspace = self._workspace_for(step, threads)
        self._lib.headrace_decoder_step(ctypes.byref(self._decoder), ctypes.byref(step), threads, workspace)
        return hidden

    def bind(self, caches: Sequence[tuple[Tensor, Tensor]]) -> None:
        """From now on compute over these caches, (K, V) of each layer in order; the previous ones are released."""
        self._caches = list(caches)
        layers = map(_layer_struct, self._structure.layers, self._packed, self._caches)
        self._layers = (DecoderLayerStruct * len(self._packed))(*layers)
        self._decoder = _decoder_struct(self._structure, self._layers, self._head)

    def phase_seconds(self) -> dict[str, float]:
        """Where the time of all steps went, as measured by the first thread, including its waiting for the others."""
        return dict(zip(PHASES, self._phase_seconds.tolist(), strict=True))

    def release(self) -> None:
        """Free the modules' own copies of the packed weights; the modules cannot compute afterwards."""
        modules = [m for layer in self._structure.layers for m in (*layer.qkv, layer.o, layer.gate, layer.up, layer.down)]
        if stored_weight(self._structure.head)[0].data_ptr() != self._structure.embedding.data_ptr():
            modules.append(self._structure.head)
        for module in modules:
            store_weight(module, stored_weight(module)[0].new_empty(0))

    def _workspace_for(self, step: StepStruct, threads: int) -> int:
        size = self._lib.headrace_decoder_workspace_bytes(
            ctypes.byref(self._decoder), step.batch.num_seqs, step.batch.num_tokens, step.num_logits, threads
        )
        if size > self._workspace.numel():
            self._workspace = memory.zeros((size,), torch.uint8)
        return self._workspace.data_ptr()


def _pack_layer(layer: LayerStructure) -> _PackedLayer:
    return _PackedLayer(
        qkv=pack_stacked(list(layer.qkv)),
        o=pack_stacked([layer.o]),
        gate_up=pack_interleaved(layer.gate, layer.up),
        down=pack_stacked([layer.down]),
    )


def _layer_struct(layer: LayerStructure, packed: _PackedLayer, cache: tuple[Tensor, Tensor]) -> DecoderLayerStruct:
    attention = layer.attention
    return DecoderLayerStruct(
        attn=LayerStruct.of(
            cache,
            torch.bfloat16,
            num_heads=attention.num_heads,
            head_dim=attention.head_dim,
            value_dim=attention.value_dim,
            scale=attention.scale,
            window=attention.window,
            softcap=attention.softcap,
        ),
        qkv=packed.qkv.struct(),
        o=packed.o.struct(),
        gate_up=packed.gate_up.struct(),
        down=packed.down.struct(),
        attn_norm=pointer(layer.attn_norm),
        mlp_norm=pointer(layer.mlp_norm),
        attn_out_norm=pointer(layer.attn_out_norm),
        mlp_out_norm=pointer(layer.mlp_out_norm),
        q_norm=pointer(layer.q_norm),
        k_norm=pointer(layer.k_norm),
        rope=pointer(layer.rope),
    )


def _decoder_struct(structure: DecoderStructure, layers: ctypes.Array[DecoderLayerStruct], head: PackedMatrix) -> DecoderStruct:
    windows = [layer.attention.window or 1 << 30 for layer in structure.layers]
    return DecoderStruct(
        layers=layers,
        embedding=structure.embedding.data_ptr(),
        final_norm=structure.final_norm.data_ptr(),
        head=head.struct(),
        num_layers=len(windows),
        widest=windows.index(max(windows)),
        hidden=structure.embedding.shape[1],
        intermediate=structure.layers[0].gate.out_features,
        vocab=structure.head.out_features,
        rotary_dim=structure.rotary_dim,
        activation=ACTIVATIONS[structure.activation],
        norm_eps=structure.norm_eps,
        embedding_factor=structure.embedding_factor,
        residual_factor=structure.residual_factor,
        logits_factor=structure.logits_factor,
        logits_softcap=structure.logits_softcap or 0.0,
    )
