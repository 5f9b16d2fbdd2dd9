"""transformers itself: ``naive`` (one by one), ``static`` (padded batches), ``continuous`` (its own continuous batching)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from producer.load.stats import RequestRecord
from worker.bench.drivers.loop import begin, in_batches, new_records, serve
from worker.bench.records import Run
from worker.bench.workloads import BenchRequest
from worker.engine.config import EngineConfig
from worker.engine.model_loader import load_model

_STATIC_BATCH = 32


def main() -> None:
    out, options = begin()
    mode, shares_prefixes = options.pop("mode"), options.pop("enable_prefix_caching")
    model = load_model(EngineConfig(**options)).model
    model.set_attn_implementation("sdpa")
    runs: dict[str, Callable[[list[BenchRequest]], list[RequestRecord]]] = {
        "naive": lambda requests: in_batches(requests, 1, lambda batch: _generate(model, batch)),
        "static": lambda requests: in_batches(requests, _STATIC_BATCH, lambda batch: _generate(model, batch)),
        "continuous": lambda requests: _continuous(model, requests, shares_prefixes),
    }
    serve(out, lambda requests: Run(f"transformers-{mode}", runs[mode](requests)))


def _generate(model: Any, batch: Sequence[BenchRequest]) -> None:
    """Left-padded prompts, run until the longest output of the batch is done."""
    width = max(len(request.prompt_token_ids) for request in batch)
    ids = torch.zeros(len(batch), width, dtype=torch.long, device=model.device)
    mask = torch.zeros_like(ids)
    for row, request in enumerate(batch):
        ids[row, width - len(request.prompt_token_ids) :] = torch.tensor(request.prompt_token_ids, device=model.device)
        mask[row, width - len(request.prompt_token_ids) :] = 1
    new_tokens = max(request.max_tokens for request in batch)
    with torch.inference_mode():
        model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=new_tokens, min_new_tokens=new_tokens, pad_token_id=0)


def _continuous(model: Any, requests: list[BenchRequest], shares_prefixes: bool) -> list[RequestRecord]:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    records = new_records(requests)
    config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=max(r.max_tokens for r in requests))
    sharing = ContinuousBatchingConfig(allow_block_sharing=shares_prefixes)
    serve = model.continuous_batching_context_manager(generation_config=config, continuous_batching_config=sharing)
    with torch.inference_mode(), serve as manager:
        start_s = time.perf_counter()  # the manager's clock
        for request in sorted(requests, key=lambda request: request.arrival_s):
            time.sleep(max(0.0, request.arrival_s - (time.perf_counter() - start_s)))
            manager.add_request(
                request.prompt_token_ids, request_id=str(request.id), max_new_tokens=request.max_tokens, record_timestamps=True
            )
        for output in _finished(manager, len(requests)):
            for token_s in output.timestamps:
                records[int(output.request_id)].add_tokens(1, token_s - start_s)
    return list(records.values())


def _finished(manager: Any, count: int) -> Iterator[Any]:
    while count:
        output = manager.get_result(timeout=1.0)
        if output is not None and output.is_finished():
            count -= 1
            yield output
        elif output is None and not manager.is_running():
            raise RuntimeError(f"transformers' manager ended with {count} requests unanswered")


if __name__ == "__main__":
    main()
