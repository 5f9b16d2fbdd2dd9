"""The sampler: rows that mind only themselves, filters against a plain reference, draws against the softmax."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from producer.sampling import SamplingParams
from worker.engine.filters import floors
from worker.engine.likely_tokens import LIKELY_NATS, SampledRows, find_likely_tokens
from worker.engine.request import Request
from worker.engine.sampler import Sampler
from worker.engine.step import Sampled

VOCAB = 1000
SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {},
    {"temperature": 0.7},
    {"temperature": 3.0},
    {"top_k": 7},
    {"top_k": 300, "top_p": 0.8},
    {"top_p": 0.3},
    {"top_p": 0.95, "temperature": 1.7},
    {"top_p": 0.999},
    {"min_p": 0.05},
    {"min_p": 0.01, "top_p": 0.9, "top_k": 50},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 1.5, "frequency_penalty": -0.5, "temperature": 0.0},
    {"logit_bias": {3: 5.0, 9: -100.0}},
    {"logprobs": 5},
    {"logprobs": 0, "temperature": 0.0},
    {"min_tokens": 12, "stop_token_ids": [1, 2, 3]},
)


def request(seed: int = 0, output: Sequence[int] = (), prompt: Sequence[int] = (5, 6, 7), **params: Any) -> Request:
    return Request(f"r{seed}", list(prompt), SamplingParams(**params), 64, seed=seed, output_token_ids=list(output))


def random_logits(rows: int, vocab: int = VOCAB, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def draws(logits: Sequence[float], count: int, **params: Any) -> torch.Tensor:
    """How often each token was drawn with ``count`` seeds."""
    rows = torch.tensor(logits).repeat(count, 1)
    tokens = [sampled.token_id for sampled in Sampler()(rows, [request(seed, **params) for seed in range(count)])]
    return torch.bincount(torch.tensor(tokens), minlength=len(logits))


def assert_distributed(counts: torch.Tensor, probabilities: torch.Tensor) -> None:
    """Pearson's chi-square, four standard deviations wide; cells that expect less than 5 are put together."""
    expected = probabilities.double() * counts.sum()
    assert counts[expected == 0].sum() == 0
    rare = expected < 5
    cells = [(float(c), float(e)) for c, e in zip(counts[~rare], expected[~rare], strict=True)]
    if expected[rare].sum() > 0:
        cells.append((float(counts[rare].sum()), float(expected[rare].sum())))
    chi_square = sum((c - e) ** 2 / e for c, e in cells)
    freedom = len(cells) - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)


def kept_by_reference(logits: torch.Tensor, *, temperature: float, min_p: float, top_k: int, top_p: float) -> set[int]:
    """The plainest implementation of the filters, one after the other, over a sorted list; ties are kept together."""
    probabilities = torch.softmax(logits.double() / temperature, -1).tolist()
    order = sorted(range(len(probabilities)), key=lambda token: -probabilities[token])
    order = [token for token in order if probabilities[token] >= min_p * probabilities[order[0]]]
    order = order[:top_k] if top_k > 0 else order
    total, mass, nucleus = sum(probabilities[token] for token in order), 0.0, []
    for token in order:
        if mass >= top_p * total:
            break
        nucleus.append(token)
        mass += probabilities[token]
    least = logits[nucleus[-1]]
    return set(((logits >= least) & (logits > -math.inf)).nonzero()[:, 0].tolist())


def kept_by_floor(logits: torch.Tensor, *, temperature: float, **params: Any) -> set[int]:
    params = {"temperature": temperature, **params}
    rows = SampledRows(logits[None], logits.max()[None], torch.tensor([temperature]), [SamplingParams(**params)])
    likely = find_likely_tokens(rows, rows.top - LIKELY_NATS * rows.temperature)
    kept = (logits >= floors(rows, likely)[0]) & (logits > -math.inf)  # what has no chance needs no filter
    return set(kept.nonzero()[:, 0].tolist())


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


# Rows


def test_greedy_takes_the_likeliest() -> None:
    logits = random_logits(8)
    assert [s.token_id for s in Sampler()(logits, [request(i, temperature=0.0) for i in range(8)])] == logits.argmax(-1).tolist()


def test_no_rows_give_nothing() -> None:
    assert Sampler()(torch.empty(0, VOCAB), []) == []


