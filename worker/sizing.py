"""How many requests a device's memory holds (weights, KV cache, a step's needs), by formula and without the device.

The KV cache takes ``layers * kv_heads * (key dim + value dim) * bytes`` per token (Kwon et al., "Efficient Memory Management for
Large Language Model Serving with PagedAttention", 2023, section 3), in whole blocks. As in the engine, sliding-window layers
keep every token, and a GPU's cache gets nine tenths of what weights, a full step and graphs leave, but no more than a full batch can
use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from worker.engine.arithmetic import ceil_div
from worker.engine.config import CUDA_BATCH_TOKENS, CUDA_GRAPH_BYTES, GPU_KV_SHARE, SCALE_BYTES, most_blocks

GIB = 2**30
CUDA_CONTEXT_BYTES = GIB // 2  # driver, kernels, cuBLAS workspace
# Peak memory of sampling per logit, beside the logit itself: float32 copies, the sorted logits with their int64 indices, and the tokens'
# probability masses and running sums in int64. A test compares it with what `device_sampler` allocates.
SAMPLING_BYTES = 38
MIN_LENGTH = 256
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The dimensions of a model that determine its memory.

    Attributes:
        num_int8: parameters stored in int8. They include those of an output head tied to the embedding, which itself stays in the dtype.
        num_dequantized: most int8 parameters that a step dequantizes at once.
        key_dim, value_dim: of one KV head.
        intermediate_size: of the MLP; in a mixture of experts, the sum over the experts that one token visits.
        max_model_len: context limit in tokens.
    """

    num_parameters: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_model_len: int
    num_int8: int = 0
    num_dequantized: int = 0
    tied: bool = False

    @classmethod
    def of(cls, config: Any, num_parameters: int, num_int8: int = 0, num_dequantized: int = 0) -> ModelShape:
        """Read a transformers text config; its attribute map also covers GPT-2's and OPT's names."""
        num_heads = int(config.num_attention_heads)
        head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // num_heads)
        intermediate = getattr(config, "moe_intermediate_size", None) or getattr(config, "intermediate_size", None)
        intermediate = int(intermediate or getattr(config, "ffn_dim", None) or 4 * config.hidden_size)
        return cls(
            num_parameters=num_parameters,
            num_layers=int(config.num_hidden_layers),
            num_heads=num_heads,
            num_kv_heads=int(getattr(config, "num_key_value_heads", None) or num_heads),
            key_dim=head_dim,
            value_dim=int(getattr(config, "v_head_dim", None) or head_dim),
            hidden_size=int(config.hidden_size),
            intermediate_size=intermediate * int(getattr(config, "num_experts_per_tok", None) or 1),
            vocab_size=int(config.vocab_size),
            max_model_len=int(getattr(config, "max_position_embeddings", None) or 2048),
            num_int8=num_int8,
            num_dequantized=num_dequantized,
            tied=bool(getattr(config, "tie_word_embeddings", False)),
        )

    def weight_bytes(self, dtype_bytes: int) -> int:
        """Bytes of the weights, without the scales of int8 (one per output channel)."""
        doubled = self.vocab_size * self.hidden_size if self.tied and self.num_int8 else 0
        return (self.num_parameters - self.num_int8 + doubled) * dtype_bytes + self.num_int8

    def kv_bytes_per_token(self, dtype_bytes: int, *, int8: bool = False) -> int:
        """Bytes of K and V in all layers; with ``int8``, those of an int8 cache with its scales, whatever the dtype."""
        dims = self.key_dim + self.value_dim
        return self.num_layers * self.num_kv_heads * (dims + 2 * SCALE_BYTES if int8 else dims * dtype_bytes)

    def step_bytes(self, dtype_bytes: int, max_batch_size: int, max_batch_tokens: int) -> int:
        """Most memory of a full step beside weights and cache, in bytes.

        The sum of one layer's activations, the logits with what sampling needs (`SAMPLING_BYTES`), and the int8 weights dequantized
        at once: in float32 and, if it is another one, in the dtype.
        """
        projections = (self.num_heads + self.num_kv_heads) * self.key_dim + self.num_kv_heads * self.value_dim
        widths = 3 * self.hidden_size + projections + 3 * self.intermediate_size
        dequantized = self.num_dequantized * (4 + (dtype_bytes if dtype_bytes != 4 else 0))
        logits = max_batch_size * self.vocab_size
        return max_batch_tokens * widths * dtype_bytes + logits * (dtype_bytes + SAMPLING_BYTES) + dequantized


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """How a device's memory is used, in bytes.

    Attributes:
        step_bytes: the part of ``left_bytes`` that a full step needs.
        left_bytes: what the cache leaves, for steps and CUDA graphs.
        concurrency: request length (prompt + output, tokens) -> how many such requests run at once, at most ``max_batch_size``.
    """

    memory_bytes: int
    weight_bytes: int
    context_bytes: int
    kv_bytes: int
    step_bytes: int
    left_bytes: int
    kv_bytes_per_token: int
    block_bytes: int
    num_blocks: int
    num_tokens: int
    concurrency: Mapping[int, int]


