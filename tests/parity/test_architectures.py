"""Greedy output over the paged cache equals transformers' ``generate``, token by token, in float32, for each architecture.

Random weights make near ties; `tests.tiny_models` spreads the logits, and `Expected.agreement` allows a difference at a near tie only.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from producer.keys import Tier
from producer.sampling import SamplingParams
from tests.generation import Expected, Loop, generate, greedy_request
from tests.tiny_models import ARCHITECTURES, VOCAB_SIZE, tiny_model
from worker.engine.attention import torch_backend
from worker.engine.model_loader import LoadedModel, prepare_model
from worker.engine.request import Request


@dataclass(frozen=True)
class Case:
    """A model, prompts, and what transformers makes of them."""

    loaded: LoadedModel
    prompts: list[list[int]]
    expected: list[Expected]

    def check(self, loop: Loop, tier: Tier = "realtime", neighbours: Sequence[Request] = ()) -> None:
        """Run the prompts, with others; all their output agrees, except after a rare near tie."""
        requests = [greedy_request(i, prompt, MAX_TOKENS, tier) for i, prompt in enumerate(self.prompts)]
        loop.run([*neighbours, *requests])
        agreed = sum(e.agreement(r.output_token_ids) for e, r in zip(self.expected, requests, strict=True))
        assert agreed > 0.95 * MAX_TOKENS * len(requests)


PROMPT_LENGTHS = (1, 7, 8, 9, 33, 90)
MAX_TOKENS = 14
WILD = [
    SamplingParams(temperature=1.5, top_p=0.8, max_tokens=MAX_TOKENS),
    SamplingParams(temperature=0.7, top_k=5, repetition_penalty=1.4, frequency_penalty=0.5, max_tokens=MAX_TOKENS),
    SamplingParams(temperature=3.0, min_p=0.05, presence_penalty=2.0, logprobs=3, max_tokens=MAX_TOKENS),
    SamplingParams(temperature=0.0, logit_bias={7: 100.0}, max_tokens=MAX_TOKENS),
]


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


def test_prefixes_shared_cold_and_warm_among_wild_neighbours_of_the_other_tier(case: Case) -> None:
    loop = Loop(case.loaded, random.Random(2), num_blocks=64, max_batch_size=10, max_batch_tokens=60)
    longest = case.prompts[-1]
    for _ in range(2):
        wild = [
            Request(f"wild-{i}", longest[: 20 * i + 1], params, MAX_TOKENS, seed=i, tier="batch", arrival=i)
            for i, params in enumerate(WILD)
        ]
        case.check(loop, neighbours=wild)
        assert all(len(request.output_token_ids) == MAX_TOKENS for request in wild)
    stats = loop.scheduler.stats()
    assert stats.prefix_hits > 0.2 * stats.prefix_queries


def test_the_reference_backend(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.engine.kernels.choose_backend", lambda *_: torch_backend.attend)
    case.check(Loop(case.loaded, random.Random(0), num_blocks=64, max_batch_tokens=100))
