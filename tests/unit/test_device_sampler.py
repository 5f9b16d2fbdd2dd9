import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from producer.sampling import SamplingParams
from tests.waits import nothing_waits
from worker.engine.device_sampler import is_device_sampled, sample_on_device
from worker.engine.request import UNKNOWN_TOKEN, Request
from worker.engine.sampler import Sampler
from worker.engine.unread import UnreadTokens

VOCAB = 3000
SETTINGS = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 1.0},
    "hot": {"temperature": 3.0},
    "cold": {"temperature": 0.05},
    "top-k": {"temperature": 1.0, "top_k": 40},
    "top-k of most": {"temperature": 1.0, "top_k": 2000},
    "top-p": {"temperature": 0.8, "top_p": 0.9},
    "flat top-p": {"temperature": 3.0, "top_p": 0.99},
    "min-p": {"temperature": 1.2, "min_p": 0.05},
    "all filters": {"temperature": 1.2, "min_p": 0.001, "top_k": 100, "top_p": 0.7},
}


def make_request(seed: int, num_tokens: int = 5, **params: object) -> Request:
    settings = SamplingParams(**params)  # type: ignore[arg-type]  # settings by name, as a caller gives them
    return Request(id=f"r{seed}", prompt_token_ids=[1] * num_tokens, params=settings, max_tokens=8, seed=seed)