def size(
    shape: ModelShape,
    memory_bytes: int,
    *,
    dtype_bytes: int = 2,
    int8_cache: bool = False,
    max_batch_size: int = 100,
    max_batch_tokens: int = CUDA_BATCH_TOKENS,
    block_size: int = 16,
) -> Sizing:
    """Divide ``memory_bytes`` of a GPU between weights, a step, CUDA graphs and the KV cache.

    Raises `ValueError` if no room is left for a block of KV cache.
    """
    weight_bytes = shape.weight_bytes(dtype_bytes)
    kv_bytes_per_token = shape.kv_bytes_per_token(dtype_bytes, int8=int8_cache)
    block_bytes = kv_bytes_per_token * block_size
    free = memory_bytes - CUDA_CONTEXT_BYTES - weight_bytes
    usable_blocks = most_blocks(max_batch_size, shape.max_model_len, block_size)
    step_bytes = shape.step_bytes(dtype_bytes, max_batch_size, max_batch_tokens)
    taken_bytes = step_bytes + CUDA_GRAPH_BYTES
    num_blocks = min(max(0, int((free - taken_bytes) * GPU_KV_SHARE)) // block_bytes, usable_blocks)
    if num_blocks < 1:
        needed = memory_bytes - free + taken_bytes + block_bytes / GPU_KV_SHARE
        raise ValueError(f"{memory_bytes / GIB:.1f} GiB are too little: it takes {needed / GIB:.1f} GiB or more to run this model")
    return Sizing(
        memory_bytes=memory_bytes,
        weight_bytes=weight_bytes,
        context_bytes=CUDA_CONTEXT_BYTES,
        kv_bytes=num_blocks * block_bytes,
        step_bytes=step_bytes,
        left_bytes=free - num_blocks * block_bytes,
        kv_bytes_per_token=kv_bytes_per_token,
        block_bytes=block_bytes,
        num_blocks=num_blocks,
        num_tokens=num_blocks * block_size,
        concurrency={n: min(max_batch_size, num_blocks // ceil_div(n, block_size)) for n in _lengths(shape.max_model_len)},
    )


def _lengths(max_model_len: int) -> list[int]:
    """Powers of two from `MIN_LENGTH` on, and the context limit."""
    lengths = []
    length = MIN_LENGTH
    while length < max_model_len:
        lengths.append(length)
        length *= 2
    return [*lengths, max_model_len]


def read_shape(model: str, *, int8_weights: bool = False, trust_remote_code: bool = False) -> ModelShape:
    """The shape of a folder, hub id, ``.gguf`` file or ``demo``; loads no weights.

    Raises `ModelUnavailable` if there is no such model, transformers does not know it, or its weights are not stored in int8.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from producer.errors import ModelUnavailable
    from worker.engine.model_loader import local_model_path
    from worker.engine.quantization import MOST_DEQUANTIZED, linear_layers

    path = local_model_path(model)
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            skeleton: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ModelUnavailable(f"model {model}: {error}") from error
    num_parameters = sum(parameter.numel() for parameter in skeleton.parameters())
    sizes = [linear.weight.numel() for linear in linear_layers(skeleton).values()] if int8_weights else []
    num_dequantized = min(MOST_DEQUANTIZED, max(sizes, default=0))
    return ModelShape.of(config.get_text_config(decoder=True), num_parameters, sum(sizes), num_dequantized)
