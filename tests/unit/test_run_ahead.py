"""Asynchronous scheduling: a step is launched before the previous one's tokens are read, with the same results. On the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from producer.sampling import SamplingParams
from tests.tiny_engine import assert_idle, tiny_engine
from tests.tiny_models import VOCAB_SIZE
from worker.engine import run_ahead
from worker.engine.engine import Engine
from worker.engine.request import UNKNOWN_TOKEN, Request, RequestStatus
from worker.engine.run_ahead import RunAhead
from worker.engine.step import StepOutput

GREEDY = {"temperature": 0.0}
SAMPLED = {"temperature": 1.5, "top_p": 0.95}


def make_engine(*, run_ahead: bool, **settings: Any) -> Engine:
    return tiny_engine(**{"num_blocks": 64, "max_batch_size": 8, "max_batch_tokens": 48, "run_ahead": run_ahead, **settings})


def make_request(index: int, prompt_tokens: int = 9, max_tokens: int = 12, tier: Any = "realtime", **params: Any) -> Request:
    prompt = torch.randint(VOCAB_SIZE, (prompt_tokens,), generator=torch.Generator().manual_seed(index)).tolist()
    return Request(f"r{index}", prompt, SamplingParams(**params), max_tokens, seed=index, tier=tier)


def mixed_requests() -> list[Request]:
    """More than a batch of them, of all lengths, greedy and sampled."""
    settings = [GREEDY, SAMPLED, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 20}]
    return [make_request(i, 1 + 11 * i % 70, 1 + 5 * i % 23, **settings[i % len(settings)]) for i in range(20)]


def run(engine: Engine, requests: list[Request]) -> list[StepOutput]:
    for request in requests:
        engine.add(request)
    outputs = []
    while engine.has_work():
        outputs += engine.step()
        assert all(UNKNOWN_TOKEN not in output.token_ids for output in outputs)
    return outputs


def texts(requests: list[Request]) -> list[list[int]]:
    return [request.output_token_ids for request in requests]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"enable_prefix_caching": False, "max_batch_tokens": 24},
        {"policy": "static", "max_wait_ms": 0.0},
    ],
    ids=["continuous", "small steps", "static"],
)
def test_tokens_are_those_of_the_engine_that_waits(settings: dict[str, Any]) -> None:
    waiting, ahead = mixed_requests(), mixed_requests()
    run(make_engine(run_ahead=False, **settings), waiting)
    engine = make_engine(run_ahead=True, **settings)
    outputs = run(engine, ahead)
    assert texts(ahead) == texts(waiting)
    assert [len(request.output_token_ids) for request in ahead] == [request.max_tokens for request in ahead]
    assert [sum(len(o.token_ids) for o in outputs if o.request is request) for request in ahead] == [r.max_tokens for r in ahead]
    assert_idle(engine)


def test_the_next_step_is_launched_before_the_tokens_are_read() -> None:
    engine = make_engine(run_ahead=True)
    request = make_request(0, **GREEDY)
    engine.add(request)
    assert engine.step() == []
    assert request.output_token_ids == [UNKNOWN_TOKEN]
    (output,) = engine.step()
    assert output.index == 0
    assert request.output_token_ids == [*output.token_ids, UNKNOWN_TOKEN]
    assert request.num_computed_tokens == request.num_prompt_tokens + 1


def test_a_step_is_measured_with_its_own_tokens_and_with_what_the_device_waited_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(run_ahead=True)
    clock_s = [0.0]
    monkeypatch.setattr(run_ahead.time, "monotonic", lambda: clock_s[0])
    launcher = engine.runner.run_ahead
    assert launcher is not None
    forward = launcher._forward

    def slow(inputs: Any, rows: Tensor) -> Tensor:
        clock_s[0] += 0.1 * inputs.input_ids.shape[1]  # what the device takes
        return forward(inputs, rows)

    monkeypatch.setattr(launcher, "_forward", slow)
    engine.add(make_request(0, prompt_tokens=9, max_tokens=4, **GREEDY))
    samples = []
    while engine.has_work():
        engine.step()
        if engine.last_step is not None:
            samples.append(engine.last_step)
        clock_s[0] += 0.05  # what the host takes between two steps
    assert [sample.num_tokens for sample in samples] == [9, 1, 1, 1]
    assert [sample.seconds for sample in samples] == pytest.approx([0.9, 0.1, 0.1, 0.1])
    assert [sample.idle_seconds for sample in samples] == pytest.approx([0.0, 0.05, 0.05, 0.05])
    assert sum(sample.phase_seconds["model"] for sample in samples) == pytest.approx(1.2), "the launches, each once"
    assert sum(sum(sample.phase_seconds.values()) for sample in samples) == pytest.approx(1.2), (
        "the host's time between steps is no part of any"
    )


@pytest.mark.parametrize("how", ["stop token", "abort"])
def test_time_without_requests_is_no_idleness(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    engine = make_engine(run_ahead=True)
    clock_s = [0.0]
    monkeypatch.setattr(run_ahead.time, "monotonic", lambda: clock_s[0])
    first = make_request(0, max_tokens=20, **GREEDY)
    run(make_engine(run_ahead=False), [free := make_request(0, max_tokens=20, **GREEDY)])
    if how == "stop token":
        first = make_request(0, max_tokens=20, stop_token_ids=[free.output_token_ids[3]], **GREEDY)
        run(engine, [first])
    else:
        engine.add(first)
        for _ in range(3):
            engine.step()
        engine.abort(first.id)
    clock_s[0] += 3600.0
    engine.add(make_request(1, max_tokens=3, **GREEDY))
    while engine.has_work():
        engine.step()
        assert engine.last_step is not None
        assert engine.last_step.idle_seconds == 0.0
    assert_idle(engine)


def test_a_request_that_ends_early_is_dropped_from_the_step_that_was_launched() -> None:
    free = make_request(0, max_tokens=30, **GREEDY)
    run(make_engine(run_ahead=False), [free])
    stop = next(i for i, token in enumerate(free.output_token_ids) if i > 4 and token not in free.output_token_ids[:i])
    engine = make_engine(run_ahead=True)
    stopped = make_request(0, max_tokens=30, stop_token_ids=[free.output_token_ids[stop]], **GREEDY)
    other = make_request(1, max_tokens=30, **GREEDY)
    outputs = [output for output in run(engine, [stopped, other]) if output.request is stopped]
    assert stopped.output_token_ids == free.output_token_ids[: stop + 1]
    assert outputs[-1].finish_reason == "stop"
    assert [output.index for output in outputs] == list(range(stop + 1))
    assert len(other.output_token_ids) == 30
    assert_idle(engine)


def test_steps_that_need_the_host_run_between_those_that_do_not() -> None:
    def requests() -> list[Request]:
        return [
            make_request(0, max_tokens=25, **GREEDY),
            make_request(1, max_tokens=8, repetition_penalty=1.3, **GREEDY),  # counts what steps of both kinds chose
            make_request(2, max_tokens=10, logprobs=3, **SAMPLED),
            make_request(3, max_tokens=12, min_tokens=4, **SAMPLED),
        ]

    waiting, ahead = requests(), requests()
    run(make_engine(run_ahead=False), waiting)
    run(make_engine(run_ahead=True), ahead)
    assert texts(ahead) == texts(waiting)
    assert len(ahead[2].logprobs) == 10
    for ours, expected in zip(ahead[2].logprobs, waiting[2].logprobs, strict=True):
        assert ours.token_id == expected.token_id
        assert ours.logprob == pytest.approx(expected.logprob, abs=1e-4)
        assert ours.top == pytest.approx(expected.top, abs=1e-4)


def test_penalties_count_the_token_that_is_not_read_yet() -> None:
    def requests() -> list[Request]:
        return [
            make_request(0, max_tokens=25, repetition_penalty=1.3, **GREEDY),
            make_request(1, max_tokens=25, presence_penalty=1.0, frequency_penalty=0.8, **SAMPLED),
            make_request(2, max_tokens=12, min_tokens=6, stop_token_ids=list(range(0, VOCAB_SIZE, 2)), **GREEDY),
            make_request(3, max_tokens=20, logit_bias={5: 4.0, 6: 4.0}, frequency_penalty=2.0, **GREEDY),
        ]

    waiting, ahead = requests(), requests()
    run(make_engine(run_ahead=False), waiting)
    engine = make_engine(run_ahead=True)
    for request in ahead:
        engine.add(request)
    engine.step()
    assert [request.output_token_ids for request in ahead] == [[UNKNOWN_TOKEN]] * 4, "launched, not run"
    run(engine, [])
    assert texts(ahead) == texts(waiting)


def test_preempted_requests_keep_their_tokens() -> None:
    def requests() -> list[Request]:
        return [make_request(i, 20, 40, tier="batch", **SAMPLED) for i in range(6)]

    settings = {"num_blocks": 12, "batch_overcommit": 3.0, "realtime_reserved": 0.0, "enable_prefix_caching": False}
    for swap in (0, 8):
        waiting, ahead = requests(), requests()
        run(make_engine(run_ahead=False, cpu_swap_blocks=swap, **settings), waiting)
        engine = make_engine(run_ahead=True, cpu_swap_blocks=swap, **settings)
        run(engine, ahead)
        stats = engine.stats()
        assert stats.swap_preemptions + stats.recompute_preemptions > 0
        assert texts(ahead) == texts(waiting)


def test_aborts_between_steps_take_nothing_from_the_others() -> None:
    alone = make_request(1, max_tokens=20, **GREEDY)
    run(make_engine(run_ahead=False), [alone])
    engine = make_engine(run_ahead=True)
    requests = [make_request(i, max_tokens=20, **GREEDY) for i in range(3)]
    for request in requests:
        engine.add(request)
    for _ in range(5):
        engine.step()
    engine.abort("r0")
    engine.step()
    engine.abort("r2")
    while engine.has_work():
        engine.step()
    assert requests[1].output_token_ids == alone.output_token_ids
    assert [request.status for request in requests] == [RequestStatus.FINISHED] * 3
    assert_idle(engine)


def test_a_step_that_cannot_be_launched_ends_the_culprit_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(run_ahead=True)
    requests = [make_request(i, max_tokens=10, **GREEDY) for i in range(4)]
    culprit = requests[2].prompt_token_ids[0]
    forward = engine.runner.forward

    def fail(input_ids: Tensor, positions: Tensor, *rest: Any) -> Any:
        if bool(((input_ids == culprit) & (positions == 0)).any()):
            raise RuntimeError("boom")
        return forward(input_ids, positions, *rest)

    monkeypatch.setattr(engine.runner, "forward", fail)
    outputs = run(engine, requests)
    assert [o.request.id for o in outputs if o.error_code] == ["r2"]
    assert [len(request.output_token_ids) for request in requests] == [10, 10, 0, 10]
    assert_idle(engine)


def test_a_row_that_is_not_finite_fails_and_harms_no_other() -> None:
    engine = make_engine(run_ahead=True)
    requests = [make_request(i, max_tokens=6, **GREEDY) for i in range(3)]
    broken = requests[1]
    launcher = engine.runner.run_ahead
    assert launcher is not None
    forward = launcher._forward

    def spoil(inputs: Any, rows: Tensor) -> Tensor:
        logits = forward(inputs, rows).clone()
        if (inputs.meta.seq_lens == broken.num_prompt_tokens + 2).all() and len(rows) == 3:
            logits[1] = torch.nan
        return logits

    engine.runner.run_ahead = RunAhead((engine.runner._inputs, engine.runner._make_inputs()), spoil, engine.runner.clock)
    outputs = run(engine, requests)
    assert [(o.request.id, o.error_code) for o in outputs if o.error_code] == [("r1", "BATCH_FAILED")]
    assert [len(request.output_token_ids) for request in requests] == [6, 2, 6]
    assert_idle(engine)
