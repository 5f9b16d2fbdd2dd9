"""Dead letters: requests that were given up, kept for an operator to inspect, run again or throw away."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import redis

from producer.calls import STATE_TTL_MS
from producer.codec import encoding_of, request_id_of
from producer.errors import InvalidRequest
from producer.keys import Keys, Tier, check_tier
from producer.scripts import Argument, load

PREFIX = b"dead_"
PAGE = 256
_NOT_REPLAYED = (b"enqueued_ms", b"deadline_ms", b"history")  # a deadline that has passed would end it at once


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """One dead letter.

    Attributes:
        entry: its id on the stream of dead letters.
        request: the request's entry, as it was on its stream.
        code, message, attempts, worker, ms: how it died, after how many attempts, on which worker last, and when (Redis time).
        history: its earlier deaths, oldest first, if it was replayed before.
    """

    entry: str
    request: Mapping[bytes, bytes]
    tier: str
    code: str
    message: str
    attempts: int
    worker: str
    ms: int
    history: list[dict[str, Any]]

    @property
    def id(self) -> str:
        return _text(self.request.get(b"id", b""))

    @property
    def death(self) -> dict[str, Any]:
        """This death, as an item of the history."""
        return {"code": self.code, "message": self.message, "attempts": self.attempts, "worker": self.worker, "ms": self.ms}


def letters(client: redis.Redis, keys: Keys) -> Iterator[DeadLetter]:
    """All dead letters, oldest first, read in pages.

    Raises:
        redis.RedisError: Redis is in trouble.
    """
    start = "-"
    while True:
        page: Any = client.xrange(keys.dead, start, "+", count=PAGE)
        yield from (_letter(_text(entry_id), fields) for entry_id, fields in page)
        if len(page) < PAGE:
            return
        start = f"({_text(page[-1][0])}"


def latest(client: redis.Redis, keys: Keys, count: int) -> list[DeadLetter]:
    """The last ``count`` dead letters, newest first.

    Raises:
        redis.RedisError: Redis is in trouble.
    """
    page: Any = client.xrevrange(keys.dead, "+", "-", count=count)
    return [_letter(_text(entry_id), fields) for entry_id, fields in page]


def replay(client: redis.Redis, keys: Keys, letter: DeadLetter) -> str:
    """Put ``letter`` back on its stream, as the same request with its history; its old state and reply are deleted.

    Returns:
        ``queued``; ``gone`` if it is no longer a dead letter; ``busy`` if its id is queued or running again; ``answered``
        if the id has been put again since, and the present reply is not that of this death.

    Raises:
        InvalidRequest: the letter has no usable id, or does not say which tier it belongs to.
    """
    tier: Tier = check_tier(letter.tier)
    if request_id_of(letter.request) is None:
        raise InvalidRequest("id is missing or unusable: what was never a request cannot be replayed", field="id")
    fields = {name: value for name, value in letter.request.items() if name not in _NOT_REPLAYED}
    fields[b"history"] = json.dumps([*letter.history, letter.death]).encode()
    names = (keys.dead, keys.stream(tier), keys.reply(letter.id), keys.state(letter.id))
    args: list[Argument] = [letter.entry, letter.ms, tier, encoding_of(letter.request), STATE_TTL_MS]
    args += [part for item in fields.items() for part in item]
    return _text(load("replay")(client, names, args)[0])


def purge(client: redis.Redis, keys: Keys, letter: DeadLetter) -> bool:
    """Throw ``letter`` away; returns whether it was still there."""
    return bool(client.xdel(keys.dead, letter.entry))


def _letter(entry_id: str, fields: Mapping[bytes, bytes]) -> DeadLetter:
    return DeadLetter(
        entry=entry_id,
        request={name: value for name, value in fields.items() if not name.startswith(PREFIX)},
        tier=_text(fields.get(b"dead_tier", b"")),
        code=_text(fields.get(b"dead_code", b"")),
        message=_text(fields.get(b"dead_message", b"")),
        attempts=_number(fields.get(b"dead_attempts", b"")),
        worker=_text(fields.get(b"dead_worker", b"")),
        ms=_number(fields.get(b"dead_ms", b"")),
        history=_history(fields.get(b"history", b"[]")),
    )


def _history(value: bytes) -> list[dict[str, Any]]:
    """A caller may write anything into this field; anything that is not a history counts as none."""
    try:
        history = json.loads(value.decode())
    except (ValueError, RecursionError):
        return []
    return [item for item in history if isinstance(item, dict)] if isinstance(history, list) else []


def _text(value: bytes) -> str:
    return value.decode(errors="replace")


def _number(value: bytes) -> int:
    return int(value) if value.isdigit() and len(value) < 20 else 0
