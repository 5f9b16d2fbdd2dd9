"""One node or sentinel of several is silent: short calls are answered by the others all the same."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from producer import AsyncClient, Client, RedisUnavailable
from producer.cluster import Slot
from producer.sockets import Address
from tests.cluster import Cluster
from tests.servers import Server


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def sentinel() -> Iterator[Server]:
    with Server() as master, Server(sentinel=True, monitor=f"main 127.0.0.1 {master.port} 1") as sentinel:
        yield sentinel


@pytest.fixture(params=["accepts", "drops packets"])
def silent(request: pytest.FixtureRequest) -> Iterator[Address]:
    """Where nothing answers: connections are accepted, as by a server that is stopped, or not even that."""
    with ExitStack() as stack:
        accepts = request.param == "accepts"
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=128 if accepts else 0))
        address: Address = listener.getsockname()
        if not accepts:
            with suppress(TimeoutError):
                while True:
                    stack.enter_context(socket.create_connection(address, timeout=0.2))
        yield address


@pytest.fixture(params=["cluster", "sentinel"])
def url(request: pytest.FixtureRequest, silent: Address) -> str:
    """The silent one is to be asked first."""
    live = request.getfixturevalue(request.param)
    first = f"{silent[0]}:{silent[1]}"
    if request.param == "cluster":
        return f"redis+cluster://{first},127.0.0.1:{live.servers[0].port}"
    return f"redis+sentinel://{first},127.0.0.1:{live.port}/main/0"


async def test_short_call_is_answered(url: str, queue: str) -> None:
    with Client(url, queue, patience_s=1.0) as client:
        assert client.submit("hi").status() == "queued"
        assert client.abandon("x") == "unknown"
    async with AsyncClient(url, queue, patience_s=1.0) as coroutine:
        assert await (await coroutine.submit("hi")).status() == "queued"
        assert await coroutine.get("x").cancel() == "unknown"


async def test_silent_one_is_asked_last_after_a_call_that_was_interrupted(url: str, queue: str) -> None:
    """A share of this patience is far longer than the second call has."""
    async with AsyncClient(f"{url}?socket_connect_timeout=60&socket_timeout=60", queue, patience_s=60) as client:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await client.submit("hi")
        async with asyncio.timeout(10):
            assert await (await client.submit("hi")).status() == "queued"


async def test_primary_that_fell_silent_is_left(cluster: Cluster, silent: Address, queue: str) -> None:
    """As a call finds it that knew the primary before."""
    with Client(cluster.url, queue, patience_s=0.5) as client:
        slot_of(client.redis).primary = silent
        with pytest.raises(RedisUnavailable):
            client.submit("hi")
        assert client.submit("hi").status() == "queued"
    async with AsyncClient(cluster.url, queue, patience_s=0.5) as coroutine:
        slot_of(coroutine.redis).primary = silent
        with pytest.raises(RedisUnavailable):
            await coroutine.submit("hi")
        assert await (await coroutine.submit("hi")).status() == "queued"


def slot_of(client: Any) -> Slot:
    slot: Slot = client.connection_pool.connection_kwargs["slot"]
    return slot
