"""Chooses what computes a model's steps: the fastest kernels that serve it; those that fail give way to the next."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import structlog
import torch
from torch import Tensor

from producer.errors import ModelUnavailable
from worker.engine.attention import cpu_backend, flashinfer_backend, torch_backend
from worker.engine.attention.interface import AttentionBackend
from worker.engine.attention.layers import AttentionLayer
from worker.engine.attention.metadata import StepMetadata
from worker.engine.config import EngineConfig
from worker.engine.fused.decoder import FusedDecoder, fuse
from worker.engine.model_loader import LoadedModel, computes_bfloat16

log = structlog.get_logger("headrace.engine")


class Kernels(NamedTuple):
    """What computes the steps.

    Attributes:
        attention: the name of the backend: ``cpu``, ``triton``, ``flashinfer`` or ``torch``.
        fused: a fused decoder computes the layers, not the model's own modules.
        cuda_graphs: decode steps are replayed as captured graphs.
    """

    attention: str
    fused: bool
    cuda_graphs: bool


class Decoder(Protocol):
    """A fused decoder over a paged cache; `bind` must come before the first step."""

    def __call__(self, input_ids: Tensor, positions: Tensor, meta: StepMetadata, logits_rows: Tensor) -> tuple[Tensor, Tensor]:
        """``[T]``, ``[T]``, metadata, rows whose logits are wanted; to logits ``[rows, vocab]`` and hidden states ``[T, hidden]``."""
        ...

    def bind(self, caches: Sequence[tuple[Tensor, Tensor]]) -> None:
        """From now on compute over these caches, (K, V) of each layer in order."""
        ...


class KernelChoice:
    """The attention backend and the fused decoder of one model.

    Attributes:
        backend: attention for the model's own modules.
        decoder: computes the steps; None if the model's own modules do.

    Raises:
        ModelUnavailable: see `choose_backend`.
    """

    def __init__(self, loaded: LoadedModel, layers: Sequence[AttentionLayer], config: EngineConfig) -> None:
        self._loaded = loaded
        self._config = config
        self.backend = choose_backend(loaded, layers, config)
        self.decoder = self._fuse(layers)

    @property
    def attention(self) -> str:
        """The backend's name, from that of its module, ``<name>_backend``."""
        return self.backend.__module__.rpartition(".")[2].removesuffix("_backend")

    @property
    def native_decoder(self) -> FusedDecoder | None:
        """The decoder if it is the one for the CPU, which can do more than the one for CUDA."""
        return self.decoder if isinstance(self.decoder, FusedDecoder) else None

    def runs_triton(self) -> bool:
        """Whether attention runs on our kernels for CUDA."""
        return not isinstance(self.backend, cpu_backend.CpuAttention) and self.backend is _triton_attention()

    def give_way(self, error: Exception) -> bool:
        """Give up the fastest part of what has failed; False if there is nothing left to give up.

        Raises:
            ModelUnavailable: what has failed was explicitly asked for.
        """
        reason = {"error": type(error).__name__, "reason": str(error)[:500]}
        if self.decoder is not None:
            log.error("the fused decoder fails: the model's own modules serve", **reason)
            self.decoder = None
        elif self._loaded.device.type == "cuda" and self.backend is not torch_backend.attend:
            if self._config.attention != "auto":
                raise ModelUnavailable(f"attention: {self._config.attention} fails: {reason['error']}: {reason['reason']}") from error
            log.error("the attention kernels fail: the reference serves", **reason)
            self.backend = torch_backend.attend
        else:
            return False
        return True

    def warn_of_slow_dtype(self) -> None:
        """Warn if the dtype was chosen for a fused decoder that does not serve."""
        loaded = self._loaded
        is_slow = loaded.dtype == torch.bfloat16 and not computes_bfloat16(loaded.device)
        if self.decoder is None and self._config.dtype == "auto" and is_slow:
            log.warning("the model's own modules compute in bfloat16, which this device has no instructions for: float32 is faster")

    def _fuse(self, layers: Sequence[AttentionLayer]) -> Decoder | None:
        """The fused decoder of the device and the backend, if the model is one that it computes."""
        arguments = self._loaded.model, self._loaded.config, layers, self._loaded.max_model_len
        if isinstance(self.backend, cpu_backend.CpuAttention):
            return fuse(*arguments)
        if self.runs_triton():
            from worker.engine.fused import cuda_decoder  # needs Triton

            return cuda_decoder.fuse(*arguments)
        return None


def choose_backend(loaded: LoadedModel, layers: Sequence[AttentionLayer], config: EngineConfig) -> AttentionBackend:
    """The attention backend that was asked for; by default our fastest that serves every layer.

    Raises:
        ModelUnavailable: it is not installed, or does not serve the model or the cache's dtype.
    """
    device, wanted = loaded.device, config.attention
    if wanted == "torch":
        return torch_backend.attend
    if config.kv_dtype == "int8" and (wanted == "flashinfer" or device.type == "cuda"):
        raise ModelUnavailable("kv_dtype int8: of the kernels for this device only attention torch reads such a cache")
    if wanted == "flashinfer":
        if not flashinfer_backend.supports(layers, loaded.dtype, device):
            raise ModelUnavailable("attention: flashinfer is not installed, or has no kernels for this model and device")
        return flashinfer_backend.FlashInferAttention(device)
    if device.type == "cpu" and _cpu_kernels_serve(layers, loaded.dtype, config.block_size):
        return cpu_backend.CpuAttention()
    triton_attention = _triton_attention() if device.type == "cuda" else None
    return triton_attention or torch_backend.attend


def _triton_attention() -> AttentionBackend | None:
    """Our kernels for CUDA; None without Triton, which comes with torch for CUDA, but not with every torch."""
    if importlib.util.find_spec("triton") is None:
        return None
    from worker.engine.attention import triton_backend

    return triton_backend.attend


def _cpu_kernels_serve(layers: Sequence[AttentionLayer], dtype: torch.dtype, block_size: int) -> bool:
    return all(cpu_backend.supports(dtype, layer.num_heads, layer.num_kv_heads, layer.head_dim, block_size) for layer in layers)
