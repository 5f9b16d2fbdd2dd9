"""Fixtures that every test may use: a running server, and a queue of the test's own on it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
import redis

from tests.servers import KINDS, Server, binary


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """One Valkey for the whole run. Tests that kill, flush or reconfigure a server start their own."""
    with Server("valkey") as running:
        yield running


@pytest.fixture(params=[kind for kind in KINDS if kind == "valkey" or binary(kind)], scope="session")
def server_kind(request: pytest.FixtureRequest) -> str:
    """Each kind of server that runs on this machine, in turn; Valkey must."""
    return str(request.param)


@pytest.fixture(scope="session")
def any_server(server_kind: str) -> Iterator[Server]:
    """A running server of each kind in turn, shared by the run."""
    with Server(server_kind) as running:
        yield running


@pytest.fixture
def queue() -> str:
    """A queue name that nobody else uses."""
    return f"q-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def raw(server: Server) -> Iterator[redis.Redis]:
    """A plain client of `server`."""
    with server.client() as client:
        yield client
