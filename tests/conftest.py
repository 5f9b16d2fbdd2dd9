"""Fixtures that every test may use: a running server, and a queue of the test's own on it."""

from __future__ import annotations

import signal
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import redis

from producer import Client
from producer.keys import Keys
from tests.responder import Responder, echo
from tests.servers import KINDS, Server, binary


def pytest_configure() -> None:
    """A run started in the background ignores SIGINT, and so would every process that a test starts and interrupts."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)


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
    """A queue name that no other test uses."""
    return f"q-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def raw(server: Server) -> Iterator[redis.Redis]:
    """A plain client of `server`."""
    with server.client() as client:
        yield client


@pytest.fixture
def any_client(any_server: Server, queue: str) -> Iterator[Client]:
    """A blocking client of the test's queue, on each kind of server."""
    with Client(any_server.url, queue=queue) as client:
        yield client


@pytest.fixture
def keys(queue: str) -> Keys:
    return Keys(queue)


@pytest.fixture
def respond(any_server: Server, queue: str) -> Iterator[Callable[..., Responder]]:
    """Starts an answerer on the test's queue that runs a script on each request; it ends with the test."""
    with ExitStack() as stack:
        yield lambda script=echo: stack.enter_context(Responder(any_server.url, queue, script).running())
