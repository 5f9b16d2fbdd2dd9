"""The runner on a small random Llama in float32: what each kind of request gets, and what failures leave behind."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import structlog
import torch

from producer.errors import ModelUnavailable
from producer.sampling import SamplingParams
from producer.wire import Kind
from tests.tiny_engine import tiny_runner
from tests.tiny_models import ARCHITECTURES, VOCAB_SIZE, tiny_model
from worker.engine.arithmetic import ceil_div
from worker.engine.cuda_graphs import DecodeGraphs
from worker.engine.device_sampler import sample_on_device
from worker.engine.kernels import Kernels
from worker.engine.model_loader import LoadedModel, prepare_model
from worker.engine.model_runner import ModelRunner
from worker.engine.request import Request
from worker.engine.step import Sampled, ScheduledChunk, StepPlan

LENGTHS = (30, 1, 17)


@pytest.fixture(scope="module")
def own() -> Any:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def shared_runner(own: Any) -> ModelRunner:
    return tiny_runner(prepare_model(copy.deepcopy(own), None, "tiny"))


@pytest.fixture
def runner(shared_runner: ModelRunner) -> Iterator[ModelRunner]:
    yield shared_runner
    shared_runner.cache.clear(16)


def requests(kind: Kind, **fields: Any) -> list[Request]:
    """One of each of `LENGTHS`, with blocks for all of its tokens."""
    generator = torch.Generator().manual_seed(3)
    made, block = [], 0
    for length in LENGTHS:
        blocks = ceil_div(length, 16)
        token_ids = torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist()
        params = SamplingParams(temperature=0.0)
        made.append(Request(str(length), token_ids, params, 1, kind=kind, block_ids=list(range(block, block + blocks)), **fields))
        block += blocks
    return made


def run_in_chunks(runner: ModelRunner, asked: list[Request], size: int) -> list[Sampled]:
    """All requests side by side, in chunks of ``size`` tokens."""
    found: dict[Request, Sampled] = {}
    for start in range(0, max(request.num_tokens for request in asked), size):
        chunks = [
            ScheduledChunk(request, start, min(size, request.num_tokens - start), start + size >= request.num_tokens)
            for request in asked
            if start < request.num_tokens
        ]
        chunks.sort(key=lambda chunk: chunk.num_tokens > 1)
        results = runner.run(StepPlan(chunks))
        assert [result is not None for result in results] == [chunk.last for chunk in chunks]
        found |= {chunk.request: result for chunk, result in zip(chunks, results, strict=True) if result is not None}
    return [found[request] for request in asked]


@torch.inference_mode()
def own_logits(own: Any, request: Request) -> torch.Tensor:
    return own(input_ids=torch.tensor([request.prompt_token_ids])).logits[0]


@pytest.mark.parametrize("size", [1, 4, 16, 30])
def test_generate_yields_the_likeliest_token(runner: ModelRunner, own: Any, size: int) -> None:
    asked = requests("generate")
    results = run_in_chunks(runner, asked, size)
    assert [result.token_id for result in results] == [int(own_logits(own, request)[-1].argmax()) for request in asked]


@pytest.mark.parametrize("size", [1, 4, 16, 30])
@pytest.mark.parametrize("score_start", [1, 5, 16, 17])
def test_score_sums_the_log_probabilities_from_its_start_on(runner: ModelRunner, own: Any, size: int, score_start: int) -> None:
    asked = requests("score", score_start=score_start)
    assert run_in_chunks(runner, asked, size) == [Sampled()] * len(asked)
    for request in asked:
        logprobs = own_logits(own, request).double().log_softmax(-1)
        targets = request.prompt_token_ids[score_start:]
        expected = sum(logprobs[score_start - 1 + i, token].item() for i, token in enumerate(targets))
        assert request.score == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("size", [1, 4, 16, 30])
def test_embed_is_the_mean_of_the_last_hidden_states_of_length_one(runner: ModelRunner, own: Any, size: int) -> None:
    asked = requests("embed")
    for request, result in zip(asked, run_in_chunks(runner, asked, size), strict=True):
        with torch.inference_mode():
            hidden = own.model(input_ids=torch.tensor([request.prompt_token_ids])).last_hidden_state[0]
        assert result.embedding is not None
        torch.testing.assert_close(
            torch.tensor(result.embedding), torch.nn.functional.normalize(hidden.mean(0), dim=0), rtol=1e-4, atol=1e-5
        )


def test_kinds_mix_in_one_step(runner: ModelRunner) -> None:
    alone = [run_in_chunks(runner, requests(kind), 30)[0] for kind in ("generate", "embed")]
    scored = requests("score", score_start=1)[0]
    run_in_chunks(runner, [scored], 30)
    mixed = requests("generate")[0], requests("score", score_start=1)[0], requests("embed")[0]
    for i, request in enumerate(mixed):
        request.block_ids = [2 * i, 2 * i + 1]
    results = run_in_chunks(runner, list(mixed), 30)
    assert results[0] == alone[0]
    assert mixed[1].score == pytest.approx(scored.score, rel=1e-5)
    assert results[2].embedding == pytest.approx(alone[1].embedding, abs=1e-5)


def outcome(request: Request, result: Sampled) -> list[float]:
    assert result.error_code is None
    return [result.token_id, request.score, *(result.embedding or [])]


@pytest.mark.parametrize("kind", ["generate", "score", "embed"])
def test_a_request_of_nan_fails_alone_and_its_blocks_harm_nobody_later(own: Any, kind: Kind) -> None:
    model = copy.deepcopy(own)
    runner = tiny_runner(prepare_model(model, None, "tiny"))
    asked = requests(kind, score_start=1)
    expected = [outcome(*pair) for pair in zip(asked, run_in_chunks(runner, asked, 7), strict=True)]

    asked = requests(kind, score_start=1)
    culprit = asked[2].prompt_token_ids[4]
    assert culprit not in asked[0].prompt_token_ids + asked[1].prompt_token_ids
    model.get_input_embeddings().weight.data[culprit] = torch.nan
    results = run_in_chunks(runner, asked, 7)
    assert results[2].error_code == "BATCH_FAILED"
    assert [outcome(*pair) for pair in zip(asked[:2], results[:2], strict=True)] == expected[:2]

    heir = requests(kind, score_start=1)[1]
    heir.block_ids = asked[2].block_ids
    assert outcome(heir, run_in_chunks(runner, [heir], 7)[0]) == pytest.approx(expected[1], rel=1e-4, abs=1e-5)


def test_a_step_that_fails_changes_no_request_and_may_be_run_again(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = requests("score", score_start=1), requests("embed")
    for asked in expected:
        run_in_chunks(runner, asked, 30)
    scored, embedded = requests("score", score_start=1)[0], requests("embed")[0]
    embedded.block_ids = [8, 9]
    plan = StepPlan([ScheduledChunk(scored, 0, 30, True), ScheduledChunk(embedded, 0, 20, False)])
    with monkeypatch.context() as patch:
        patch.setattr(runner, "_sampler", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            runner.run(plan)
    assert (scored.score, embedded.pooled) == (0.0, None)
    runner.run(plan)
    assert scored.score == pytest.approx(expected[0][0].score, rel=1e-6)


def test_it_says_what_serves(own: Any) -> None:
    runner = tiny_runner(prepare_model(copy.deepcopy(own), None, "tiny"), attention="torch")
    assert runner.kernels == Kernels(attention="torch", fused=False, cuda_graphs=False)


def test_the_probe_leaves_the_cache_clean(own: Any) -> None:
    runner = tiny_runner(prepare_model(copy.deepcopy(own), None, "tiny"))
    assert not any(tensor.any() for pair in runner.cache.layers for tensor in pair)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_two_runners_may_be_made_and_run_in_two_threads(architecture: str) -> None:
    models = [prepare_model(tiny_model(architecture, seed), None, "tiny") for seed in (0, 1)]

    def serve(loaded: LoadedModel) -> list[Sampled]:
        runner = tiny_runner(loaded)
        return [result for _ in range(10) for result in run_in_chunks(runner, requests("generate"), 7)]

    expected = [serve(loaded) for loaded in models]
    assert expected[0] != expected[1]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(serve, models)) == expected


@pytest.mark.parametrize(("dtype", "instructions", "warns"), [("auto", False, True), ("auto", True, False), ("bfloat16", False, False)])
def test_bfloat16_that_turned_out_slow_is_warned_of(
    own: Any, monkeypatch: pytest.MonkeyPatch, dtype: str, instructions: bool, warns: bool
) -> None:
    """As if a model's architecture is one that our kernels run, but one of its sizes is not."""
    monkeypatch.setattr("worker.engine.kernels.computes_bfloat16", lambda _: instructions)
    loaded = prepare_model(copy.deepcopy(own).to(torch.bfloat16), None, "tiny")
    with structlog.testing.capture_logs() as log:
        tiny_runner(loaded, dtype=dtype, attention="torch")
    assert any("float32 is faster" in line["event"] for line in log) is warns


