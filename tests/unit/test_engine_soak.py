"""Everything at once on a tiny model: arrivals, tiers, preemption, aborts, failures. Each survivor generates what it would alone."""

from __future__ import annotations

import random
from typing import Any

import pytest

from producer.sampling import SamplingParams
from producer.wire import GenerateRequest
from tests.tiny_engine import RAISING, assert_idle, raising_model, request, tiny_engine
from worker.engine.engine import Engine
from worker.engine.request import Request
from worker.engine.step import StepOutput

SHARED = [9] * 40  # half of the prompts begin with this
SAMPLING: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0},
    {"temperature": 0.9, "top_p": 0.8, "logprobs": 1},
    {"temperature": 1.1, "repetition_penalty": 1.2, "presence_penalty": 0.5},
    {"temperature": 1.0, "top_k": 9, "min_tokens": 3, "stop_token_ids": [20, 40, 60, 80, 100]},
)


def make(index: int, **fields: Any) -> Request:
    rng = random.Random(index)
    prompt = (SHARED if rng.random() < 0.5 else []) + [rng.randrange(256) for _ in range(rng.randint(1, 50))]
    return request(f"r{index}", prompt, rng.randint(1, 14), seed=index, arrival=index, **SAMPLING[index % len(SAMPLING)], **fields)


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    engine, requests = tiny_engine(enable_prefix_caching=False), [make(index) for index in range(40)]
    for item in requests:
        engine.add(item)
        while engine.has_work():
            engine.step()
    return {item.id: item.output_token_ids for item in requests}


def group(engine: Engine, name: str) -> list[Request]:
    params = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=6, ignore_eos=True)
    return engine.inputs.prepare_all(GenerateRequest(id=name, prompt_token_ids=SHARED, params=params))


@pytest.mark.parametrize("seed", range(6))
def test_whoever_survives_writes_what_it_would_alone(expected: dict[str, list[int]], seed: int) -> None:
    rng = random.Random(seed)
    engine = tiny_engine(
        raising_model(),
        num_blocks=rng.choice([40, 60]),
        block_size=rng.choice([4, 16]),
        max_batch_tokens=rng.choice([16, 64]),
        max_batch_size=rng.choice([4, 16]),
        cpu_swap_blocks=rng.choice([0, 60]),
        enable_prefix_caching=rng.random() < 0.7,
        batch_overcommit=4.0,
    )
    arrivals = [[make(i, tier=rng.choice(["realtime", "batch"]), source=rng.choice("abc"))] for i in range(40)]
    arrivals += [[request(f"culprit{i}", [1] * rng.randint(1, 60) + [RAISING], 3)] for i in range(3)]
    arrivals += [group(engine, f"group{i}") for i in range(3)]
    rng.shuffle(arrivals)
    requests = [item for requests in arrivals for item in requests]
    aborted, ends = set(), dict[str, StepOutput]()
    while arrivals or engine.has_work():
        if arrivals and rng.random() < 0.5:
            engine.add_all(arrivals.pop())
        for output in engine.step():
            assert output.request.id not in ends
            if output.finished:
                ends[output.request.id] = output
        if rng.random() < 0.05:
            victim = rng.choice(requests).id
            if victim not in ends and engine.has_work() and not any(victim == item.id for left in arrivals for item in left):
                aborted.add(victim)
                engine.abort(victim)
    assert_idle(engine)
    assert ends.keys() | aborted == {item.id for item in requests}
    assert not ends.keys() & aborted
    survivors = [item for item in requests if item.id in ends and item.id in expected]
    assert {item.id: item.output_token_ids for item in survivors} == {item.id: expected[item.id] for item in survivors}
    assert {ends[name].error_code for name in ends if name.startswith("culprit")} <= {"BATCH_FAILED"}
    outputs = {item.id[-1]: item.output_token_ids for item in requests if item.id in ends and item.id.startswith("group")}
    assert all(item.output_token_ids == outputs[item.id[-1]] for item in requests if item.id in ends and item.id.startswith("group"))
