"""A whole queue with a real model, shared by the tests that need no worker of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from producer.client import Client
from producer.connection import connect
from tests.ledgers import LedgerPair
from tests.servers import Server
from tests.workers import QueueView
from worker.embedded import EmbeddedQueue, embedded_queue


@pytest.fixture(scope="session")
def real_queue() -> Iterator[EmbeddedQueue]:
    """Embedded Valkey and one worker with SmolLM2-135M in float32, so that greedy text does not depend on rounding."""
    with embedded_queue("--dtype", "float32", "--log-level", "warning", "--max-batch-size", "100", "--kv-memory", "2GiB") as queue:
        yield queue


@pytest.fixture
def client(real_queue: EmbeddedQueue) -> Iterator[Client]:
    with real_queue.client() as client:
        yield client


@pytest.fixture
def pair(any_server: Server, queue: str) -> Iterator[LedgerPair]:
    with connect(any_server.url) as client:
        yield LedgerPair(client, queue)


@pytest.fixture
def view(raw: redis.Redis, queue: str) -> QueueView:
    """The group's view of the test's own queue."""
    return QueueView(raw, queue)
