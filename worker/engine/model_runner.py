"""Runs a step's plan through the model: inputs, forward pass, and each request's result."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import structlog
import torch
from torch import Tensor

from producer.sampling import SamplingParams
from worker.engine.arithmetic import ceil_div
from worker.engine.attention.interface import PagedContext, paged_context
from worker.engine.attention.layers import discover_layers, run_without_attention
from worker.engine.attention.metadata import StepMetadata
from worker.engine.config import CUDA_GRAPH_BYTES, PROBE_TOKENS, EngineConfig
from worker.engine.cuda_graphs import DecodeGraphs
from worker.engine.device_sampler import sample_on_device
from worker.engine.input_batch import Forward, InputBatch, StepInputs
from worker.engine.kernels import KernelChoice, Kernels
from worker.engine.kv_cache import KVCache, block_bytes, choose_num_blocks, free_memory_bytes, peak_memory_bytes
from worker.engine.model_loader import LoadedModel
from worker.engine.preemption import PreemptionCosts
from worker.engine.probe import SPLIT_TOKENS, check_numbers
from worker.engine.request import Request
from worker.engine.run_ahead import RunAhead
from worker.engine.sampler import Sampler
from worker.engine.step import Sampled, StepPlan
from worker.engine.step_clock import StepClock
from worker.engine.step_results import WantedRows, sample_chosen

log = structlog.get_logger("headrace.engine")

_NO_LOGITS = torch.empty(0, 0)


class ForwardOutput(NamedTuple):
    """What the model computed.

    Attributes:
        logits: ``[rows, vocab]`` of the rows that were asked for; may be in a buffer that the next forward pass overwrites.
        hidden: ``[T, hidden_size]``, all rows, after the final norm.
    """

    logits: Tensor
    hidden: Tensor


class ModelRunner:
    """Owns the model, the KV cache and the step's buffers; used only by the engine's thread.

    Attributes:
        on_device: must be entered around calls from a thread other than the one that made this: Triton launches on the
            thread's current device, wherever the tensors are.
        clock: where the thread's time goes.
        num_blocks: of the cache; may change with `restore_cache`.
        run_ahead: launches steps whose tokens are read later; None if only `run` is used.
        preemption_costs: of this model; None on a CPU, for which the defaults are right.

    Raises:
        ModelUnavailable: the model's attention would be computed wrongly, or there is no memory for the cache.
    """

    def __init__(self, loaded: LoadedModel, config: EngineConfig) -> None:
        assert config.max_batch_tokens, "see EngineConfig.for_device"
        is_cuda = loaded.device.type == "cuda"
        if is_cuda:
            torch.cuda.set_device(loaded.device)
        self.on_device: AbstractContextManager[object] = torch.cuda.device(loaded.device) if is_cuda else nullcontext()
        self._loaded = loaded
        self._model: Any = loaded.model
        self._hidden: Tensor | None = None
        self._model.get_decoder().register_forward_hook(self._keep_hidden)
        self._config = config
        self._modules = discover_layers(loaded.model, loaded.max_model_len)
        self.layers = list(self._modules.values())
        self._cache_dtype = torch.int8 if config.kv_dtype == "int8" else loaded.dtype
        self.num_cpu_blocks = config.cpu_swap_blocks
        self._choice = KernelChoice(loaded, self.layers, config)
        self.preemption_costs = self._preemption_costs() if is_cuda else None
        self._sampler = Sampler()
        self.clock = StepClock()
        self._graphs: DecodeGraphs | None = None
        self._make_cache()
        self._probe()
        self._choice.warn_of_slow_dtype()
        self._capture()

    @property
    def kernels(self) -> Kernels:
        """What computes the steps now, after what failed has given way."""
        return Kernels(self._choice.attention, self._choice.decoder is not None, self._graphs is not None)

    def release_cache(self) -> None:
        """Free the KV cache, with what it holds, and the graphs over it. No step until `restore_cache`."""
        self._graphs = None
        self._use(KVCache(self.layers, 0, self._config.block_size, self._cache_dtype, self._loaded.device))
        if self._loaded.device.type == "cuda":
            torch.cuda.empty_cache()

    def restore_cache(self) -> None:
        """Replace the cache by an empty one, as large as the settings and the memory free now allow.

        Raises:
            ModelUnavailable: there is no memory for it.
        """
        self.release_cache()
        self._make_cache()
        self._capture()

    def _make_cache(self) -> None:
        """Make the cache, and everything that depends on its size."""
        config, loaded = self._config, self._loaded
        self.num_blocks = self._choose_num_blocks()
        self._use(KVCache(self.layers, self.num_blocks, config.block_size, self._cache_dtype, loaded.device, self.num_cpu_blocks))
        self._max_blocks = min(ceil_div(loaded.max_model_len, config.block_size), self.num_blocks)
        self._inputs = self._make_inputs()
        runs_ahead = loaded.device.type == "cuda" if config.run_ahead is None else config.run_ahead
        self.run_ahead = RunAhead((self._inputs, self._make_inputs()), self._logits, self.clock) if runs_ahead else None

    def _use(self, cache: KVCache) -> None:
        self.cache = cache
        self._caches = dict(zip(self._modules, cache.layers, strict=True))
        if self._choice.decoder is not None:
            self._choice.decoder.bind(cache.layers)

    def _preemption_costs(self) -> PreemptionCosts:
        num_weights = sum(weights.numel() for weights in (*self._model.parameters(), *self._model.buffers()))
        return PreemptionCosts.on_cuda(num_weights, block_bytes(self.layers, self._config.block_size, self._cache_dtype))

    def _make_inputs(self) -> InputBatch:
        config = self._config
        return InputBatch(
            max_tokens=config.max_batch_tokens,
            max_requests=config.max_batch_size,
            max_blocks=self._max_blocks,
            block_size=config.block_size,
            device=self._loaded.device,
        )

    def _captures(self) -> bool:
        """Whether to capture decode steps."""
        return self._config.cuda_graphs and self._loaded.device.type == "cuda" and self._choice.runs_triton()

    def _capture(self) -> None:
        """Capture decode steps, if wanted, and check what they compute; a model whose steps cannot be captured runs without graphs."""
        if not self._captures():
            return
        config = self._config
        try:
            graphs = DecodeGraphs(self._forward, config.max_batch_size, self._max_blocks, config.block_size, self._loaded.device)
            graphs.capture_all()
            self._graphs = graphs
            self._check_numbers()
        except Exception as error:
            log.warning("decode steps run without CUDA graphs", error=type(error).__name__, reason=str(error)[:500])
            self._graphs = None

    def _choose_num_blocks(self) -> int:
        config, device = self._config, self._loaded.device
        reserved = self._step_bytes() if device.type == "cuda" else 0
        if self._captures():
            reserved += CUDA_GRAPH_BYTES
        bytes_per_block = block_bytes(self.layers, config.block_size, self._cache_dtype)
        return choose_num_blocks(config, bytes_per_block, max(0, free_memory_bytes(device) - reserved), device, self._loaded.max_model_len)

    @torch.inference_mode()
    def _step_bytes(self) -> int:
        """Most memory of a CUDA device that a full step takes beside weights and cache, including sampling but not attention."""
        config, params = self._config, SamplingParams(top_p=0.5, presence_penalty=1.0)
        requests = [Request("sampled", [0], params, 1)] * config.max_batch_size

        def step() -> None:
            logits = run_without_attention(self._model, config.max_batch_tokens, len(requests), self._loaded.max_model_len)
            self._hidden = None
            sample_on_device(logits, requests)

        return peak_memory_bytes(self._loaded.device, step)

    def decoder_seconds(self) -> dict[str, float]:
        """Where the time of all steps so far went within the fused decoder; empty if none measures it."""
        decoder = self._choice.native_decoder
        return decoder.phase_seconds() if decoder is not None else {}

    def free_unused_weights(self) -> None:
        """Free the weights of the model's own modules that steps do not read; afterwards no other runner can be made of the model."""
        if (decoder := self._choice.native_decoder) is not None:
            decoder.release()

    def _probe(self) -> None:
        """Check what the model computes here. The fastest way is tried first; one that fails gives way to the next."""
        while True:
            try:
                return self._check_numbers()
            except Exception as error:
                if not self._choice.give_way(error):
                    raise

    def _check_numbers(self) -> None:
        self._compare(self._logits, PROBE_TOKENS)
        if self._choice.runs_triton():
            self._compare(self._logits_beside_the_longest, SPLIT_TOKENS)

    def _compare(self, forward: Forward, min_tokens: int) -> None:
        """Compare a forward function's results for sequences of at least so many tokens with the model's own attention."""
        config = self._config
        num_blocks = min(self.num_blocks, 64)
        check_numbers(
            self._model,
            lambda inputs, rows: forward(inputs, rows).clone(),
            self.layers,
            block_size=config.block_size,
            num_blocks=num_blocks,
            max_tokens=config.max_batch_tokens,
            max_model_len=self._loaded.max_model_len,
            int8_cache=self._cache_dtype == torch.int8,
            min_tokens=min_tokens,
        )
        self.cache.clear(num_blocks)

    def copy_blocks(self, plan: StepPlan) -> None:
        """Make a plan's swap copies: once per plan, before its step, and not again if the step is repeated."""
        self.cache.copy_blocks(plan)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> list[Sampled | None]:
        """Compute a step. If it raises, no request has changed, and the step, or a part of it, may be run again.

        Returns:
            Aligned with the plan's chunks: the result of each ``last`` one, None for the others.
        """
        inputs = self._inputs.build(plan.chunks)
        wanted = WantedRows(plan.chunks, inputs.token_starts)
        rows = torch.tensor(wanted.rows, dtype=torch.int64, device=self._loaded.device)
        self.clock.lap("inputs")
        decoder = self._choice.native_decoder
        if decoder is not None and wanted.only_likeliest():
            token_ids, hidden = decoder.likeliest(inputs.input_ids[0], inputs.positions[0], inputs.meta, rows)
            output, sample = ForwardOutput(_NO_LOGITS, hidden), sample_chosen(token_ids)
        else:
            output, sample = self.forward(inputs.input_ids, inputs.positions, inputs.meta, rows), self._sampler
        self.clock.lap("model")
        results = wanted.results(output.logits, output.hidden, sample)
        self.clock.lap("sample")
        return results

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
        if self._choice.decoder is not None:
            return ForwardOutput(*self._choice.decoder(input_ids[0], positions[0], meta, logits_rows))
        with paged_context(PagedContext(meta, self._choice.backend, self._caches)):
            output = self._model(input_ids=input_ids, position_ids=positions, use_cache=False, logits_to_keep=logits_rows)
        hidden, self._hidden = self._hidden, None
        assert hidden is not None, "the decoder was not called"
        return ForwardOutput(output.logits[0], hidden)

    def _logits(self, inputs: StepInputs, rows: Tensor) -> Tensor:
        return self.forward(inputs.input_ids, inputs.positions, inputs.meta, rows).logits

    def _logits_beside_the_longest(self, inputs: StepInputs, rows: Tensor) -> Tensor:
        """Logits as in a step with a sequence of the longest possible context, for which our CUDA kernels split sequences."""
        inputs.meta.max_seq_len = self._loaded.max_model_len
        return self._logits(inputs, rows)

    def _keep_hidden(self, _module: Any, _args: Any, output: Any) -> None:
        self._hidden = output.last_hidden_state[0]
