"""Sentinels: the master is the one named by the first sentinel that answers."""

from __future__ import annotations

from typing import Any

from redis.asyncio.sentinel import Sentinel as RedisAsyncSentinel
from redis.asyncio.sentinel import SentinelConnectionPool
from redis.sentinel import MasterNotFoundError
from redis.sentinel import Sentinel as RedisSentinel

from producer.failover import ask_each, ask_each_async
from producer.sockets import Address


class Sentinel(RedisSentinel):
    def discover_master(self, service_name: str) -> Address:
        """Raises ConnectionError if no sentinel names it."""
        return ask_each(self.sentinels, lambda sentinel: _master(self, service_name, sentinel.sentinel_masters()), _failure(service_name))


class AsyncSentinel(RedisAsyncSentinel):
    """`Sentinel` for asyncio."""

    async def discover_master(self, service_name: str) -> Address:
        async def ask(sentinel: Any) -> Address:
            return _master(self, service_name, await sentinel.sentinel_masters())

        return await ask_each_async(self.sentinels, ask, _failure(service_name))


class AsyncPool(SentinelConnectionPool):
    """Closes the connections to the sentinels with its own: redis-py leaves them open, and an event loop closes nothing by itself."""

    async def aclose(self) -> None:
        await super().aclose()
        for sentinel in self.sentinel_manager.sentinels:
            await sentinel.aclose()


def _failure(service_name: str) -> str:
    return f"no sentinel knows the master of {service_name!r}"


def _master(asking: Sentinel | AsyncSentinel, service_name: str, masters: Any) -> Address:
    """The master's address in ``masters``, a sentinel's answer."""
    state = masters.get(service_name)
    if state is None or not asking.check_master_state(state, service_name):
        raise MasterNotFoundError("there is none, or it is down")
    return state["ip"], state["port"]
