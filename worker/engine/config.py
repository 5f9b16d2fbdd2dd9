"""Settings of one engine, validated when made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args, get_origin, get_type_hints

from worker.engine.arithmetic import ceil_div

Policy = Literal["continuous", "static"]
Attention = Literal["auto", "torch", "flashinfer"]
Quantization = Literal["none", "int8"]
KVDtype = Literal["auto", "int8"]

CPU_BATCH_TOKENS = 512
CUDA_BATCH_TOKENS = 2048
CUDA_GRAPH_BYTES = 512 << 20  # left for a model's graphs: their pool, results, nodes in the driver, cuBLAS workspace; an estimate
GPU_KV_SHARE = 0.9  # default share for the KV cache of the memory that weights, a step and graphs leave on a GPU
SCALE_BYTES = 4  # per row of int8 numbers; in the KV cache a row is a token's key or value in one head
PROBE_TOKENS = 32  # the fewest tokens that a model computes in one call at load


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine.

    Attributes:
        model: ``demo`` (the embedded SmolLM2-135M-Instruct), a folder, a hub id, or a ``.gguf`` file.
        device: ``auto`` takes CUDA where present.
        dtype: ``auto`` takes bfloat16 if the model runs fast in it, else float32.
        quantization: ``int8`` stores the weights of linear layers in int8, one scale per output channel; they compute in ``dtype``.
            No effect on a model that is given to the engine in memory.
        kv_dtype: ``auto`` keeps keys and values in ``dtype``; ``int8`` keeps them in int8, one scale per token and head.
        max_batch_size: most requests in one step.
        max_batch_tokens: most tokens computed in one step, decodes and prefill chunks together; 0 leaves it to the device (`for_device`).
        max_model_len: context limit in tokens; None takes the model's.
        block_size: tokens in one KV block.
        kv_memory_bytes: memory for the KV cache; ignored if ``num_blocks`` is given; None lets the device decide.
        num_blocks: blocks of the KV cache.
        cpu_swap_blocks: blocks of CPU memory to which preempted requests may be swapped (0: recompute only).
        enable_prefix_caching: keep and share the blocks of full, equal prefixes.
        policy: ``continuous``, or ``static`` (fill a batch, run it to its end).
        realtime_reserved: share of slots, blocks and tokens per step that the batch tier must leave while realtime
            requests wait or run, 0..1.
        realtime_step_ms: longest step, in ms, that batch work may cause while realtime requests wait or run. If their decodes alone
            take longer, batch work may lengthen such a step by a quarter. Without realtime requests the bound is several times looser.
            0: no bound.
        batch_floor: share of slots and tokens per step that the batch tier always keeps, 0..1; one of its requests then also
            keeps its blocks. 0 lets realtime starve it. In a step that ``realtime_step_ms`` bounds, the share is of that bound.
        batch_overcommit: how many times the existing blocks the batch tier may be promised (1: no more than there are).
        source_weights: share of service of a ``source`` relative to the others of its tier; 1 where not named.
        max_wait_ms: with ``static``, how long a batch waits to fill.
        attention: ``auto`` takes our fastest kernels for the device; ``torch``, the reference; ``flashinfer``, if installed.
        cuda_graphs: on CUDA, replay decode steps as captured graphs.
        run_ahead: launch a step before the tokens of the previous one are read; None: on CUDA.
        seed: mixed into the noise of requests without a seed of their own.
        trust_remote_code: allow a hub model's own code to run.
    """

    model: str = "demo"
    device: str = "auto"
    dtype: str = "auto"
    quantization: Quantization = "none"
    kv_dtype: KVDtype = "auto"
    max_batch_size: int = 100
    max_batch_tokens: int = 0
    max_model_len: int | None = None
    block_size: int = 16
    kv_memory_bytes: int | None = None
    num_blocks: int | None = None
    cpu_swap_blocks: int = 0
    enable_prefix_caching: bool = True
    policy: Policy = "continuous"
    realtime_reserved: float = 0.5
    realtime_step_ms: float = 25.0
    batch_floor: float = 0.1
    batch_overcommit: float = 1.5
    source_weights: Mapping[str, float] = field(default_factory=dict)
    max_wait_ms: float = 50.0
    attention: Attention = "auto"
    cuda_graphs: bool = True
    run_ahead: bool | None = None
    seed: int = 0
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}")
        for name, low in (("max_batch_size", 1), ("max_batch_tokens", 0), ("block_size", 1), ("cpu_swap_blocks", 0)):
            if getattr(self, name) < low:
                raise ValueError(f"{name} must be at least {low}")
        for name in ("realtime_reserved", "batch_floor"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must be between 0 and 1")
        if not 1.0 <= self.batch_overcommit < math.inf:
            raise ValueError("batch_overcommit must be at least 1 and finite")
        for name in ("max_wait_ms", "realtime_step_ms"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be at least 0 and finite")
        if not all(0.0 < weight < math.inf for weight in self.source_weights.values()):
            raise ValueError("source_weights must be greater than 0 and finite")
        if 0 < self.max_batch_tokens < self.max_batch_size:
            raise ValueError("max_batch_tokens must be at least max_batch_size, or a full batch could not decode in one step")

    def for_device(self, kind: str) -> EngineConfig:
        """These settings with the device's defaults filled in; ``kind`` is torch's name for the kind of device."""
        if self.max_batch_tokens:
            return self
        tokens = CUDA_BATCH_TOKENS if kind == "cuda" else CPU_BATCH_TOKENS
        return replace(self, max_batch_tokens=max(tokens, self.max_batch_size))


_CHOICES = {name: get_args(kind) for name, kind in get_type_hints(EngineConfig).items() if get_origin(kind) is Literal}


def most_blocks(max_batch_size: int, max_model_len: int, block_size: int) -> int:
    """KV blocks of a full batch of requests of full context: more would be useless."""
    return max_batch_size * ceil_div(max_model_len, block_size)
