"""Greedy output of SmolLM2-135M equals transformers' ``generate``, token by token, in float32: alone, and all at once in random chunks.

``HEADRACE_PARITY_PROMPTS=64`` runs the whole set of prompts of 1 to 1,500 tokens, which takes half an hour on two cores.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.generation import Expected, Loop, generate, greedy_request
from tests.instruction_sets import kernels_for
from worker.engine.config import EngineConfig
from worker.engine.engine import Engine
from worker.engine.model_loader import LoadedModel, load_model, local_model_path

NUM_PROMPTS = int(os.environ.get("HEADRACE_PARITY_PROMPTS", "6"))
LONGEST, MAX_TOKENS = (200, 10) if NUM_PROMPTS <= 6 else (1500, 24)
NUM_BLOCKS = NUM_PROMPTS * (LONGEST + MAX_TOKENS + 15) // 16

pytestmark = pytest.mark.timeout(7200)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(EngineConfig(dtype="float32"))


@pytest.fixture(scope="module")
def prompts(loaded: LoadedModel) -> list[list[int]]:
    """Pieces of a text, one of them a single token, one as long as it gets."""
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    token_ids: list[int] = loaded.tokenizer(text)["input_ids"]
    rng = random.Random(0)
    lengths = [1, LONGEST, *(rng.randint(1, LONGEST) for _ in range(NUM_PROMPTS - 2))]
    starts = [rng.randrange(len(token_ids) - length) for length in lengths]
    return [token_ids[start : start + length] for start, length in zip(starts, lengths, strict=True)]


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]]) -> list[Expected]:
    own: Any = AutoModelForCausalLM.from_pretrained(local_model_path("demo"), dtype="float32", attn_implementation="eager").eval()
    return [generate(own, prompt, MAX_TOKENS) for prompt in prompts]


def check(loop: Loop, prompts: list[list[int]], expected: list[Expected]) -> None:
    requests = [greedy_request(i, prompt, MAX_TOKENS) for i, prompt in enumerate(prompts)]
    loop.run(requests)
    agreed = sum(e.agreement(r.output_token_ids) for e, r in zip(expected, requests, strict=True))
    assert agreed > 0.98 * MAX_TOKENS * len(requests)


def test_alone(loaded: LoadedModel, prompts: list[list[int]], expected: list[Expected]) -> None:
    loop = Loop(loaded, num_blocks=NUM_BLOCKS, max_batch_size=1)
    for prompt, output in zip(prompts, expected, strict=True):
        check(loop, [prompt], [output])


def test_int8_weights_and_cache_still_know_the_capital_of_france() -> None:
    engine = Engine.load("demo", quantization="int8", kv_dtype="int8", num_blocks=32, max_model_len=256)
    assert engine.generate("The capital of France is", temperature=0.0, max_tokens=4)[0].text.startswith(" Paris")


def test_so_does_a_cpu_with_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its instructions are emulated if this CPU lacks them."""
    lib = kernels_for("amx")
    monkeypatch.setattr("worker.engine.fused.decoder.kernels", lambda: lib)
    engine = Engine.load("demo", dtype="bfloat16", num_blocks=32, max_model_len=256)
    question = "The capital of France is"
    outputs = engine.generate(
        [question, f"The capital of Italy is Rome, that of Spain is Madrid. {question}"], temperature=0.0, max_tokens=4
    )
    assert [output.text[:6] for output in outputs] == [" Paris"] * 2


def test_all_at_once_in_random_chunks(loaded: LoadedModel, prompts: list[list[int]], expected: list[Expected]) -> None:
    check(Loop(loaded, random.Random(1), num_blocks=NUM_BLOCKS), prompts, expected)
