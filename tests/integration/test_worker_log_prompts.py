"""``--log-prompts``: the one way that user text gets into a log, cut, and announced when the worker starts."""

from __future__ import annotations

import json
from collections.abc import Iterator, MutableMapping
from contextlib import suppress
from typing import Any

import pytest
import redis
import structlog

from producer import Client
from producer.errors import HeadraceError
from producer.keys import Keys
from tests.fakes import FAIL, expected_text
from tests.servers import Server
from tests.workers import eventually, worker_thread
from worker.ending import MAX_LOGGED_CHARACTERS

Line = MutableMapping[str, Any]


@pytest.fixture
def lines() -> Iterator[list[Line]]:
    with structlog.testing.capture_logs() as captured:
        yield captured


@pytest.fixture
def client(server: Server, queue: str, lines: list[Line]) -> Iterator[Client]:
    with Client(server.url, queue=queue) as client, worker_thread(server.url, queue, log_prompts=True):
        yield client


def last_line(lines: list[Line], request_id: str) -> Line:
    ended = eventually(lambda: [line for line in lines if line["event"] == "request ended" and line["id"] == request_id], "logged")
    return dict(ended[0])


def logged(lines: list[Line], client: Client, **options: Any) -> Line:
    handle = client.submit(**options)
    with suppress(HeadraceError):
        handle.result(timeout=30)
    return last_line(lines, handle.id)


def test_prompt_and_output_are_in_the_last_line(client: Client, lines: list[Line]) -> None:
    line = logged(lines, client, prompt="hello", max_tokens=3)
    assert (line["prompt"], line["prompt_characters"]) == ("hello", 5)
    text = expected_text("hello", 3)
    assert (line["output"], line["output_characters"]) == (text, len(text))


def test_long_texts_are_cut_beside_their_length(client: Client, lines: list[Line]) -> None:
    prompt = "é" * 5000
    line = logged(lines, client, prompt=prompt, max_tokens=1500)
    assert (line["prompt"], line["prompt_characters"]) == (prompt[:MAX_LOGGED_CHARACTERS], 5000)
    text = expected_text(prompt, 1500)
    assert len(text) > MAX_LOGGED_CHARACTERS
    assert (line["output"], line["output_characters"]) == (text[:MAX_LOGGED_CHARACTERS], len(text))


@pytest.mark.parametrize(
    ("options", "prompt"),
    [
        ({"prompt_token_ids": [5, 6], "max_tokens": 1}, [5, 6]),
        ({"prompt": "p", "kind": "score", "continuations": ["a", "b"]}, {"prompt": "p", "continuations": ["a", "b"]}),
        ({"messages": [{"role": "user", "content": "hi"}]}, [{"role": "user", "content": "hi"}]),  # this engine refuses them
    ],
)
def test_prompt_that_is_not_one_text_is_json(client: Client, lines: list[Line], options: dict[str, Any], prompt: object) -> None:
    assert json.loads(logged(lines, client, **options)["prompt"]) == prompt


def test_several_outputs_are_a_list(client: Client, lines: list[Line]) -> None:
    line = logged(lines, client, prompt="hello", max_tokens=2, n=3)
    assert json.loads(line["output"]) == [expected_text("hello", 2, index) for index in range(3)]


def test_failed_request_shows_what_it_was(client: Client, lines: list[Line]) -> None:
    line = logged(lines, client, prompt=FAIL, max_tokens=3)
    assert (line["code"], line["prompt"], line["output"]) == ("BATCH_FAILED", FAIL, "")


def test_what_cannot_be_read_has_no_prompt(client: Client, lines: list[Line], raw: redis.Redis, queue: str) -> None:
    raw.xadd(Keys(queue).stream("realtime"), {"id": "x1", "json": "{"})
    line = last_line(lines, "x1")
    assert (line["code"], line["prompt"]) == ("INVALID_REQUEST", "")


def test_worker_says_once_when_it_starts_that_user_text_is_logged(client: Client, lines: list[Line]) -> None:
    client.submit_and_wait("hello", max_tokens=1, timeout=30)
    assert [line["log_level"] for line in lines if "USER TEXT" in line["event"]] == ["warning"]
