"""Redis Cluster: connections that follow a queue to the node that serves it.

All keys of a queue share a slot, so one node at a time serves all of it. A queue therefore needs only plain
connections to that node: pipelines, blocking reads of several streams, scripts and WAITAOF work as on a single server. When
the slot moves or its node fails, the connection breaks as it does when a server restarts, and the next one goes to the new
node. redis-py's `RedisCluster` is made for keys all over the cluster, and resends commands by itself, which must be our decision.

While a slot migrates key by key (ASK, TRYAGAIN) the queue waits: our scripts need all of a request's keys on one node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import redis.asyncio as aioredis
from redis.connection import AbstractConnection, Connection
from redis.crc import key_slot
from redis.exceptions import ClusterDownError, ConnectionError, MovedError  # noqa: A004 - redis-py's

from producer.failover import ask_each, ask_each_async
from producer.sockets import Address, AsyncTcp, AsyncTls, Tcp, Tls

UNKNOWN = "no node of the cluster knows where the queue is"


class Slot:
    """Where one slot is served; shared by all connections of a client, from any thread.

    Attributes:
        primary: the node that serves it; None if it has to be asked for.
        nodes: the nodes to ask, in this order; one list, changed in place.
    """

    def __init__(self, key: str, seeds: Sequence[Address]) -> None:
        self._number = key_slot(key.encode())
        self._seeds = list(seeds)
        self.nodes = list(seeds)
        self.primary: Address | None = None

    def learn(self, asked: Address, ranges: Sequence[Any]) -> Address:
        """The primary, from a node's answer to CLUSTER SLOTS.

        Raises:
            ClusterDownError: no node serves the slot.
        """
        known = [_address(asked, node) for _, _, *nodes in ranges for node in nodes]
        self.nodes[:] = dict.fromkeys([asked, *known, *self._seeds])
        for first, last, primary, *_ in ranges:
            if first <= self._number <= last:
                self.primary = _address(asked, primary)
                return self.primary
        raise ClusterDownError(f"no node serves slot {self._number}")

    def move(self, by: Address, error: MovedError) -> None:
        """The node ``by`` has said where the slot is served now: remember it."""
        self.primary = _address(by, (error.host.encode(), error.port))

    def lose(self, address: Address) -> None:
        """A connection to ``address`` has ended. The node that named it is asked last: it may be cut off from the others."""
        if self.primary == address:
            self.primary = None
            self.nodes[:] = [*self.nodes[1:], self.nodes[0]]


def _address(asked: Address, node: Sequence[Any]) -> Address:
    """A node's address; one that does not know its own name is where it was asked."""
    host, port = node[0], node[1]
    return (asked[0] if host in (None, b"", b"?") else host.decode()), port


def _to_ask(node: Address, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a connection to any node; the time limit for accepting a connection also limits answering."""
    return {**kwargs, "host": node[0], "port": node[1], "socket_timeout": kwargs["socket_connect_timeout"]}


class _Follower(AbstractConnection):
    """A connection to whichever node serves ``slot`` when it connects.

    Attributes:
        plain: makes a connection to a node that is asked.
    """

    plain: type[Connection]
    host: str
    port: int

    def __init__(self, *, slot: Slot, **kwargs: Any) -> None:
        self._slot = slot
        self._kwargs = kwargs
        super().__init__(**kwargs)

    def connect(self) -> None:
        if self.is_connected:
            return
        self.host, self.port = self._slot.primary or self._find()
        super().connect()  # type: ignore[no-untyped-call]  # redis-py does not annotate it

    def disconnect(self, *args: Any, **kwargs: Any) -> None:
        """Forget the node, however the connection ended: a failing node may fall silent, and a queue may move without notice."""
        super().disconnect(*args, **kwargs)  # type: ignore[no-untyped-call]  # redis-py does not annotate it
        self._slot.lose((self.host, self.port))

    def _find(self) -> Address:
        return ask_each(self._slot.nodes, self._ask, UNKNOWN)

    def _ask(self, node: Address) -> Address:
        asking = self.plain(**_to_ask(node, self._kwargs))
        try:
            asking.connect()
            asking.send_command("CLUSTER", "SLOTS")
            return self._slot.learn(node, asking.read_response())
        finally:
            asking.disconnect()

    def read_response(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().read_response(*args, **kwargs)
        except MovedError as error:
            self.disconnect()
            self._slot.move((self.host, self.port), error)
            raise ConnectionError("the queue has moved to another node of the cluster") from None


class ClusterTcp(_Follower, Tcp):
    plain = Tcp


class ClusterTls(_Follower, Tls):
    plain = Tls


class _AsyncFollower(aioredis.connection.AbstractConnection):
    """`_Follower` for asyncio."""

    plain: type[aioredis.Connection]
    host: str
    port: int

    def __init__(self, *, slot: Slot, **kwargs: Any) -> None:
        self._slot = slot
        self._kwargs = kwargs
        super().__init__(**kwargs)

    async def connect(self) -> None:
        if self.is_connected:
            return
        self.host, self.port = self._slot.primary or await self._find()
        await super().connect()  # type: ignore[no-untyped-call]  # redis-py does not annotate it

    async def disconnect(self, *args: Any, **kwargs: Any) -> None:
        """Forget the node, however the connection ended: a failing node may fall silent, and a queue may move without notice."""
        await super().disconnect(*args, **kwargs)
        self._slot.lose((self.host, self.port))

    async def _find(self) -> Address:
        return await ask_each_async(self._slot.nodes, self._ask, UNKNOWN)

    async def _ask(self, node: Address) -> Address:
        asking = self.plain(**_to_ask(node, self._kwargs))
        try:
            await asking.connect()
            await asking.send_command("CLUSTER", "SLOTS")
            return self._slot.learn(node, await asking.read_response())
        finally:
            await asking.disconnect(nowait=True)

    async def read_response(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return await super().read_response(*args, **kwargs)
        except MovedError as error:
            await self.disconnect(nowait=True)
            self._slot.move((self.host, self.port), error)
            raise ConnectionError("the queue has moved to another node of the cluster") from None


class AsyncClusterTcp(_AsyncFollower, AsyncTcp):
    plain = AsyncTcp


class AsyncClusterTls(_AsyncFollower, AsyncTls):
    plain = AsyncTls


FOLLOWERS: dict[type, type] = {cls.plain: cls for cls in (ClusterTcp, ClusterTls, AsyncClusterTcp, AsyncClusterTls)}
