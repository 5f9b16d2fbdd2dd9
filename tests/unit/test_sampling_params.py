"""Which sampling settings are accepted, and how they travel."""

from __future__ import annotations

import math
from typing import Any

import pytest

from producer.errors import InvalidRequest
from producer.sampling import FIELD_NAMES, SamplingParams

BAD: list[tuple[str, Any]] = [
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 1_000_001),
    ("max_tokens", 2**70),
    ("max_tokens", 1.0),
    ("max_tokens", "8"),
    ("max_tokens", True),
    ("min_tokens", -1),
    ("min_tokens", None),
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", 10**400),
    ("temperature", "hot"),
    ("temperature", False),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("top_k", -2),
    ("top_k", 2**31),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("repetition_penalty", 0.0),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("logit_bias", [1]),
    ("logit_bias", dict.fromkeys(range(1025), 0.0)),
    ("seed", 2**63),
    ("seed", -(2**63) - 1),
    ("seed", 1.5),
    ("stop", [""]),
    ("stop", ["a"] * 17),
    ("stop", "a" * 1025),
    ("stop", ["\0"]),
    ("stop", ["\ud800"]),
    ("stop", [1]),
    ("stop", {"a"}),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [True]),
    ("stop_token_ids", list(range(1025))),
    ("logprobs", -1),
    ("logprobs", 21),
    ("ignore_eos", 1),
    ("n", 0),
    ("n", 17),
    ("response_format", "json"),
    ("response_format", {"type": object()}),
    ("response_format", {1: 2}),
    ("response_format", {"schema": math.nan}),
    ("response_format", {"regex": "a" * 70_000}),
]


@pytest.mark.parametrize(("field", "value"), BAD, ids=lambda value: str(value)[:20])
def test_bad_value_is_refused_and_the_field_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        SamplingParams(**{field: value})
    assert (refused.value.field or "").startswith(field)
    assert field in str(refused.value)


@pytest.mark.parametrize("key", ["-1", "1.0", "one", "", "2147483648", "٣", -1, 1.5, None])
def test_bad_logit_bias_key_is_refused(key: Any) -> None:
    with pytest.raises(InvalidRequest, match="logit_bias"):
        SamplingParams(logit_bias={key: 1.0})


@pytest.mark.parametrize("bias", [100.5, math.nan, "1", None])
def test_bad_logit_bias_value_is_refused(bias: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"logit_bias\[7\]"):
        SamplingParams(logit_bias={7: bias})


def test_min_tokens_over_max_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="min_tokens"):
        SamplingParams(max_tokens=4, min_tokens=5)


def test_message_holds_no_user_text() -> None:
    with pytest.raises(InvalidRequest) as refused:
        SamplingParams(stop=["secret\0"])
    assert "secret" not in str(refused.value)


def test_defaults_travel_as_nothing() -> None:
    assert SamplingParams().to_wire() == {}


def test_one_stop_string_equals_a_list_of_it() -> None:
    assert SamplingParams(stop="END") == SamplingParams(stop=["END"])


def test_logit_bias_keys_are_strings_on_the_wire_and_integers_here() -> None:
    params = SamplingParams(logit_bias={5: 1})
    assert params.to_wire() == {"logit_bias": {"5": 1.0}}
    assert SamplingParams.from_wire(params.to_wire()) == params


def test_from_wire_ignores_what_it_does_not_know() -> None:
    assert SamplingParams.from_wire({"top_p": 0.5, "colour": "red", "seed": None}) == SamplingParams(top_p=0.5)


def test_from_keywords_refuses_what_it_does_not_know() -> None:
    with pytest.raises(InvalidRequest, match="max_token") as refused:
        SamplingParams.from_keywords({"max_token": 5})
    assert refused.value.field == "max_token"


def test_greedy_is_temperature_zero() -> None:
    assert SamplingParams(temperature=0).greedy
    assert not SamplingParams().greedy


def test_field_names_are_the_public_ones() -> None:
    assert set(FIELD_NAMES) == {
        *("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty"),
        *("frequency_penalty", "logit_bias", "seed", "stop", "stop_token_ids", "logprobs", "ignore_eos", "n", "response_format"),
    }
