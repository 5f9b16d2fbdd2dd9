"""Which settings an engine takes, and what they leave to the device."""

from __future__ import annotations

from typing import Literal, get_args, get_origin, get_type_hints

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


LITERALS = {name: get_args(kind) for name, kind in get_type_hints(EngineConfig).items() if get_origin(kind) is Literal}


@pytest.mark.parametrize("name", LITERALS)
def test_a_setting_of_few_values_takes_those_alone(name: str) -> None:
    assert {"policy", "attention", "quantization", "kv_dtype"} <= LITERALS.keys()
    for value in LITERALS[name]:
        EngineConfig(**{name: value})
    for value in ("triton", LITERALS[name][0].capitalize(), "", None, 1):
        with pytest.raises(ValueError, match=f"^{name} must be one of {', '.join(LITERALS[name])}$"):
            EngineConfig(**{name: value})
