"""Long prompts with a common beginning: computed once, in whatever order they come."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from producer.wire import GenerateRequest
from tests.tiny_engine import computed_tokens, request, run, tiny_engine
from worker.engine.engine import Engine
from worker.engine.request import Request, RequestStatus
from worker.engine.scheduler import LONG_PREFILL_STEPS

BUDGET = 16
LONG = LONG_PREFILL_STEPS * BUDGET
DOCUMENT = random.Random(0).choices(range(256), k=3 * LONG)


def engine(**settings: object) -> Engine:
    return tiny_engine(**{"max_batch_tokens": BUDGET, "max_batch_size": 12, "num_blocks": 400, **settings})


def num_steps(engine: Engine) -> int:
    """Steps to the end."""
    steps = 0
    while engine.has_work():
        engine.step()
        steps += 1
    return steps


def asking(count: int, prompt: Sequence[int] = DOCUMENT, **fields: object) -> list[Request]:
    """Requests whose prompts differ only in the last token."""
    return [request(f"r{i}", [*prompt, i], 3, **fields) for i in range(count)]


def test_a_document_that_many_ask_about_at_once_is_computed_once() -> None:
    several, alone = engine(), engine()
    requests = asking(8)
    for item in requests:
        several.add(item)
    assert several.stats().waiting_realtime == 8
    assert computed_tokens(several) <= len(DOCUMENT) + 8 * (16 + 3)
    for item in requests:
        twin = request("twin", item.prompt_token_ids, 3)
        run(alone, [twin])
        assert item.output_token_ids == twin.output_token_ids


def test_only_what_is_shared_is_waited_for() -> None:
    several = engine()
    first, second = request("first", DOCUMENT, 3), request("second", [*DOCUMENT[: LONG + 20], *[7] * 90], 3)
    several.add(first)
    several.add(second)
    while not second.num_computed_tokens:
        several.step()
    assert first.num_computed_tokens < len(DOCUMENT) - BUDGET
    assert second.num_cached_tokens >= LONG + 20 - 16
    computed_tokens(several)


@pytest.mark.parametrize("ends", [0, 1, 3])
def test_whoever_ends_early_the_others_are_answered_and_compute_it_once(ends: int) -> None:
    several = engine()
    requests = asking(4)
    for item in requests:
        several.add(item)
    for _ in range(3):
        several.step()
    several.abort(requests[ends].id)
    assert several.stats().waiting_realtime + several.stats().running_realtime == 3
    assert computed_tokens(several) <= len(DOCUMENT) + 4 * (16 + 3)
    assert [len(item.output_token_ids) for item in requests] == [0 if i == ends else 3 for i in range(4)]


@pytest.mark.parametrize(
    "fields", [{"tier": "batch"}, {"source": "other"}, {"deadline_at_s": 1.0}], ids=["another tier", "another source", "sooner due"]
)
def test_nobody_waits_for_one_that_comes_behind_it(fields: dict[str, object]) -> None:
    several = engine()
    several.add(request("first", DOCUMENT, 3))
    several.add(request("second", DOCUMENT, 3, **fields))
    assert several._prefixes.num_held("realtime") == several._prefixes.num_held("batch") == 0
    computed_tokens(several)


@pytest.mark.parametrize("settings", [{"enable_prefix_caching": False}, {"policy": "static", "max_wait_ms": 0.0}])
def test_nobody_waits_where_nothing_would_be_found(settings: dict[str, object]) -> None:
    several = engine(**settings)
    for item in asking(3):
        several.add(item)
    assert several._prefixes.num_held("realtime") == 0
    computed_tokens(several)


def test_short_prompts_and_other_documents_go_on_meanwhile() -> None:
    several = engine()
    for item in asking(6):
        several.add(item)
    short, other = request("short", [1, 2, 3], 3), request("other", DOCUMENT[::-1], 3)
    several.add(short)
    several.add(other)
    for _ in range(8):
        several.step()
    assert len(short.output_token_ids) == 3
    assert other.num_computed_tokens
    computed_tokens(several)


def test_those_whose_leader_ends_as_soon_as_it_has_computed_go_on_together() -> None:
    several = engine()
    requests = [request(f"r{i}", [*DOCUMENT[:-8], i], 1) for i in range(8)]  # the last step computes the rest of it and ends the leader
    for item in requests:
        several.add(item)
    assert num_steps(several) <= len(DOCUMENT) / BUDGET + 8 * 9 / BUDGET + 1
    assert all(len(item.output_token_ids) == 1 for item in requests)


def test_continuations_of_a_long_prompt_are_scored_together() -> None:
    several = engine()
    wanted = GenerateRequest(id="s", kind="score", prompt_token_ids=DOCUMENT[:-8], continuations=list("abcdefghij"))
    several.add_all(several.inputs.prepare_all(wanted))
    assert num_steps(several) <= len(DOCUMENT) / BUDGET + 10 * 9 / BUDGET + 2


def test_nobody_waits_for_one_that_waits_for_realtime_to_be_quiet() -> None:
    several = engine(num_blocks=40, max_batch_size=2, batch_floor=0.0)
    leader = request("leader", DOCUMENT, 300, tier="batch")
    followers = [request(f"r{i}", [*DOCUMENT, i], 3, tier="batch") for i in range(2)]
    several.add(leader)
    several.step()
    for item in followers:
        several.add(item)
    assert several._prefixes.num_held("batch") == 2
    several.add(request("urgent", [1] * 20, 20))
    several.add(request("urgent too", [2] * 20, 20))
    for _ in range(3):
        several.step()
    assert leader.status is RequestStatus.PREEMPTED
    assert several._prefixes.num_held("batch") == 0
    computed_tokens(several)


def test_several_outputs_of_a_prompt_wait_with_the_first_of_them() -> None:
    several = engine()
    leader, *outputs = [request(f"r{i}", DOCUMENT, 3, seed=i, temperature=1.0) for i in range(4)]
    several.add(leader)
    several.add_all(outputs)
    several.step()
    several.abort(outputs[0].id)
    assert computed_tokens(several) <= len(DOCUMENT) + 4 * (16 + 3)
    assert [len(item.output_token_ids) for item in (leader, *outputs[1:])] == [3, 3, 3]
