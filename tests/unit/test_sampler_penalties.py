"""Bias, minimum length and penalties: against dense arithmetic, and kept right as tokens come."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from producer.sampling import SamplingParams
from worker.engine.penalties import TokenCounts, adjust_logits, adjusts
from worker.engine.request import Request
from worker.engine.sampler import Sampler

VOCAB = 30
tokens = st.lists(st.integers(0, VOCAB - 1), max_size=40)


def request(prompt: Sequence[int], output: Sequence[int], **params: Any) -> Request:
    return Request("r", list(prompt), SamplingParams(**params), 64, output_token_ids=list(output), eos_token_ids=frozenset({0}))


def adjusted(logits: torch.Tensor, *requests: Request) -> torch.Tensor:
    logits = logits.clone()
    adjust_logits(logits, requests)
    return logits


def by_hand(logits: list[float], r: Request) -> list[float]:
    p, result = r.params, []
    for token, logit in enumerate(logits):
        value = logit + p.logit_bias.get(token, 0.0)
        if len(r.output_token_ids) < p.min_tokens and token in {*r.eos_token_ids, *p.stop_token_ids}:
            value = -math.inf
        count = r.output_token_ids.count(token)
        if count or token in r.prompt_token_ids:
            value = value / p.repetition_penalty if value > 0 else value * p.repetition_penalty
        value -= p.frequency_penalty * count + p.presence_penalty * (count > 0)
        result.append(value)
    return result


requests = st.builds(
    request,
    tokens,
    tokens,
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.75, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.5, -0.25]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100, width=32), max_size=4),
    min_tokens=st.sampled_from([0, 5, 30]),
    stop_token_ids=st.lists(st.integers(0, VOCAB - 1), max_size=3),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(requests, min_size=1, max_size=6), st.integers(0, 2**31))
def test_adjusted_logits_equal_dense_arithmetic(batch: list[Request], seed: int) -> None:
    logits = torch.randn(len(batch), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    expected = torch.tensor([by_hand(row, r) for row, r in zip(logits.tolist(), batch, strict=True)])
    torch.testing.assert_close(adjusted(logits, *batch), expected, rtol=1e-5, atol=1e-5)


@settings(max_examples=100, deadline=None)
@given(prompt=tokens, output=tokens, steps=st.lists(st.integers(1, 5), max_size=10))
def test_counts_kept_step_by_step_equal_counts_made_at_once(prompt: list[int], output: list[int], steps: list[int]) -> None:
    growing = request(prompt, [], repetition_penalty=1.2)
    counts = TokenCounts(growing)
    for step in [*steps, len(output)]:
        growing.output_token_ids += output[len(growing.output_token_ids) :][:step]
        counts.catch_up(growing.output_token_ids)
    fresh = TokenCounts(request(prompt, output, repetition_penalty=1.2))
    assert dict(zip(counts.token_ids.tolist(), counts.counts.tolist(), strict=True)) == dict(
        zip(fresh.token_ids.tolist(), fresh.counts.tolist(), strict=True)
    )


def test_penalties_follow_their_request_through_permuted_batches() -> None:
    batch = [request([1, 2, i], [], repetition_penalty=1.5, frequency_penalty=0.3 * i, temperature=0.0) for i in range(6)]
    alone = [
        request(r.prompt_token_ids, [], repetition_penalty=1.5, frequency_penalty=0.3 * i, temperature=0.0) for i, r in enumerate(batch)
    ]
    generator = torch.Generator().manual_seed(0)
    for _ in range(12):
        logits = torch.randn(6, VOCAB, generator=generator)
        order = torch.randperm(6, generator=generator)
        for i, sampled in zip(order.tolist(), Sampler()(logits[order], [batch[i] for i in order]), strict=True):
            batch[i].output_token_ids.append(sampled.token_id)
        for i, single in enumerate(alone):
            single.output_token_ids.append(Sampler()(logits[i : i + 1], [single])[0].token_id)
    assert [r.output_token_ids for r in batch] == [r.output_token_ids for r in alone]


def test_stop_tokens_wait_for_min_tokens() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 0], logits[0, 4], logits[0, 9] = 9.0, 8.0, 7.0
    early = request([1], [2, 2], min_tokens=3, stop_token_ids=[4], temperature=0.0)
    late = request([1], [2, 2, 2], min_tokens=3, stop_token_ids=[4], temperature=0.0)
    assert [Sampler()(logits, [r])[0].token_id for r in (early, late)] == [9, 0]


def test_the_penalised_prompt_counts_for_repetition_only() -> None:
    logits = torch.ones(1, VOCAB)
    assert adjusted(logits, request([3], [], presence_penalty=1.0, frequency_penalty=1.0))[0, 3] == 1.0
    assert adjusted(logits, request([3], [], repetition_penalty=2.0))[0, 3] == 0.5
    assert adjusted(-logits, request([3], [], repetition_penalty=2.0))[0, 3] == -2.0


def test_defaults_adjust_nothing() -> None:
    assert not adjusts(request([1], [2]))
    assert not adjusts(request([1], [2, 2], min_tokens=2))
    assert adjusts(request([1], [2], min_tokens=2))
