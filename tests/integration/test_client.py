"""The blocking client against a real server and a scripted answerer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from producer import Client
from tests.responder import Responder
from tests.servers import Server


@pytest.fixture
def client(server: Server, queue: str) -> Iterator[Client]:
    with Client(server.url, queue=queue) as client:
        yield client


@pytest.fixture
def echo(server: Server, queue: str) -> Iterator[Responder]:
    with Responder(server.url, queue).running() as responder:
        yield responder


def test_submit_and_wait_returns_the_result(client: Client, echo: Responder) -> None:
    result = client.submit_and_wait("hello", max_tokens=8, timeout=10)
    assert (result.text, result.finish_reason, result.attempt) == ("hello", "stop", 1)


def test_stream_yields_chunks_that_join_to_the_text(client: Client, echo: Responder) -> None:
    chunks = list(client.submit("hello", stream=True).stream(timeout=10))
    assert "".join(chunk.text for chunk in chunks) == "hello"
    assert len(chunks) == 5
