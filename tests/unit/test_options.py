"""From a caller's keywords to a checked request."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from producer.errors import InvalidRequest
from producer.options import BatchItem, build, build_many, new_id
from producer.sampling import FIELD_NAMES, SamplingParams
from producer.wire import GenerateRequest


def test_keywords_become_the_request() -> None:
    wanted = build("hi", {"id": "x", "tier": "batch", "user": "u", "max_tokens": 5, "seed": None, "deadline_s": 2, "durable": True})
    assert wanted.request == GenerateRequest(id="x", tier="batch", prompt="hi", user="u", params=SamplingParams(max_tokens=5))
    assert (wanted.deadline_s, wanted.durable) == (2, True)


def test_params_may_be_given_whole() -> None:
    params = SamplingParams(top_k=4)
    assert build("hi", {"params": params}).request.params == params


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"colour": 1}, "colour"),
        ({"max_token": 1}, "max_token"),
        ({"params": SamplingParams(), "top_k": 4}, "top_k"),
        ({"params": SamplingParams(), "colour": 4}, "colour"),
        ({"params": {"top_k": 4}}, "params"),
        ({"deadline_s": 0}, "deadline_s"),
        ({"deadline_s": float("nan")}, "deadline_s"),
        ({"deadline_s": 1e12}, "deadline_s"),
        ({"durable": "yes"}, "durable"),
        ({"deadline_ms": 5}, "deadline_ms"),
        ({"id": "a b"}, "id"),
        ({"top_p": 2}, "top_p"),
    ],
)
def test_bad_keyword_is_refused_by_name(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        build("hi", options)
    assert refused.value.field == field


def test_error_in_one_of_many_names_which() -> None:
    with pytest.raises(InvalidRequest) as refused:
        build_many(["a", {"prompt": "b"}, {"prompt": "c", "top_p": 7}])
    assert refused.value.field == "[2].top_p"
    assert "[2].top_p" in str(refused.value)


def test_typed_keywords_are_all_the_sampling_parameters() -> None:
    assert set(FIELD_NAMES) < set(BatchItem.__annotations__)


def test_new_id_is_a_uuid_of_version_7_of_this_moment() -> None:
    before = time.time_ns() // 1_000_000
    value = new_id()
    assert re.fullmatch(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", value)
    assert before <= int(value.replace("-", "")[:12], 16) <= time.time_ns() // 1_000_000


def test_new_ids_differ() -> None:
    assert len({new_id() for _ in range(10_000)}) == 10_000
