"""An engine that lends the memory of its KV cache: it is given back whole, and what runs after it runs as before."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from tests.tiny_engine import assert_idle, byte_tokenizer, loaded_model, request, run, tiny_engine
from tests.tiny_models import tiny_model
from worker.engine.engine import Engine
from worker.engine.model_loader import LoadedModel, prepare_model
from worker.engine.native.library import kernels
from worker.engine.request import Request

PROMPTS = ([1, 2, 3] * 30, [1, 2, 3] * 25 + [7], [9] * 50)
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"attention": "torch"},
    {"run_ahead": True},
    {"kv_dtype": "int8"},
    {"num_blocks": 9, "cpu_swap_blocks": 9, "batch_overcommit": 3.0},
    {"enable_prefix_caching": False},
)


def requests() -> list[Request]:
    return [request(str(i), prompt, 12, tier="batch") for i, prompt in enumerate(PROMPTS)]


def outputs(engine: Engine) -> list[list[int]]:
    wanted = requests()
    run(engine, wanted)
    return [item.output_token_ids for item in wanted]


def storages(engine: Engine) -> list[weakref.ref[torch.UntypedStorage]]:
    cache = engine.runner.cache
    return [weakref.ref(tensor.untyped_storage()) for pair in (*cache.layers, *cache._cpu_layers) for tensor in pair]


def check_lent(engine: Engine) -> None:
    """Twice, with requests before, between and after, all of which find prefixes of each other in the cache, or no longer."""
    expected, blocks = outputs(engine), engine.stats().total_blocks
    for _ in range(2):
        held = storages(engine)
        assert all(storage() is not None for storage in held)
        engine.release_cache()
        assert not any(storage() is not None for storage in held)
        engine.restore_cache()
        assert engine.stats().total_blocks == blocks
        assert engine.stats().cached_blocks == 0
        assert outputs(engine) == expected
        assert_idle(engine)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_lent_cache_is_given_back_and_changes_no_output(settings: dict[str, Any]) -> None:
    check_lent(tiny_engine(**settings))


def fusible() -> LoadedModel:
    model = tiny_model("llama", hidden_size=64, intermediate_size=96, initializer_range=0.1).bfloat16()
    return prepare_model(model, byte_tokenizer(), "fusible")


@pytest.mark.skipif(kernels() is None, reason="no C compiler")
def test_a_fused_decoder_lets_the_lent_cache_go() -> None:
    engine = tiny_engine(fusible())
    assert engine.kernels == {"attention": "cpu", "fused": True, "cuda_graphs": False}
    check_lent(engine)


def test_a_cache_is_made_as_large_as_what_is_free_then_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    free = 1 << 20
    monkeypatch.setattr("worker.engine.model_runner.free_memory_bytes", lambda _: free)
    engine = tiny_engine(num_blocks=None)
    expected, blocks = outputs(engine), engine.stats().total_blocks
    free *= 2
    engine.restore_cache()
    assert engine.stats().total_blocks == 2 * blocks
    assert outputs(engine) == expected


def test_a_cache_that_requests_use_is_not_lent() -> None:
    engine = tiny_engine(loaded_model())
    engine.add(request("r", [1, 2, 3], 4))
    for lend in (engine.release_cache, engine.restore_cache):
        with pytest.raises(AssertionError, match="would lose"):
            lend()
    run(engine)
