"""The engine's loop on a tiny model: how outputs end, what a failure costs, resumes, several outputs, scores."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from producer.errors import BatchFailed, ContextLengthExceeded, InvalidRequest, ModelUnavailable
from producer.sampling import SamplingParams
from producer.wire import GenerateRequest
from tests.tiny_engine import (
    EOS,
    RAISING,
    assert_idle,
    byte_tokenizer,
    computed_tokens,
    loaded_model,
    raising_model,
    request,
    run,
    tiny_engine,
)
from tests.tiny_models import VOCAB_SIZE, tiny_model
from worker.engine.engine import Engine
from worker.engine.failures import EXHAUSTED_AFTER, FatalDeviceError
from worker.engine.model_loader import prepare_model
from worker.engine.request import Request
from worker.engine.step import StepPlan
from worker.engine.step_clock import PHASES

OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory")
POISON = 317  # a token whose embedding is NaN in `poisoned`
WILD: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 4},
    {"temperature": 1.2, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "logprobs": 2, "seed": 5},
    {"temperature": 2.0, "min_p": 0.05, "logit_bias": {7: 3.0}, "seed": 6},
    {"temperature": 1.0, "presence_penalty": 1.0, "min_tokens": 5, "stop_token_ids": [1, 2, 3], "seed": 7},
)


def prompts(count: int, seed: int = 0, longest: int = 60) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(256) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def wild_requests(count: int = 12, **fields: Any) -> list[Request]:
    return [
        request(f"r{i}", prompt, 10, **{"arrival": i, **fields, **WILD[i % len(WILD)], "seed": i})
        for i, prompt in enumerate(prompts(count))
    ]


def tokens_of(requests: Sequence[Request]) -> dict[str, list[int]]:
    return {r.id: r.output_token_ids for r in requests}


def alone(requests: Sequence[Request]) -> dict[str, list[int]]:
    engine = tiny_engine(enable_prefix_caching=False)
    for item in requests:
        run(engine, [item])
    return tokens_of(requests)


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    """The output of each of `wild_requests` when it is alone."""
    return alone(wild_requests())


@pytest.fixture(scope="module")
def poisoned() -> Any:
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[POISON] = torch.nan
    return prepare_model(model, byte_tokenizer(), "poisoned")


# Outputs


def test_outputs_come_token_by_token_and_the_last_says_why() -> None:
    item = request("r", [1, 2, 3], 5)
    outputs = run(tiny_engine(), [item])["r"]
    assert [output.index for output in outputs] == [0, 1, 2, 3, 4]
    assert [output.token_ids for output in outputs] == [[token] for token in item.output_token_ids]
    assert [output.finish_reason for output in outputs] == [None] * 4 + ["length"]


def test_neighbours_and_chunks_change_no_token(expected: dict[str, list[int]]) -> None:
    for settings in ({}, {"max_batch_tokens": 16, "max_batch_size": 5}, {"num_blocks": 12}, {"policy": "static", "max_wait_ms": 1.0}):
        requests = wild_requests()
        random.Random(1).shuffle(requests)
        run(tiny_engine(**settings), requests)
        assert tokens_of(requests) == expected


def test_preempted_batch_requests_write_the_same(expected: dict[str, list[int]]) -> None:
    for cpu_swap_blocks in (0, 100):
        requests = wild_requests(tier="batch")
        engine = tiny_engine(num_blocks=40, block_size=4, batch_overcommit=8.0, realtime_reserved=0.0, cpu_swap_blocks=cpu_swap_blocks)
        run(engine, requests)
        assert tokens_of(requests) == expected
        assert engine.stats().recompute_preemptions + engine.stats().swap_preemptions > 0


def test_logprobs_are_one_a_token_even_after_preemption() -> None:
    requests = [request(f"r{i}", prompt, 10, logprobs=3, tier="batch", arrival=i) for i, prompt in enumerate(prompts(12))]
    engine = tiny_engine(num_blocks=40, block_size=4, batch_overcommit=8.0, realtime_reserved=0.0)
    outputs = run(engine, requests)
    assert engine.stats().recompute_preemptions > 0
    for item in requests:
        assert [entry.token_id for entry in item.logprobs] == item.output_token_ids
        assert [entry for output in outputs[item.id] for entry in output.logprobs or ()] == item.logprobs


def test_eos_as_first_token_ends_with_that_token() -> None:
    first = alone([request("r", [1, 2, 3], 1)])["r"]
    item = request("r", [1, 2, 3], 5, eos_token_ids=frozenset(first))
    (output,) = run(tiny_engine(), [item])["r"]
    assert (output.token_ids, output.finish_reason, output.stop_reason) == (first, "stop", None)


def test_a_stop_token_ends_and_is_named() -> None:
    tokens = alone([request("r", [1, 2, 3], 5)])["r"]
    stop = next(token for i, token in enumerate(tokens) if i and token not in tokens[:i])
    outputs = run(tiny_engine(), [request("r", [1, 2, 3], 5, stop_token_ids=[stop])])["r"]
    assert [token for output in outputs for token in output.token_ids] == tokens[: tokens.index(stop) + 1]
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", stop)


def test_no_stop_before_min_tokens() -> None:
    tokens = alone([request("r", [1, 2, 3], 9)])["r"]
    item = request("r", [1, 2, 3], 9, eos_token_ids=frozenset(tokens), min_tokens=4)
    run(tiny_engine(), [item])
    assert len(item.output_token_ids) > 4
    assert not set(item.output_token_ids[:4]) & set(tokens)


def test_abort_at_every_step_leaves_the_others_as_they_were(expected: dict[str, list[int]]) -> None:
    for steps in range(14):
        requests, engine = wild_requests(), tiny_engine(num_blocks=30, max_batch_tokens=32)
        for item in requests:
            engine.add(item)
        for _ in range(steps):
            engine.step()
        for item in requests[::3]:
            engine.abort(item.id)
        survivors = [item for i, item in enumerate(requests) if i % 3]
        assert run(engine).keys() <= {item.id for item in survivors}
        assert tokens_of(survivors) == {item.id: expected[item.id] for item in survivors}


def test_aborting_what_is_not_there_is_no_error() -> None:
    engine = tiny_engine()
    engine.abort("nobody")
    item = request("r", [1], 2)
    run(engine, [item])
    engine.abort("r")
    assert len(item.output_token_ids) == 2


# Failures


@pytest.mark.parametrize("place", range(0, 12, 3))
def test_what_makes_a_step_fail_is_ended_alone(expected: dict[str, list[int]], place: int) -> None:
    requests = wild_requests()
    culprit = request("culprit", [5, RAISING, 6], 5)
    outputs = run(tiny_engine(raising_model(), max_batch_tokens=512), [*requests[:place], culprit, *requests[place:]])
    (failed,) = outputs["culprit"]
    assert (failed.error_code, failed.token_ids) == ("BATCH_FAILED", [])
    assert tokens_of(requests) == expected


def test_a_late_chunk_that_fails_ends_its_request_alone(expected: dict[str, list[int]]) -> None:
    requests = wild_requests()
    culprit = request("culprit", [5] * 200 + [RAISING], 5)
    outputs = run(tiny_engine(raising_model()), [culprit, *requests])
    assert outputs["culprit"][-1].error_code == "BATCH_FAILED"
    assert tokens_of(requests) == expected


def test_every_request_failing_leaves_an_engine_that_works() -> None:
    engine = tiny_engine(raising_model())
    outputs = run(engine, [request(f"r{i}", [RAISING], 5) for i in range(7)])
    assert {output.error_code for (output,) in outputs.values()} == {"BATCH_FAILED"}
    assert run(engine, [request("next", [1], 2)])["next"][-1].finish_reason == "length"


def fail_steps(engine: Engine, monkeypatch: pytest.MonkeyPatch, error: Exception, fails: Callable[[StepPlan], bool]) -> None:
    step = engine.runner.run

    def run_or_fail(plan: StepPlan) -> Any:
        if fails(plan):
            raise error
        return step(plan)

    monkeypatch.setattr(engine.runner, "run", run_or_fail)


@pytest.mark.parametrize("error", [OUT_OF_MEMORY, MemoryError(), RuntimeError("DefaultCPUAllocator: not enough memory")])
def test_memory_running_out_has_a_code_of_its_own(
    expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    engine = tiny_engine(max_batch_tokens=512)
    fail_steps(engine, monkeypatch, error, lambda plan: any(chunk.request.id == "culprit" for chunk in plan.chunks))
    requests = wild_requests()
    outputs = run(engine, [request("culprit", [1], 3), *requests])
    assert outputs["culprit"][-1].error_code == "OUT_OF_MEMORY"
    assert tokens_of(requests) == expected


@pytest.mark.parametrize(("waves", "num_answered"), [([20], 0), ([1] * 20, 7)], ids=["in one batch", "one by one"])
def test_a_device_without_memory_is_given_up_before_it_has_failed_everything(
    monkeypatch: pytest.MonkeyPatch, waves: list[int], num_answered: int
) -> None:
    engine, answered = tiny_engine(), []
    fail_steps(engine, monkeypatch, OUT_OF_MEMORY, lambda _: True)

    def serve() -> None:
        for wave, count in enumerate(waves):
            for i in range(count):
                engine.add(request(f"r{wave}-{i}", [i], 5))
            answered.extend(engine.step())

    with pytest.raises(FatalDeviceError, match="out of memory: 8 requests in a row"):
        serve()
    assert [output.error_code for output in answered] == ["OUT_OF_MEMORY"] * num_answered


def test_requests_too_large_for_the_device_are_no_end_of_it_while_others_succeed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine()
    fail_steps(engine, monkeypatch, OUT_OF_MEMORY, lambda plan: any(chunk.request.id.startswith("large") for chunk in plan.chunks))
    for round_ in range(3):
        outputs = run(engine, [request(f"large{round_}{i}", [i], 5) for i in range(7)])
        assert {output.error_code for (output,) in outputs.values()} == {"OUT_OF_MEMORY"}
        assert run(engine, [request("small", [1], 2)])["small"][-1].finish_reason == "length"


def test_requests_larger_than_all_that_succeeded_are_no_end_of_the_device_however_many_come(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine(max_batch_tokens=256)
    run(engine, [request("small", [1] * 60, 2)])
    fail_steps(engine, monkeypatch, OUT_OF_MEMORY, lambda _: True)
    outputs = run(engine, [request(f"large{i}", [i] * 100, 5) for i in range(3 * EXHAUSTED_AFTER)])
    assert {output.error_code for (output,) in outputs.values()} == {"OUT_OF_MEMORY"}
    with pytest.raises(FatalDeviceError, match="out of memory"):
        run(engine, [request(f"as before{i}", [i] * 60, 5) for i in range(EXHAUSTED_AFTER)])


def test_a_row_of_nan_fails_alone_and_its_blocks_can_be_used_again(poisoned: Any, expected: dict[str, list[int]]) -> None:
    engine = tiny_engine(poisoned, num_blocks=40)
    for _ in range(3):
        requests = wild_requests()
        sick = [request(f"sick{i}", [1] * (20 * i + 5) + [POISON, 2], 5, arrival=i) for i in range(3)]
        outputs = run(engine, [*sick, *requests])
        assert {output.error_code for item in sick for output in outputs[item.id]} == {"BATCH_FAILED"}
        assert tokens_of(requests) == expected


def test_nobody_begins_with_the_blocks_of_a_row_that_failed() -> None:
    engine = tiny_engine(enable_prefix_caching=True)
    cache = engine.runner.cache
    prompt = list(range(50))
    engine.add(request("sick", prompt, 20))
    engine.step()
    for keys, _ in cache.layers:
        keys.fill_(torch.nan)  # the device had a moment's fault
    (failed,) = run(engine, [])["sick"][-1:]
    assert failed.error_code == "BATCH_FAILED"
    cache.clear(engine.runner.num_blocks)
    well = request("well", prompt, 5)
    assert run(engine, [well])["well"][-1].finish_reason == "length"
    assert well.num_cached_tokens == 0


# Resumes


def test_a_resumed_request_goes_on_as_if_it_had_never_stopped(expected: dict[str, list[int]]) -> None:
    engine = tiny_engine()
    for split in (1, 4, 9):
        requests = wild_requests()
        for item in requests:
            item.output_token_ids = expected[item.id][:split]
        outputs = run(engine, [item for item in requests if len(expected[item.id]) > split])
        assert tokens_of([item for item in requests if item.id in outputs]) == {key: expected[key] for key in outputs}
        assert {first.index for first, *_ in outputs.values()} == {split}


def test_a_resumed_request_that_had_ended_ends_without_another_token() -> None:
    engine = tiny_engine()
    requests = [
        request("eos", [1, 2], 9, output_token_ids=[5, EOS], eos_token_ids=frozenset({EOS})),
        request("stop", [1, 2], 9, output_token_ids=[5, 7], stop_token_ids=[7]),
        request("length", [1, 2], 2, output_token_ids=[5, 7]),
    ]
    outputs = run(engine, requests)
    ends = {key: (output.finish_reason, output.stop_reason, output.index, output.token_ids) for key, (output,) in outputs.items()}
    assert ends == {"eos": ("stop", None, 2, []), "stop": ("stop", 7, 2, []), "length": ("length", None, 2, [])}
    engine.add(request("aborted", [1, 2], 2, output_token_ids=[5, 7]))
    engine.abort("aborted")
    assert not engine.has_work()
    assert engine.step() == []


# Several outputs of one prompt


def wanted(request_id: str = "r", **fields: Any) -> GenerateRequest:
    own = {name: fields.pop(name) for name in GenerateRequest.__dataclass_fields__ if name in fields}
    return GenerateRequest(id=request_id, params=SamplingParams(**fields), **own)


@pytest.mark.parametrize("caching", [True, False])
def test_n_outputs_compute_their_prompt_once(caching: bool) -> None:
    engine = tiny_engine(enable_prefix_caching=caching)
    prompt = prompts(1, longest=1)[0] * 100
    params = {"n": 5, "temperature": 1.0, "max_tokens": 6, "seed": 11, "ignore_eos": True}
    together = engine.inputs.prepare_all(wanted(prompt_token_ids=prompt, **params))
    singly = engine.inputs.prepare_all(wanted(prompt_token_ids=prompt, **params))
    assert computed_tokens(engine, together) <= 100 + 5 * 6 + 4 * 16
    assert list(tokens_of(together).values()) == list(alone(singly).values())
    assert len({tuple(tokens) for tokens in tokens_of(together).values()}) > 1


def test_n_outputs_of_one_token_or_of_a_short_prompt_work_too() -> None:
    engine = tiny_engine()
    for prompt, max_tokens in (([1] * 100, 1), ([1, 2], 5)):
        requests = engine.inputs.prepare_all(wanted(prompt_token_ids=prompt, n=4, max_tokens=max_tokens, ignore_eos=True))
        engine.add_all(requests)
        run(engine)
        assert {len(item.output_token_ids) for item in requests} == {max_tokens}


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_the_other_outputs_do_without_the_one_that_is_aborted(steps: int) -> None:
    engine = tiny_engine()
    fields = {"prompt_token_ids": [1] * 150, "n": 4, "max_tokens": 5, "seed": 2, "ignore_eos": True}
    requests = engine.inputs.prepare_all(wanted(**fields))
    engine.add_all(requests)
    for _ in range(steps):
        engine.step()
    engine.abort(requests[0].id)
    engine.abort(requests[2].id)
    run(engine)
    again = engine.inputs.prepare_all(wanted("again", **fields))
    expected = alone(again)
    assert [requests[i].output_token_ids for i in (1, 3)] == [expected[f"again#{i}"] for i in (1, 3)]


# Scores


def test_continuations_compute_their_prompt_once_and_score_as_without_a_cache() -> None:
    scores, computed = [], []
    for caching in (True, False):
        engine = tiny_engine(enable_prefix_caching=caching, max_batch_tokens=32)
        requests = engine.inputs.prepare_all(wanted(prompt="x" * 90, kind="score", continuations=["abc", "b" * 70, "zz"]))
        computed.append(computed_tokens(engine, requests))
        scores.append([item.score for item in requests])
    assert scores[0] == pytest.approx(scores[1], rel=1e-4)
    assert computed[0] < 90 + 3 + 70 + 2 + 3 * 16 < computed[1]


@pytest.mark.parametrize("prompt", ["x" * 5, "x" * 40], ids=["at once", "behind the first"])
def test_a_continuation_that_can_never_fit_has_none_of_its_request_begin(prompt: str) -> None:
    engine = tiny_engine(num_blocks=4)
    requests = engine.inputs.prepare_all(wanted(prompt=prompt, kind="score", continuations=["a", "b" * 60]))
    with pytest.raises(ContextLengthExceeded):
        engine.add_all(requests)
    assert not engine.has_work()
    assert run(engine, [request("fine", [1] * 50, 10)])["fine"][-1].finish_reason == "length"


# Without a queue


def test_generate_gives_results_in_order() -> None:
    engine = tiny_engine()
    results = engine.generate(["first", "second prompt"], temperature=0.0, max_tokens=4, ignore_eos=True)
    assert [result.text for result in results] == [engine.generate(text, temperature=0.0, max_tokens=4, ignore_eos=True)[0].text for text in ("first", "second prompt")]  # fmt: skip  # noqa: E501
    assert [result.usage.prompt_tokens for result in results] == [5, 13]
    assert {(result.finish_reason, result.model, len(result.token_ids)) for result in results} == {("length", "tiny", 4)}


def test_generate_takes_every_kind_of_request() -> None:
    engine = tiny_engine()
    chat, score, embed, several = engine.generate(
        [
            wanted("chat", messages=[{"role": "user", "content": "hi"}], max_tokens=3, logprobs=2, temperature=0.0, ignore_eos=True),
            wanted("score", prompt="a", kind="score", continuations=["b", "c"]),
            wanted("embed", prompt="a", kind="embed"),
            wanted("several", prompt="a", n=3, max_tokens=2, ignore_eos=True),
        ]
    )
    assert chat.usage.prompt_tokens == len("user: hi\nassistant:")
    assert [len(entry.top) for entry in chat.logprobs or ()] == [2, 2, 2]
    assert score.scores is not None
    assert len(score.scores) == 2
    assert embed.embedding is not None
    assert len(embed.embedding) == 48
    assert several.choices is not None
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    assert several.usage.completion_tokens == 6


def test_a_stop_string_ends_the_request_in_the_engine_too() -> None:
    engine = tiny_engine()
    whole = engine.generate("prompt", temperature=0.0, max_tokens=12, ignore_eos=True)[0]
    stop = whole.text[4:7]
    (result,) = engine.generate("prompt", temperature=0.0, max_tokens=12, ignore_eos=True, stop=[stop])
    assert (result.finish_reason, result.stop_reason) == ("stop", stop)
    assert result.text == whole.text[: whole.text.index(stop)]
    assert result.token_ids == whole.token_ids[: len(result.token_ids)]
    assert_idle(engine)


def test_an_error_in_generate_leaves_nothing_behind(poisoned: Any) -> None:
    engine = tiny_engine(poisoned)
    with pytest.raises(BatchFailed) as caught:
        engine.generate(["fine", wanted("bad", prompt_token_ids=[POISON], max_tokens=2)], max_tokens=20)
    assert caught.value.request_id == "bad"
    with pytest.raises(InvalidRequest):
        engine.generate("x", max_tokens=10**6)
    assert not engine.has_work()
    assert_idle(engine)


def test_a_model_without_a_fast_tokenizer_is_refused() -> None:
    with pytest.raises(ModelUnavailable, match="tokenizer"):
        tiny_engine(replace(loaded_model(), tokenizer=None))


def test_the_engine_names_its_model_device_and_dtype() -> None:
    engine = tiny_engine()
    assert (engine.model_name, engine.device_name, engine.dtype_name) == ("tiny", "cpu", "float32")


def test_the_last_step_is_told_in_figures() -> None:
    engine = tiny_engine()
    run(engine, [request("a", [1] * 20, 3), request("b", [2] * 20, 3)])
    assert engine.last_step is not None
    assert (engine.last_step.batch_size, engine.last_step.num_tokens) == (2, 2)
    assert engine.last_step.seconds > 0
    assert {phase for phase, seconds in engine.last_step.phase_seconds.items() if seconds > 0} == {*PHASES} - {"wait"}


@pytest.mark.parametrize("token_id", [VOCAB_SIZE, 2**31, -1])
def test_token_ids_outside_the_vocabulary_are_refused_whoever_made_the_request(token_id: int) -> None:
    engine = tiny_engine()
    with pytest.raises(InvalidRequest, match=r"prompt_token_ids .* below 320"):
        engine.add_all([request("a", [1, 2]), request("b", [1, token_id, 2])])
    assert not engine.has_work()
    assert_idle(engine)
