"""Every Redis key of a queue, in one place.

``{queue}`` is a Redis Cluster hash tag: all keys of one queue share a slot, so that a script may
touch several of them. Names and ids are checked before they become part of a key, so neither can
be used to reach another key.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from producer.errors import InvalidRequest

Tier = Literal["realtime", "batch"]
TIERS: tuple[Tier, ...] = ("realtime", "batch")
GROUP = "workers"
CONTROL_LENGTH = 10_000  # entries, approximately, to which the streams of orders are trimmed

_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}\Z")


def check_name(field: str, value: object) -> str:
    """Return ``value`` if it is 1-128 characters of ``[A-Za-z0-9._-]``, else raise `InvalidRequest`."""
    if not isinstance(value, str):
        raise InvalidRequest(f"{field} must be a string, not {type(value).__name__}", field=field)
    if not _NAME.match(value):
        raise InvalidRequest(f"{field} must be 1-128 characters of [A-Za-z0-9._-] (got {len(value)} characters)", field=field)
    return value


def check_tier(value: object) -> Tier:
    """Return ``value`` if it names a tier, else raise `InvalidRequest`."""
    for tier in TIERS:
        if value == tier:
            return tier
    raise InvalidRequest(f"tier must be one of {', '.join(TIERS)}", field="tier")


@dataclass(frozen=True, slots=True)
class Keys:
    """The key names of one queue."""

    queue: str

    def __post_init__(self) -> None:
        check_name("queue", self.queue)

    @property
    def prefix(self) -> str:
        return f"headrace:{{{self.queue}}}:"

    def stream(self, tier: Tier) -> str:
        """Stream of one tier's requests, read by group `GROUP`."""
        return self.prefix + tier

    def reply(self, request_id: str) -> str:
        """Stream of one request's frames."""
        return f"{self.prefix}reply:{request_id}"

    def state(self, request_id: str) -> str:
        """Hash of what is known of one request; outlives the reply."""
        return f"{self.prefix}state:{request_id}"

    def worker(self, name: str) -> str:
        """Hash of what one worker is doing; expires when the worker stops renewing it."""
        return f"{self.prefix}worker:{name}"

    @property
    def workers(self) -> str:
        """Sorted set of the live workers' names, scored by the time in ms at which each one's hash expires unless renewed."""
        return self.prefix + "workers"

    @property
    def dead(self) -> str:
        """Stream of dead letters."""
        return self.prefix + "dead"

    @property
    def control(self) -> str:
        """Stream of orders about requests, to all workers; callers may write to it."""
        return self.prefix + "control"

    @property
    def admin(self) -> str:
        """Stream of orders to all workers that only operators and workers may give."""
        return self.prefix + "admin"

    @property
    def limits(self) -> str:
        """Hash of queue-wide limits, field ``max_depth:<tier>``; read by the enqueue script."""
        return self.prefix + "limits"