class CompilationError(Exception):
    """As Triton's, which is no RuntimeError."""


@pytest.mark.parametrize("error", [RuntimeError, ModelUnavailable, CompilationError])
def test_a_model_whose_steps_cannot_be_captured_runs_without_graphs(
    own: Any, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def refuse(*_: Any) -> DecodeGraphs:
        raise error("cannot be captured")

    monkeypatch.setattr(ModelRunner, "_captures", lambda _: True)
    monkeypatch.setattr("worker.engine.model_runner.DecodeGraphs", refuse)
    with structlog.testing.capture_logs() as log:
        runner = tiny_runner(prepare_model(copy.deepcopy(own), None, "tiny"))
    assert [line["error"] for line in log if "without CUDA graphs" in line["event"]] == [error.__name__]
    assert len(run_in_chunks(runner, requests("generate"), 7)) == len(LENGTHS)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_step_that_is_measured_yields_logits_that_can_be_sampled(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `_step_bytes` measures on CUDA, of every kind of model."""
    runner = tiny_runner(prepare_model(tiny_model(architecture), None, "tiny"), num_blocks=32, max_batch_size=3)
    sampled = []
    monkeypatch.setattr("worker.engine.model_runner.sample_on_device", lambda *given: sampled.append(sample_on_device(*given)))
    monkeypatch.setattr("worker.engine.model_runner.peak_memory_bytes", lambda _, work: work() or 1)
    assert runner._step_bytes() == 1
    assert [tokens.good.tolist() for tokens in sampled] == [[True] * 3]
    assert runner._hidden is None
