"""Which requests are well-formed."""

from __future__ import annotations

from typing import Any

import pytest

from producer.errors import InvalidRequest
from producer.sampling import SamplingParams
from producer.wire import GenerateRequest, Usage

BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "prompt"),
    ({"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": b"bytes"}, "prompt"),
    ({"prompt": "a\0"}, "prompt"),
    ({"prompt": "\udfff"}, "prompt"),
    ({"prompt": "é" * (1024 * 1024 + 1)}, "prompt"),
    ({"prompt_token_ids": []}, "prompt_token_ids"),
    ({"prompt_token_ids": [1, -1]}, "prompt_token_ids[1]"),
    ({"prompt_token_ids": [2**31]}, "prompt_token_ids[0]"),
    ({"prompt_token_ids": "12"}, "prompt_token_ids"),
    ({"prompt_token_ids": [0] * 1_000_001}, "prompt_token_ids"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": "a"}] * 1025}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "a", "extra": {1: 2}}]}, "messages[0] key"),
    ({"messages": [{"role": "user", "content": "a", "extra": object()}]}, "messages[0]"),
    ({"prompt": "a", "kind": "chat"}, "kind"),
    ({"prompt": "a", "kind": ["score"]}, "kind"),
    ({"prompt": "a", "stream": 1}, "stream"),
    ({"prompt": "a", "stream": True, "params": SamplingParams(n=2)}, "stream"),
    ({"prompt": "a", "stream": True, "kind": "embed"}, "stream"),
    ({"prompt": "a", "stream": True, "kind": "score", "continuations": ["b"]}, "stream"),
    ({"prompt": "a", "kind": "embed", "params": SamplingParams(n=2)}, "n"),
    ({"prompt": "a", "continuations": ["b"]}, "continuations"),
    ({"prompt": "a", "kind": "score"}, "continuations"),
    ({"prompt": "a", "kind": "score", "continuations": []}, "continuations"),
    ({"prompt": "a", "kind": "score", "continuations": ["b", ""]}, "continuations[1]"),
    ({"prompt": "a", "kind": "score", "continuations": ["b"] * 257}, "continuations"),
    ({"prompt": "a", "tier": "gold"}, "tier"),
    ({"prompt": "a", "id": ""}, "id"),
    ({"prompt": "a", "id": "a}b"}, "id"),
    ({"prompt": "a", "id": 7}, "id"),
    ({"prompt": "a", "deadline_ms": -1}, "deadline_ms"),
    ({"prompt": "a", "deadline_ms": 1.0}, "deadline_ms"),
    ({"prompt": "a", "source": "s" * 257}, "source"),
    ({"prompt": "a", "user": None}, "user"),
]


@pytest.mark.parametrize(("fields", "culprit"), BAD, ids=lambda value: str(value)[:40])
def test_bad_request_is_refused_and_the_field_named(fields: dict[str, Any], culprit: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        GenerateRequest(**{"id": "x", **fields})
    assert refused.value.field == culprit


def test_empty_content_of_a_message_is_allowed() -> None:
    GenerateRequest(id="x", messages=[{"role": "assistant", "content": ""}])


def test_total_tokens_are_prompt_and_completion() -> None:
    assert Usage(prompt_tokens=3, completion_tokens=4, cached_tokens=2).total_tokens == 7
