"""Runs a step's plan through the model: inputs, forward, and what each request gets from it."""

from __future__ import annotations

import importlib.util
from typing import Any, NamedTuple

import torch
from torch import Tensor

from worker.engine.attention import cpu_backend, torch_backend
from worker.engine.attention.interface import AttentionBackend, PagedContext, paged_context
from worker.engine.attention.layers import AttentionLayer, discover_layers, step_memory_bytes
from worker.engine.attention.metadata import StepMetadata
from worker.engine.config import EngineConfig
from worker.engine.cuda_graphs import DecodeGraphs
from worker.engine.input_batch import InputBatch, StepInputs
from worker.engine.kv_cache import KVCache, block_bytes, choose_num_blocks, free_memory_bytes
from worker.engine.model_loader import LoadedModel
from worker.engine.probe import check_numbers
from worker.engine.request import Sampled, StepPlan
from worker.engine.run_ahead import RunAhead
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

    Attributes:
        ahead: launches steps whose tokens are read later; None where `run` alone is used.
        eager_because: why decode steps are not replayed as CUDA graphs though they should; None where they are, or need not.

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
        self.num_blocks = self._choose_num_blocks(config)
        self.num_cpu_blocks = config.cpu_swap_blocks
        self.cache = KVCache(self.layers, self.num_blocks, config.block_size, loaded.dtype, loaded.device, config.cpu_swap_blocks)
        self._caches = dict(zip(modules, self.cache.layers, strict=True))
        self._backend = choose_backend(loaded, self.layers, config.block_size)
        self._max_blocks = min(-(-loaded.max_model_len // config.block_size), self.num_blocks)
        self._inputs = self._make_inputs(config)
        self._sampler = Sampler()
        self._graphs: DecodeGraphs | None = None
        self.eager_because: str | None = None
        self._probe(config)
        self._capture(config)
        runs_ahead = loaded.device.type == "cuda" if config.run_ahead is None else config.run_ahead
        self.ahead = RunAhead((self._inputs, self._make_inputs(config)), self._logits) if runs_ahead else None

    def _make_inputs(self, config: EngineConfig) -> InputBatch:
        return InputBatch(
            max_tokens=config.max_batch_tokens,
            max_requests=config.max_batch_size,
            max_blocks=self._max_blocks,
            block_size=config.block_size,
            device=self._loaded.device,
        )

    def _capture(self, config: EngineConfig) -> None:
        """Capture decode steps, if the backend may be captured; a model that may not runs without."""
        if not config.cuda_graphs or self._loaded.device.type != "cuda" or self._backend is torch_backend.attend:
            return
        graphs = DecodeGraphs(self._forward, config.max_batch_size, self._max_blocks, config.block_size, self._loaded.device)
        try:
            graphs.capture_all()
        except RuntimeError as error:
            self.eager_because = f"{type(error).__name__}: {error}"
        else:
            self._graphs = graphs

    def _choose_num_blocks(self, config: EngineConfig) -> int:
        device, max_model_len = self._loaded.device, self._loaded.max_model_len
        step_bytes = 0
        if device.type == "cuda":
            step_bytes = step_memory_bytes(self._model, config.max_batch_tokens, config.max_batch_size, max_model_len)
        bytes_per_block = block_bytes(self.layers, config.block_size, self._loaded.dtype)
        return choose_num_blocks(config, bytes_per_block, free_memory_bytes(device) - step_bytes, device, max_model_len)

    def _probe(self, config: EngineConfig) -> None:
        num_blocks = min(self.num_blocks, 64)
        check_numbers(
            self._model,
            self._logits,
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
        if self._graphs is not None and (replayed := self._graphs.run(input_ids, positions, meta)) is not None:
            logits, hidden = replayed
            return ForwardOutput(logits[logits_rows], hidden)
        return self._forward(input_ids, positions, meta, logits_rows)

    def _forward(self, input_ids: Tensor, positions: Tensor, meta: StepMetadata, logits_rows: Tensor) -> ForwardOutput:
        with paged_context(PagedContext(meta, self._backend, self._caches)):
            output = self._model(input_ids=input_ids, position_ids=positions, use_cache=False, logits_to_keep=logits_rows)
        hidden, self._hidden = self._hidden, None
        assert hidden is not None, "the decoder was not called"
        return ForwardOutput(output.logits[0], hidden)

    def _logits(self, inputs: StepInputs, rows: Tensor) -> Tensor:
        return self.forward(inputs.input_ids, inputs.positions, inputs.meta, rows).logits

    def _keep_hidden(self, _module: Any, _args: Any, output: Any) -> None:
        self._hidden = output.last_hidden_state[0]


def choose_backend(loaded: LoadedModel, layers: list[AttentionLayer], block_size: int) -> AttentionBackend:
    """The fastest attention backend that serves every layer."""
    if loaded.device.type == "cpu" and all(
        cpu_backend.supports(loaded.dtype, layer.num_heads, layer.num_kv_heads, layer.head_dim, block_size) for layer in layers
    ):
        return cpu_backend.CpuAttention()
    if loaded.device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from worker.engine.attention import triton_backend  # with a torch for CUDA, but not with every torch

        return triton_backend.attend
    return torch_backend.attend
