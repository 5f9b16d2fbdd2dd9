"""What the settings leave to the device."""

from __future__ import annotations

import pytest

from tests.tiny_engine import tiny_engine
from worker.engine.config import CPU_BATCH_TOKENS, CUDA_BATCH_TOKENS, EngineConfig


@pytest.mark.parametrize(
    ("settings", "kind", "tokens"),
    [
        ({}, "cpu", CPU_BATCH_TOKENS),
        ({}, "cuda", CUDA_BATCH_TOKENS),
        ({"max_batch_size": 600}, "cpu", 600),
        ({"max_batch_tokens": 300}, "cpu", 300),
        ({"max_batch_tokens": 300}, "cuda", 300),
    ],
)
def test_the_budget_of_tokens_is_the_devices_unless_it_is_given(settings: dict[str, int], kind: str, tokens: int) -> None:
    config = EngineConfig(**settings).for_device(kind)
    assert config.max_batch_tokens == tokens
    assert config.for_device("cpu") is config


def test_an_engine_has_the_settings_of_its_device() -> None:
    assert tiny_engine(max_batch_tokens=0).config.max_batch_tokens == CPU_BATCH_TOKENS


@pytest.mark.parametrize(("tokens", "reason"), [(-1, "at least 0"), (99, "at least max_batch_size")])
def test_a_budget_that_does_not_do_is_refused(tokens: int, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        EngineConfig(max_batch_size=100, max_batch_tokens=tokens)
