"""Nothing in a decode step asks the device for a value: it could not be captured as a CUDA graph. Watched on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.tiny_models import ARCHITECTURES, tiny_model
from tests.waits import Watch
from worker.engine.attention.metadata import StepMetadata
from worker.engine.config import EngineConfig
from worker.engine.model_loader import prepare_model
from worker.engine.model_runner import ModelRunner

ROWS = 4


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
    monkeypatch.setattr(runner._choice, "backend", no_attention)
    token_ids = torch.zeros(1, ROWS, dtype=torch.int64)
    with torch.inference_mode(), Watch() as watch:
        runner._forward(token_ids, torch.zeros_like(token_ids), decodes(), torch.arange(ROWS))
    assert not watch.waits


def test_the_watch_sees_a_wait() -> None:
    with Watch() as watch:
        values = torch.arange(3)
        values[values > 1].sum().item()
    assert watch.waits == {"index", "_local_scalar_dense"}
