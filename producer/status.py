"""What a queue is doing, read from its plain keys."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import redis
from redis.exceptions import ResponseError

from producer.keys import GROUP, TIERS, Keys, Tier


@dataclass(frozen=True, slots=True)
class TierStatus:
    """One tier's stream.

    Attributes:
        queued: entries that have been given to no worker yet.
        running: entries that a worker holds, or held when it died.
        oldest_age_s: how long the oldest queued entry has been waiting; None if there is none.
    """

    tier: Tier
    queued: int
    running: int
    oldest_age_s: float | None


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """What a worker reports of itself; None for what it does not report.

    Attributes:
        state: ``starting``, ``running``, ``draining``, ….
        batch_size: requests that run in its engine.
        fields: everything it reports, as text.
    """

    name: str
    state: str
    model: str
    batch_size: int | None
    free_blocks: int | None
    total_blocks: int | None
    tokens_per_s: float | None
    uptime_s: float | None
    fields: Mapping[str, str] = field(repr=False, default_factory=dict)

    @property
    def batch(self) -> str:
        """Requests that run in its engine, and the most that may, as ``3/100``; as far as it reports them."""
        size, most = self.batch_size, _optional_integer(self.fields.get("max_batch_size"))
        return "" if size is None else str(size) if most is None else f"{size}/{most}"

    @property
    def last_error(self) -> tuple[int, str] | None:
        """When it last answered a request with an error (Redis time in ms), and the error's code; None if it never has."""
        ms, code = _optional_integer(self.fields.get("last_error_ms")), self.fields.get("last_error")
        return (ms, code) if ms and code else None

    @property
    def cache_use(self) -> float | None:
        """The part of the KV cache that requests hold, 0 to 1; cached blocks count as free."""
        if not self.total_blocks or self.free_blocks is None:
            return None
        cached = _optional_integer(self.fields.get("cached_blocks")) or 0
        return max(0, self.total_blocks - self.free_blocks - cached) / self.total_blocks


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """A queue's tiers, live workers (by name) and number of dead letters."""

    queue: str
    tiers: list[TierStatus]
    workers: list[WorkerStatus]
    dead: int


def read_status(client: redis.Redis, queue: str) -> QueueStatus:
    """Read a queue's status; a queue that was never used is empty. The cost does not depend on how much the server holds.

    Raises:
        redis.RedisError: Redis is in trouble.
    """
    keys = Keys(queue)
    return QueueStatus(
        queue=queue,
        tiers=read_tiers(client, keys),
        workers=sorted(_workers(client, keys), key=lambda worker: worker.name),
        dead=_integer(client.execute_command("XLEN", keys.dead)),
    )


def read_tiers(client: redis.Redis, keys: Keys) -> list[TierStatus]:
    """The part of `read_status` that is about the streams."""
    [seconds, microseconds] = client.execute_command("TIME")
    now_s = int(seconds) + int(microseconds) / 1e6
    return [_tier(client, keys, tier, now_s) for tier in TIERS]


def _tier(client: redis.Redis, keys: Keys, tier: Tier, now_s: float) -> TierStatus:
    stream = keys.stream(tier)
    length = _integer(client.execute_command("XLEN", stream))
    group = _group(client, stream)
    running = _integer(group.get("pending", 0))
    lag = group.get("lag")
    queued = _integer(lag) if lag is not None else max(0, length - running)
    oldest = client.execute_command("XRANGE", stream, f"({_text(group.get('last-delivered-id', '0-0'))}", "+", "COUNT", 1)
    age_s = max(0.0, now_s - int(_text(oldest[0][0]).partition("-")[0]) / 1000) if oldest else None
    return TierStatus(tier, queued, running, age_s)


def _group(client: redis.Redis, stream: str) -> dict[str, Any]:
    """The workers' group; empty if the stream or the group does not exist."""
    try:
        groups = client.xinfo_groups(stream)
    except ResponseError:
        return {}
    return next((group for group in groups if _text(group["name"]) == GROUP), {})


def _workers(client: redis.Redis, keys: Keys) -> Iterator[WorkerStatus]:
    names = [_text(name) for name in client.execute_command("ZRANGE", keys.workers, 0, -1)]
    with client.pipeline(transaction=False) as pipeline:
        for name in names:
            pipeline.hgetall(keys.worker(name))
        for name, found in zip(names, pipeline.execute(), strict=True):
            if found:  # else the worker has died
                yield _worker(name, {_text(field): _text(value) for field, value in found.items()})


def _worker(name: str, said: Mapping[str, str]) -> WorkerStatus:
    return WorkerStatus(
        name=name,
        state=said.get("state", ""),
        model=said.get("model", ""),
        batch_size=_optional_integer(said.get("batch_size")),
        free_blocks=_optional_integer(said.get("free_blocks")),
        total_blocks=_optional_integer(said.get("total_blocks")),
        tokens_per_s=_optional_float(said.get("tokens_per_s")),
        uptime_s=_optional_float(said.get("uptime_s")),
        fields=said,
    )


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _integer(value: Any) -> int:
    return int(value)


def _optional_integer(value: str | None) -> int | None:
    number = _optional_float(value)
    return None if number is None else int(number)


def _optional_float(value: str | None) -> float | None:
    """A value that we cannot read, from a worker of another version, counts as missing."""
    try:
        number = float(value) if value is not None else None
    except ValueError:
        return None
    return number if number is None or math.isfinite(number) else None
