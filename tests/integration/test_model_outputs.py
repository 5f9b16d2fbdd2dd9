"""Several outputs, scores and embeddings of the real model through the queue, against single requests and transformers itself."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from producer.client import Client
from tests.workers import eventually
from worker.engine.inputs import child_seed
from worker.engine.model_loader import local_model_path

STORY = "Once upon a time, in a small village by the river,"
CONTINUATIONS = [" Paris", " Berlin, the capital of Germany", " banana"]


@cache
def own_model() -> tuple[Any, Any]:
    """The tokenizer and the model as run by transformers alone."""
    path = local_model_path("demo")
    return AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(
        path, dtype="float32", attn_implementation="eager"
    ).eval()


def log_likelihood(prompt: str, continuation: str) -> float:
    tokenizer, model = own_model()
    start, token_ids = len(tokenizer(prompt).input_ids), tokenizer(prompt + continuation).input_ids
    with torch.inference_mode():
        logprobs = torch.log_softmax(model(torch.tensor([token_ids])).logits[0].double(), -1)
    return sum(float(logprobs[i - 1, token_ids[i]]) for i in range(start, len(token_ids)))


def mean_hidden_state(prompt: str) -> list[float]:
    tokenizer, model = own_model()
    with torch.inference_mode():
        hidden = model.model(torch.tensor([tokenizer(prompt).input_ids])).last_hidden_state[0].double().mean(0)
    pooled: list[float] = (hidden / hidden.norm()).tolist()
    return pooled


def test_seeded_outputs_are_those_of_single_requests_with_the_derived_seeds(client: Client) -> None:
    options: dict[str, Any] = {"max_tokens": 24, "temperature": 0.9, "top_p": 0.95, "ignore_eos": True, "timeout": 120}
    result = client.submit_and_wait(STORY, n=3, seed=7, **options)
    alone = [client.submit_and_wait(STORY, seed=child_seed(7, i), **options) for i in range(3)]
    assert result.choices is not None
    assert [(choice.text, choice.token_ids) for choice in result.choices] == [(single.text, single.token_ids) for single in alone]
    assert len({choice.text for choice in result.choices}) == 3
    assert result.text == result.choices[0].text
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (alone[0].usage.prompt_tokens, 72)


def test_greedy_outputs_are_equal_and_disturb_no_neighbour(client: Client) -> None:
    neighbour: dict[str, Any] = {"max_tokens": 32, "temperature": 0.8, "seed": 3, "ignore_eos": True, "timeout": 120}
    undisturbed = client.submit_and_wait(STORY, **neighbour).token_ids
    with ThreadPoolExecutor(4) as pool:
        beside = pool.submit(client.submit_and_wait, STORY, **neighbour)
        several = pool.submit(client.submit_and_wait, "The capital of France is", n=4, temperature=0, max_tokens=16, timeout=120)
        scores = pool.submit(client.score, "The capital of France is", CONTINUATIONS, timeout=120)
        embedding = pool.submit(client.embed, STORY, timeout=120)
        assert beside.result().token_ids == undisturbed
    choices = several.result().choices
    assert choices is not None
    assert len({choice.text for choice in choices}) == 1
    assert "Paris" in choices[0].text
    assert scores.result().scores is not None
    assert embedding.result().embedding is not None


def test_scores_are_the_log_probabilities_that_transformers_computes(client: Client) -> None:
    prompt = "The capital of France is"
    result = client.score(prompt, CONTINUATIONS, timeout=120)
    assert result.scores == pytest.approx([log_likelihood(prompt, text) for text in CONTINUATIONS], rel=1e-3)
    tokenizer, _ = own_model()
    lengths = [len(tokenizer(prompt + text).input_ids) for text in CONTINUATIONS]
    num_prompt_tokens = len(tokenizer(prompt).input_ids)
    assert result.usage.prompt_tokens == num_prompt_tokens
    assert result.usage.completion_tokens == sum(lengths) - 3 * num_prompt_tokens


def test_scores_share_a_long_prompt(client: Client) -> None:
    prompt = f"{STORY} there lived {time.time_ns()} millers. " * 8
    result = client.score(prompt, CONTINUATIONS, timeout=120)
    assert result.scores == pytest.approx([log_likelihood(prompt, text) for text in CONTINUATIONS], rel=1e-3)


def test_embedding_is_the_mean_hidden_state_that_transformers_computes(client: Client) -> None:
    for prompt in ("river", STORY * 20):
        assert client.embed(prompt, timeout=120).embedding == pytest.approx(mean_hidden_state(prompt), abs=1e-4)


def test_cancelled_outputs_leave_nothing_running(client: Client) -> None:
    name = next(iter(client.redis.scan_iter(client.keys.worker("*"))))
    handle = client.submit(STORY, n=8, max_tokens=4000, ignore_eos=True)
    eventually(lambda: client.redis.hmget(name, "batch_size", "held") == [b"8", b"1"], "all running")
    assert handle.cancel() == "cancelling"
    eventually(lambda: client.redis.hmget(name, "batch_size", "waiting", "held") == [b"0", b"0", b"0"], "nothing left")
