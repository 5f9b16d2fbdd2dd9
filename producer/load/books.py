"""What requests leave in Redis, and what workers still hold: load tests check that all of it is cleaned up."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import redis
from redis.exceptions import ResponseError

from producer.keys import GROUP, TIERS, Keys
from producer.load.report import Check
from producer.status import read_status

_PIPELINE = 256
_POLL_S = 0.1
_FINAL = (b"final", b"error")


@dataclass(frozen=True, slots=True)
class Remains:
    """How many of some requests are not as they should be once they have ended.

    Attributes:
        on_stream: their entry is still there.
        pending: a worker still holds their entry.
        without_ttl: their reply or state does not expire.
        not_once: they do not have exactly one final frame.
    """

    on_stream: int = 0
    pending: int = 0
    without_ttl: int = 0
    not_once: int = 0

    def __add__(self, other: Remains) -> Remains:
        return Remains(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    def checks(self, num_requests: int) -> list[Check]:
        """One check per count."""

        def check(name: str, count: int) -> Check:
            return Check(name, count == 0, f"{num_requests - count} of {num_requests}")

        return [
            check("every request has exactly one final reply", self.not_once),
            check("every entry has left its stream", self.on_stream),
            check("no entry is pending", self.pending),
            check("every reply and state has a lifetime", self.without_ttl),
        ]


def remains(client: redis.Redis, keys: Keys, request_ids: Sequence[str]) -> Remains:
    """Look at what ``request_ids`` have left."""
    total = Remains()
    for start in range(0, len(request_ids), _PIPELINE):
        part = request_ids[start : start + _PIPELINE]
        total = total + _of_keys(client, keys, part) + _of_entries(client, keys, part)
    return total


def _of_keys(client: redis.Redis, keys: Keys, request_ids: Sequence[str]) -> Remains:
    with client.pipeline(transaction=False) as pipeline:
        for request_id in request_ids:
            pipeline.xrevrange(keys.reply(request_id), count=2)
            pipeline.pttl(keys.reply(request_id))
            pipeline.pttl(keys.state(request_id))
        replies: list[Any] = pipeline.execute()
    found = list(zip(replies[::3], replies[1::3], replies[2::3], strict=True))
    return Remains(
        not_once=sum([frame[b"type"] in _FINAL for _, frame in frames] not in ([True], [True, False]) for frames, _, _ in found),
        without_ttl=sum(-1 in (reply_ttl, state_ttl) for _, reply_ttl, state_ttl in found),
    )


def _of_entries(client: redis.Redis, keys: Keys, request_ids: Sequence[str]) -> Remains:
    with client.pipeline(transaction=False) as pipeline:
        for request_id in request_ids:
            pipeline.hmget(keys.state(request_id), "entry", "tier")
        entries = [(entry, tier) for entry, tier in pipeline.execute() if entry is not None and tier.decode() in TIERS]
        for entry, tier in entries:
            stream = keys.prefix + tier.decode()
            pipeline.xrange(stream, entry, entry)
            pipeline.xpending_range(stream, GROUP, entry, entry, 1)
        replies: list[Any] = pipeline.execute(raise_on_error=False) if entries else []
    return Remains(on_stream=_count(replies[::2]), pending=_count(replies[1::2]))


def _count(replies: Sequence[Any]) -> int:
    """How many found something; NOGROUP, if no worker ever came, means nothing pending."""
    return sum(bool(reply) and not isinstance(reply, ResponseError) for reply in replies)


def is_idle(client: redis.Redis, queue: str) -> bool:
    """Whether nothing at all is queued or running."""
    return all(tier.queued == tier.running == 0 for tier in read_status(client, queue).tiers)


def held_by_workers(client: redis.Redis, queue: str) -> int:
    """How many requests and KV blocks live workers hold, by their heartbeats."""
    held = 0
    for worker in read_status(client, queue).workers:
        said = {name: int(worker.fields.get(name, 0)) for name in ("held", "free_blocks", "cached_blocks", "total_blocks")}
        held += said["held"] + said["total_blocks"] - said["free_blocks"] - said["cached_blocks"]
    return held


def settle(look: Callable[[], Any], clean: Any, timeout_s: float) -> Any:
    """Repeat ``look`` until it returns ``clean`` or time is up; returns its last result."""
    deadline_at_s = time.monotonic() + timeout_s
    while (found := look()) != clean and time.monotonic() < deadline_at_s:
        time.sleep(_POLL_S)
    return found