def rows(count: int, seed: int, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("name", SETTINGS)
def test_it_chooses_what_the_sampler_chooses(name: str) -> None:
    requests = [make_request(seed, **SETTINGS[name]) for seed in range(60)]
    logits = rows(60, seed=1)
    tokens, good = sample_on_device(logits, requests)
    assert good.all()
    assert tokens.tolist() == [sampled.token_id for sampled in Sampler()(logits, requests)]


def test_a_row_of_a_mixed_batch_is_chosen_as_if_alone() -> None:
    requests = [make_request(seed, **params) for seed, params in enumerate(list(SETTINGS.values()) * 4)]
    logits = rows(len(requests), seed=2).bfloat16()
    alone = [sample_on_device(logits[row : row + 1], requests[row : row + 1]).token_ids.item() for row in range(len(requests))]
    assert sample_on_device(logits, requests).token_ids.tolist() == alone


class Ranked(TorchDispatchMode):
    """Notes what is sorted and selected from, as (rows, how many of each)."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, tuple[int, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("sort", "topk"):
            assert name not in self.seen
            self.seen[name] = tuple(out[0].shape)
        return out


def test_no_row_is_ranked_for_its_neighbours() -> None:
    settings = [SETTINGS["plain"]] * 9 + [SETTINGS["top-p"]] + [SETTINGS["top-k"], {"top_k": 3}, SETTINGS["min-p"], SETTINGS["greedy"]]
    with Ranked() as ranked:
        sample_on_device(rows(len(settings), seed=4), [make_request(seed, **params) for seed, params in enumerate(settings)])
    assert ranked.seen == {"sort": (1, VOCAB), "topk": (2, 64)}


def test_the_unlikely_tokens_are_drawn_as_often_as_they_should_be() -> None:
    """Flat logits: the filterless draw takes the tail as one token; every token must still be as likely as the others."""
    logits = torch.zeros(1, VOCAB)
    logits[0, 0] = 9.0  # all others are more than LIKELY_NATS below, and hold a quarter of the mass
    requests = [make_request(seed, temperature=1.0) for seed in range(400)]
    tokens = sample_on_device(logits.expand(400, -1), requests).token_ids
    share = (tokens != 0).float().mean().item()
    assert abs(share - (VOCAB - 1) / (VOCAB - 1 + torch.tensor(9.0).exp().item())) < 0.08
    assert len(set(tokens[tokens != 0].tolist())) > 60


def test_a_row_that_is_not_finite_is_marked_and_harms_no_other() -> None:
    logits = rows(3, seed=3)
    clean = sample_on_device(logits, [make_request(seed, temperature=1.0) for seed in range(3)])
    logits[1, 7] = torch.nan
    tokens, good = sample_on_device(logits, [make_request(seed, temperature=1.0) for seed in range(3)])
    assert good.tolist() == [True, False, True]
    assert tokens[[0, 2]].tolist() == clean.token_ids[[0, 2]].tolist()


def test_what_needs_the_host_is_left_to_the_sampler() -> None:
    assert is_device_sampled(make_request(0, temperature=1.0, top_p=0.5))
    assert not is_device_sampled(make_request(0, logprobs=2))
    assert is_device_sampled(make_request(0, repetition_penalty=1.1, logit_bias={3: 1.0}, min_tokens=2))


ADJUSTED = {
    "repetition": {"temperature": 0.0, "repetition_penalty": 1.3},
    "presence and frequency": {"temperature": 1.0, "presence_penalty": 1.5, "frequency_penalty": 0.7},
    "bias": {"temperature": 1.0, "top_p": 0.9, "logit_bias": {3: 5.0, 7: -100.0}},
    "min tokens": {"temperature": 0.0, "min_tokens": 3, "stop_token_ids": list(range(10))},
    "all": {"temperature": 1.5, "repetition_penalty": 0.8, "frequency_penalty": -0.5, "logit_bias": {5: 2.0}, "min_tokens": 2, "top_k": 50},
    "none": {"temperature": 1.0},
}


def talking_request(seed: int, **params: object) -> Request:
    """Of few different tokens, so that most of them come again; with up to five in its output."""
    rng = random.Random(seed)
    made = make_request(seed, **params)
    made.prompt_token_ids = [rng.randrange(20) for _ in range(6)]
    made.output_token_ids = [rng.randrange(20) for _ in range(seed % 6)]
    return made


def with_unread_ends(requests: Sequence[Request]) -> tuple[list[Request], UnreadTokens]:
    """The same requests to a host that does not know their last output token."""
    ends = {row: request.output_token_ids[-1] for row, request in enumerate(requests) if request.output_token_ids}
    hidden = [replace(r, output_token_ids=[*r.output_token_ids[:-1], UNKNOWN_TOKEN] if r.output_token_ids else []) for r in requests]
    return hidden, UnreadTokens(list(ends), torch.tensor(list(ends.values())))


def talking_rows(count: int) -> torch.Tensor:
    logits = rows(count, seed=5)
    logits[:, :20] += 8.0
    return logits


@pytest.mark.parametrize("name", [*ADJUSTED, "mixed"])
def test_tokens_that_the_host_has_not_read_count_as_those_that_it_has(name: str) -> None:
    settings = list(ADJUSTED.values()) if name == "mixed" else [ADJUSTED[name]]
    requests = [talking_request(seed, **settings[seed % len(settings)]) for seed in range(60)]
    logits = talking_rows(60)
    hidden, unread = with_unread_ends(requests)
    for _ in range(2):  # what is counted is kept
        with nothing_waits("cpu"):
            tokens, good = sample_on_device(logits, hidden, unread)
        assert good.all()
        assert tokens.tolist() == [sampled.token_id for sampled in Sampler()(logits, requests)]
    for request, known in zip(hidden, requests, strict=True):
        request.output_token_ids = [*known.output_token_ids, seen := request.seed % 20]
        known.output_token_ids.append(seen)
    assert sample_on_device(logits, hidden).token_ids.tolist() == [sampled.token_id for sampled in Sampler()(logits, requests)]


def test_a_row_of_which_everything_is_forbidden_is_marked() -> None:
    logits = talking_rows(2)
    logits[:, 10:] = -torch.inf
    requests = [talking_request(6, **ADJUSTED["min tokens"]), talking_request(1)]
    assert sample_on_device(logits, requests).good.tolist() == [False, True]
    assert [sampled.error_code for sampled in Sampler()(logits, requests)] == ["BATCH_FAILED", None]
