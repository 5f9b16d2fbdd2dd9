"""What a worker reports of itself, and what it sees of the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import redis
from redis.exceptions import ResponseError

from producer.keys import GROUP, TIERS, Keys, Tier
from producer.scripts import Argument
from producer.status import TierStatus, read_tiers
from worker.stream.scripts import load


class Heartbeat:
    """One worker's hash of plain fields, and its name among the workers'; both expire when the worker stops writing.

    Args:
        ttl_s: lifetime without a further beat.
    """

    def __init__(self, client: redis.Redis, keys: Keys, name: str, ttl_s: float) -> None:
        self._client = client
        self._keys = keys
        self._name = name
        self._ttl_ms = int(ttl_s * 1000)
        self._started_ms: int | None = None

    def beat(self, fields: Mapping[str, Argument]) -> None:
        """Write ``fields``, and beside them ``started_ms``, the Redis time of the first beat."""
        if self._started_ms is None:
            seconds, microseconds = self._client.time()
            self._started_ms = seconds * 1000 + microseconds // 1000
        said = [part for item in {**fields, "started_ms": self._started_ms}.items() for part in item]
        load("beat")(self._client, [self._keys.worker(self._name), self._keys.workers], [self._name, self._ttl_ms, *said])

    def stop(self) -> None:
        """Remove both: the worker ends regularly."""
        self._client.delete(self._keys.worker(self._name))
        self._client.zrem(self._keys.workers, self._name)

    def tiers(self) -> list[TierStatus]:
        """The present status of the queue's tiers, whichever workers serve them."""
        return read_tiers(self._client, self._keys)

    def others_without_work(self) -> set[str]:
        """Consumers of the group, apart from this one, that have nothing pending on one of the streams."""
        names = set()
        for tier in TIERS:
            for consumer in self._consumers(tier):
                name = consumer["name"].decode(errors="replace")
                if consumer["pending"] == 0 and name != self._name:
                    names.add(name)
        return names

    def holder_of_most(self) -> str:
        """The other worker with the most requests that wait beyond its engine's room; '' if none has any."""
        holders = {consumer["name"].decode(errors="replace") for tier in TIERS for consumer in self._consumers(tier) if consumer["pending"]}
        ahead = {name: self._ahead_of(name) for name in holders - {self._name}}
        return max((name for name in ahead if ahead[name]), key=ahead.__getitem__, default="")

    def _ahead_of(self, name: str) -> int:
        said: Any = self._client.hget(self._keys.worker(name), "ahead")
        return int(said) if said is not None and said.isdigit() else 0

    def _consumers(self, tier: Tier) -> list[dict[str, Any]]:
        try:
            return list(self._client.xinfo_consumers(self._keys.stream(tier), GROUP))
        except ResponseError as error:
            if str(error).startswith(("NOGROUP", "no such key")):  # the reader of the streams makes them again
                return []
            raise


def eviction_policy(client: redis.Redis) -> str:
    """The server's ``maxmemory-policy``, or '' if it does not say."""
    try:
        return str(client.info("memory").get("maxmemory_policy", ""))
    except ResponseError:  # INFO may be forbidden to us
        return ""