@pytest.mark.parametrize("vocab", [VOCAB, 49153])
def test_a_row_is_the_same_alone_in_any_company_and_at_any_place(vocab: int, threads: int) -> None:
    rows = [request(i, output=range(i), logprobs=params.get("logprobs", 3), **{k: v for k, v in params.items() if k != "logprobs"})
            for i, params in enumerate(SETTINGS)]  # fmt: skip
    logits = random_logits(len(rows), vocab, seed=threads)
    alone = [Sampler()(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    shuffler = torch.Generator().manual_seed(1)
    for _ in range(4):
        order = torch.randperm(len(rows), generator=shuffler)[: 3 + int(torch.randint(len(rows) - 3, (), generator=shuffler))]
        together = Sampler()(logits[order], [rows[i] for i in order])
        assert together == [alone[i] for i in order]


def test_bad_rows_fail_alone() -> None:
    logits = random_logits(len(SETTINGS))
    requests = [request(i, **params) for i, params in enumerate(SETTINGS)]
    good = Sampler()(logits, requests)
    for bad_row, value in ((0, math.nan), (5, math.nan), (9, math.inf), (14, -math.nan)):
        spoiled = logits.clone()
        spoiled[bad_row, 17] = value
        result = Sampler()(spoiled, requests)
        assert result[bad_row] == Sampled(error_code="BATCH_FAILED")
        assert [r for i, r in enumerate(result) if i != bad_row] == [g for i, g in enumerate(good) if i != bad_row]


def test_a_row_without_any_possible_token_fails() -> None:
    logits = torch.full((2, VOCAB), -math.inf)
    logits[1, 4] = 0.0
    assert Sampler()(logits, [request(0), request(1)]) == [Sampled(error_code="BATCH_FAILED"), Sampled(4)]


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.full((256, VOCAB), -math.inf)
    logits[:, 7] = -3.0
    logits[:, 8] = -40.0
    assert {s.token_id for s in Sampler()(logits, [request(i) for i in range(256)])} == {7}


def test_the_logits_are_left_as_they_were() -> None:
    logits = random_logits(len(SETTINGS))
    before = logits.clone()
    Sampler()(logits, [request(i, output=[1, 2], **params) for i, params in enumerate(SETTINGS)])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_count_as_their_float32_values(dtype: torch.dtype) -> None:
    logits = random_logits(len(SETTINGS)).to(dtype)
    requests = [request(i, output=[1, 2], **params) for i, params in enumerate(SETTINGS)]
    assert Sampler()(logits, requests) == Sampler()(logits.float(), requests)


# Draws


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    logits = random_logits(1, 40, scale=2.0)[0]
    assert_distributed(draws(logits.tolist(), 8000, temperature=temperature), torch.softmax(logits / temperature, -1))


def test_unlikely_tokens_together_get_their_share() -> None:
    logits = torch.full((4000,), -10.2)
    logits[:3] = torch.tensor([0.0, -0.5, -9.8])
    counts, expected = draws(logits.tolist(), 6000), torch.softmax(logits, -1)
    assert_distributed(counts, expected)
    tail = torch.cat([counts[:3], counts[3:].unfold(0, 400, 400).sum(-1)])  # 400 unlikely tokens a cell
    assert tail[3:].sum() > 200
    assert_distributed(tail[: 3 + 9], torch.cat([expected[:3], expected[3:].unfold(0, 400, 400).sum(-1)])[: 3 + 9])


@pytest.mark.parametrize(
    "params", [{"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"min_p": 0.02, "top_k": 8, "top_p": 0.8, "temperature": 1.5}]
)
def test_draws_follow_the_renormalised_filtered_softmax(params: dict[str, Any]) -> None:
    logits = random_logits(1, 40, scale=2.0)[0]
    temperature = params.get("temperature", 1.0)
    kept = kept_by_reference(logits, **({"temperature": 1.0, "min_p": 0.0, "top_k": 0, "top_p": 1.0} | params))
    allowed = torch.tensor([i in kept for i in range(40)])
    expected = torch.softmax((logits / temperature).masked_fill(~allowed, -math.inf), -1)
    assert_distributed(draws(logits.tolist(), 4000, **params), expected)


def test_positions_draw_independently() -> None:
    logits = torch.zeros(4096, 16)
    tokens = torch.tensor([s.token_id for s in Sampler()(logits, [request(1, output=[0] * i) for i in range(4096)])])
    assert_distributed(torch.bincount(tokens, minlength=16), torch.full((16,), 1 / 16))
    pairs = torch.bincount(tokens[:-1] * 16 + tokens[1:], minlength=256)
    assert_distributed(pairs, torch.full((256,), 1 / 256))


def test_a_draw_is_a_function_of_seed_and_position() -> None:
    logits = random_logits(1, scale=0.5)
    first = [Sampler()(logits, [request(3, output=[1] * n)])[0].token_id for n in range(20)]
    resumed = [Sampler()(logits, [request(3, prompt=[5, 6, 7] + [1] * 4, output=[1] * (n - 4))])[0].token_id for n in range(4, 20)]
    other_seed = [Sampler()(logits, [request(4, output=[1] * n)])[0].token_id for n in range(20)]
    assert first[4:] == resumed
    assert first != other_seed
    assert len(set(first)) > 10


def test_a_filter_changes_no_draw_that_it_allows() -> None:
    logits = random_logits(1)
    for seed in range(50):
        free = Sampler()(logits, [request(seed, min_p=1e-9)])[0].token_id
        ranks = logits[0].argsort(descending=True).tolist().index(free) + 1
        assert Sampler()(logits, [request(seed, top_k=ranks)])[0].token_id == free


def test_seeds_of_any_size_are_fine() -> None:
    for seed in (0, -1, 2**63 - 1, -(2**63)):
        assert Sampler()(torch.zeros(1, 9), [request(seed)])[0].error_code is None


@pytest.mark.parametrize("temperature", [1e-300, 1e-6, 1e-5, 1e-3])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = random_logits(4)
    assert [s.token_id for s in Sampler()(logits, [request(i, temperature=temperature) for i in range(4)])] == logits.argmax(-1).tolist()


# Filters

values = st.sampled_from([-math.inf, -20.0, -3.0, -1.0, -0.5, 0.0, 0.25, 1.0, 2.0, 2.5, 7.0])


@example(logits=[-math.inf, -20.0], temperature=0.4, min_p=0.0, top_k=0, top_p=1.0)
@settings(max_examples=150, deadline=None)
@given(
    logits=st.lists(values, min_size=2, max_size=150).filter(lambda v: max(v) > -math.inf),
    temperature=st.sampled_from([0.4, 1.0, 2.0]),
    min_p=st.sampled_from([0.0, 0.03, 0.5, 1.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 70, 1000]),
    top_p=st.sampled_from([0.1, 0.51, 0.93, 1.0]),
)
def test_filters_keep_what_the_plain_reference_keeps(
    logits: list[float], temperature: float, min_p: float, top_k: int, top_p: float
) -> None:
    row = torch.tensor(logits)
    kept = kept_by_floor(row, temperature=temperature, min_p=min_p, top_k=top_k, top_p=top_p)
    assert kept == kept_by_reference(row, temperature=temperature, min_p=min_p, top_k=top_k, top_p=top_p)


@pytest.mark.parametrize("params", [{"top_p": 0.9}, {"top_p": 0.5, "min_p": 0.01}, {"top_k": 3, "top_p": 0.9, "min_p": 0.01}])
def test_confident_rows_need_no_look_at_unlikely_tokens(params: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.full((1, 500), -30.0)
    logits[0, :2] = torch.tensor([5.0, 3.0])
    rows = SampledRows(logits, logits.amax(-1), torch.ones(1), [SamplingParams(**params)])
    likely = find_likely_tokens(rows, rows.top - LIKELY_NATS)
    monkeypatch.setattr("worker.engine.filters.find_likely_tokens", None)
    assert floors(rows, likely).item() in (3.0, 5.0)


@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("top_p", [0.2, 0.9, 0.9999])
def test_a_nucleus_of_any_size_is_complete(scale: float, top_p: float) -> None:
    logits = random_logits(1, 5000, scale=scale)[0]
    kept = kept_by_floor(logits, temperature=1.0, min_p=0.0, top_k=0, top_p=top_p)
    assert kept == kept_by_reference(logits, temperature=1.0, min_p=0.0, top_k=0, top_p=top_p)


# Log-probabilities


def test_logprobs_are_the_models_own() -> None:
    logits = random_logits(3)
    requests = [
        request(0, logprobs=4, temperature=0.2, top_k=3),
        request(1, logprobs=0, logit_bias={9: 100.0}, temperature=0.0),
        request(2, logprobs=20, repetition_penalty=5.0, output=[1, 2, 3]),
    ]
    own = torch.log_softmax(logits, -1)
    for row, (asked, sampled) in enumerate(zip(requests, Sampler()(logits, requests), strict=True)):
        assert sampled.logprob is not None
        assert sampled.logprob.token_id == sampled.token_id
        assert sampled.logprob.logprob == own[row, sampled.token_id].item()
        best = own[row].topk(asked.params.logprobs or 0)
        assert list(sampled.logprob.top.items()) == list(zip(best.indices.tolist(), best.values.tolist(), strict=True))


def test_top_logprobs_of_equal_value_are_the_least_ids() -> None:
    logits = torch.zeros(1, VOCAB)
    sampled = Sampler()(logits, [request(0, logprobs=3, temperature=0.0)])[0]
    assert sampled.logprob is not None
    assert list(sampled.logprob.top) == [0, 1, 2]


def test_a_vocabulary_smaller_than_the_logprobs_asked_for() -> None:
    sampled = Sampler()(torch.tensor([[0.0, 1.0, 2.0]]), [request(0, logprobs=20, temperature=0.0)])[0]
    assert sampled.logprob is not None
    assert list(sampled.logprob.top) == [2, 1, 0]
