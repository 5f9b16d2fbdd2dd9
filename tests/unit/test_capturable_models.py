"""Nothing in a decode step, nor in the launch of one ahead, asks the device for a value: the one could not be captured as a CUDA graph,
the other would wait. Watched on the CPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from producer.sampling import SamplingParams
from tests.gpu.ahead import AheadLoop
from tests.tiny_models import ARCHITECTURES, tiny_model
from worker.engine.attention.metadata import StepMetadata
from worker.engine.config import EngineConfig
from worker.engine.model_loader import prepare_model
from worker.engine.model_runner import ModelRunner
from worker.engine.request import Request

ROWS = 4
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "_unique2", "bincount", "repeat_interleave"}


class Watch(TorchDispatchMode):
    """Notes the operations whose result, or its shape, the host has to know."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name == "index" and any(index is not None and index.dtype == torch.bool for index in args[1])
        if name in WAITS or by_mask:
            self.waits.add(name)
        return func(*args, **(kwargs or {}))


def decodes() -> StepMetadata:
    return StepMetadata(
        query_start_loc=torch.arange(ROWS + 1, dtype=torch.int32),
        seq_lens=torch.ones(ROWS, dtype=torch.int32),
        block_tables=torch.arange(ROWS, dtype=torch.int32)[:, None],
        slot_mapping=torch.arange(ROWS) * 16,
        positions=torch.zeros(ROWS, dtype=torch.int64),
        num_decodes=ROWS,
        max_query_len=1,
        max_seq_len=1,
        block_size=16,
    )


def no_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return query.new_zeros(query.shape[0], query.shape[1], value.shape[2])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_decode_step_asks_the_device_for_nothing(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = prepare_model(tiny_model(architecture), None, architecture)
    runner = ModelRunner(loaded, EngineConfig(num_blocks=32, max_batch_size=ROWS, max_batch_tokens=64))
    monkeypatch.setattr(runner, "_backend", no_attention)
    token_ids = torch.zeros(1, ROWS, dtype=torch.int64)
    with torch.inference_mode(), Watch() as watch:
        runner._forward(token_ids, torch.zeros_like(token_ids), decodes(), torch.arange(ROWS))
    assert not watch.waits


def test_a_launch_asks_the_device_for_nothing() -> None:
    loop = AheadLoop(prepare_model(tiny_model("llama"), None, "llama"), num_blocks=32, max_batch_size=4, max_batch_tokens=64)
    settings = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 2.0, "top_k": 9, "min_p": 0.1},
    ]
    for i, params in enumerate(settings):
        loop.scheduler.add(Request(f"r{i}", [1, 2, 3], SamplingParams(ignore_eos=True, **params), 20, seed=i))
    for _ in range(3):
        loop.step()
    plan = loop.scheduler.schedule()
    assert loop.runner.run_ahead is not None
    with Watch() as watch:
        loop.runner.run_ahead.launch(plan, loop.pending)
    assert len(plan.chunks) == len(settings)
    assert not watch.waits


def test_the_watch_sees_a_wait() -> None:
    with Watch() as watch:
        values = torch.arange(3)
        values[values > 1].sum().item()
    assert watch.waits == {"index", "_local_scalar_dense"}
