"""Greedy output over the paged cache equals transformers' ``generate``, token by token, in float32, for each architecture.

Random weights make near ties; `tests.tiny_models` spreads the logits, and `Expected.agreement` allows a difference at a near tie only.
"""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass

import pytest

from producer.keys import Tier
from tests.generation import Expected, Loop, generate, greedy_request
from tests.tiny_models import ARCHITECTURES, VOCAB_SIZE, tiny_model
from worker.engine.attention import torch_backend
from worker.engine.model_loader import LoadedModel, prepare_model


@dataclass(frozen=True)
class Case:
    """A model, prompts, and what transformers makes of them."""

    loaded: LoadedModel
    prompts: list[list[int]]
    expected: list[Expected]

    def check(self, loop: Loop, tier: Tier = "realtime") -> None:
        """Run the prompts; all output agrees but for what follows a rare near tie."""
        requests = [greedy_request(i, prompt, MAX_TOKENS, tier) for i, prompt in enumerate(self.prompts)]
        loop.run(requests)
        agreed = sum(e.agreement(r.output_token_ids) for e, r in zip(self.expected, requests, strict=True))
        assert agreed > 0.95 * MAX_TOKENS * len(requests)


PROMPT_LENGTHS = (1, 2, 7, 8, 9, 16, 33, 90)
MAX_TOKENS = 20


@pytest.fixture(scope="module", params=ARCHITECTURES)
def case(request: pytest.FixtureRequest) -> Case:
    own = tiny_model(request.param)
    rng = random.Random(request.param)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in PROMPT_LENGTHS]
    expected = [generate(own, prompt, MAX_TOKENS) for prompt in prompts]
    return Case(prepare_model(copy.deepcopy(own), None, request.param), prompts, expected)


def test_alone(case: Case) -> None:
    case.check(Loop(case.loaded, num_blocks=32, max_batch_size=1, max_batch_tokens=128))


def test_all_at_once_in_random_chunks(case: Case) -> None:
    for seed in range(2):
        case.check(Loop(case.loaded, random.Random(seed), num_blocks=64, max_batch_size=6, max_batch_tokens=24))


@pytest.mark.parametrize("cpu_swap_blocks", [0, 8])
def test_a_pool_so_small_that_requests_are_preempted(case: Case, cpu_swap_blocks: int) -> None:
    settings = {"batch_overcommit": 3.0, "realtime_reserved": 0.0, "max_batch_tokens": 128}
    loop = Loop(case.loaded, random.Random(1), num_blocks=8, cpu_swap_blocks=cpu_swap_blocks, **settings)
    case.check(loop, "batch")
    stats = loop.scheduler.stats()
    assert (stats.swap_preemptions if cpu_swap_blocks else stats.recompute_preemptions) > 0


def test_the_reference_backend(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.engine.model_runner.choose_backend", lambda *_: torch_backend.attend)
    case.check(Loop(case.loaded, random.Random(0), num_blocks=64, max_batch_tokens=100))
