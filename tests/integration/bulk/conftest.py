"""A server of each test's own, and rq's connection to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from producer.bulk import queue as bulk_jobs
from tests.servers import Server


@pytest.fixture
def own_server() -> Iterator[Server]:
    with Server("valkey") as running:
        yield running


@pytest.fixture
def connection(own_server: Server) -> Iterator[redis.Redis]:
    with bulk_jobs.rq_connection(own_server.url) as client:
        yield client
