"""Runs a step's plan through the model: inputs, forward, and what each request gets from it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from worker.engine.attention import cpu_backend, torch_backend
from worker.engine.attention.interface import AttentionBackend, PagedContext, paged_context
from worker.engine.attention.layers import AttentionLayer, discover_layers
from worker.engine.attention.metadata import StepMetadata
from worker.engine.config import EngineConfig
from worker.engine.input_batch import InputBatch
from worker.engine.kv_cache import KVCache, block_bytes, choose_num_blocks
from worker.engine.model_loader import LoadedModel
from worker.engine.probe import check_numbers
from worker.engine.request import Sampled, StepPlan
from worker.engine.sampler import Sampler
from worker.engine.step_results import WantedRows


class ForwardOutput(NamedTuple):
    """What the model computed.

    Attributes:
        logits: ``[rows, vocab]`` of the rows that were asked for.
        hidden: ``[T, hidden_size]``, all rows, after the final norm.
    """

    logits: Tensor
    hidden: Tensor


class ModelRunner:
    """Owns the model, the KV cache and the step's buffers; used by the engine's thread alone.

    Raises:
        ModelUnavailable: the model's attention would be computed wrongly, or there is no memory for the cache.
    """

    def __init__(self, loaded: LoadedModel, config: EngineConfig) -> None:
        self._loaded = loaded
        self._model: Any = loaded.model
        self._hidden: Tensor | None = None
        self._model.get_decoder().register_forward_hook(self._keep_hidden)
        modules = discover_layers(loaded.model, loaded.max_model_len)
        self.layers = list(modules.values())
        bytes_per_block = block_bytes(self.layers, config.block_size, loaded.dtype)
        self.num_blocks = choose_num_blocks(config, bytes_per_block, loaded.device, loaded.max_model_len)
        self.num_cpu_blocks = config.cpu_swap_blocks
        self.cache = KVCache(self.layers, self.num_blocks, config.block_size, loaded.dtype, loaded.device, config.cpu_swap_blocks)
        self._caches = dict(zip(modules, self.cache.layers, strict=True))
        self._backend = choose_backend(loaded, self.layers, config.block_size)
        self._inputs = InputBatch(
            max_tokens=config.max_batch_tokens,
            max_requests=config.max_batch_size,
            max_blocks=min(-(-loaded.max_model_len // config.block_size), self.num_blocks),
            block_size=config.block_size,
            device=loaded.device,
        )
        self._sampler = Sampler()
        self._probe(config)

    def _probe(self, config: EngineConfig) -> None:
        num_blocks = min(self.num_blocks, 64)
        check_numbers(
            self._model,
            lambda step, rows: self.forward(step.input_ids, step.positions, step.meta, rows).logits,
            self.layers,
            block_size=config.block_size,
            num_blocks=num_blocks,
            max_tokens=config.max_batch_tokens,
            max_model_len=self._loaded.max_model_len,
        )
        self.cache.clear(num_blocks)

    def copy_blocks(self, plan: StepPlan) -> None:
        """Make a plan's swap copies; once a plan, before its step, and not again where the step is repeated."""
        self.cache.copy_blocks(plan)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> list[Sampled | None]:
        """Compute a step. Where it raises, no request has changed, and the step, or a part of it, may be run again.

        Returns:
            Aligned with the plan's chunks: what came of each ``last`` one, None for the others.
        """
        inputs = self._inputs.build(plan.chunks)
        wanted = WantedRows(plan.chunks, inputs.token_starts)
        rows = torch.tensor(wanted.rows, dtype=torch.int64, device=self._loaded.device)
        output = self.forward(inputs.input_ids, inputs.positions, inputs.meta, rows)
        return wanted.results(output.logits, output.hidden, self._sampler)

    def forward(self, input_ids: Tensor, positions: Tensor, meta: StepMetadata, logits_rows: Tensor) -> ForwardOutput:
        """Run the model over a ragged batch.

        Args:
            input_ids: ``[1, T]``; positions ``[1, T]``.
            logits_rows: ``[rows]``, the tokens whose logits are wanted.
        """
        with paged_context(PagedContext(meta, self._backend, self._caches)):
            output = self._model(input_ids=input_ids, position_ids=positions, use_cache=False, logits_to_keep=logits_rows)
        hidden, self._hidden = self._hidden, None
        assert hidden is not None, "the decoder was not called"
        return ForwardOutput(output.logits[0], hidden)

    def _keep_hidden(self, _module: Any, _args: Any, output: Any) -> None:
        self._hidden = output.last_hidden_state[0]


def choose_backend(loaded: LoadedModel, layers: list[AttentionLayer], block_size: int) -> AttentionBackend:
    """The fastest attention backend that serves every layer."""
    if loaded.device.type == "cpu" and all(
        cpu_backend.supports(loaded.dtype, layer.num_heads, layer.num_kv_heads, layer.head_dim, block_size) for layer in layers
    ):
        return cpu_backend.CpuAttention()
    return torch_backend.attend
