"""Reading from the request streams as one consumer of the group. Nothing here acknowledges, replies or counts attempts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import redis
from redis.exceptions import ResponseError

from producer.keys import GROUP, TIERS, Keys, Tier

MAX_PAGE = 100
_START = "0-0"


@dataclass(frozen=True, slots=True)
class Entry:
    """One request entry as it stands on a stream."""

    tier: Tier
    id: str
    fields: Mapping[bytes, bytes]


Known = Callable[[Tier, str], bool]


class Consumer:
    """One consumer's reads; used by one thread."""

    def __init__(self, client: redis.Redis, keys: Keys, name: str, lease_s: float) -> None:
        self._client = client
        self._keys = keys
        self._name = name
        self._lease_ms = int(lease_s * 1000)
        self._cursors: dict[Tier, str] = dict.fromkeys(TIERS, _START)

    def ensure_groups(self) -> None:
        """Make streams and group where they are missing; a new group begins at the stream's first entry."""
        for tier in TIERS:
            try:
                self._client.xgroup_create(self._keys.stream(tier), GROUP, id="0", mkstream=True)
            except ResponseError as error:
                if not str(error).startswith("BUSYGROUP"):
                    raise

    def read(self, room: Mapping[Tier, int], block_ms: int) -> list[Entry]:
        """New entries, at most ``room`` of each tier: realtime's alone where only it has room, else both tiers in one call.

        Waits up to ``block_ms`` for the first.
        """
        tiers = [tier for tier in TIERS if room.get(tier, 0) > 0]
        assert tiers, "nothing to read for"
        count = min(MAX_PAGE, *(room[tier] for tier in tiers)) if len(tiers) > 1 else min(MAX_PAGE, room[tiers[0]])
        streams: dict[Any, Any] = {self._keys.stream(tier): ">" for tier in tiers}
        reply: Any = self._client.xreadgroup(GROUP, self._name, streams, count=count, block=max(1, block_ms))
        by_stream = {stream.decode(): entries for stream, entries in reply or ()}
        return [entry for tier in tiers for entry in _entries(tier, by_stream.get(self._keys.stream(tier), ()))]

    def claim(self, tier: Tier, count: int) -> list[Entry]:
        """Take over up to ``count`` entries whose lease lapsed or that were handed back. Each claim counts as a delivery.

        One page of the pending list a call; the cursor is carried round, so that calls go through all of it.
        """
        stream = self._keys.stream(tier)
        reply = self._client.xautoclaim(stream, GROUP, self._name, self._lease_ms, start_id=self._cursors[tier], count=min(count, MAX_PAGE))
        self._cursors[tier], entries = parse_autoclaim(reply)
        return _entries(tier, entries)

    def claim_is_under_way(self, tier: Tier) -> bool:
        """Whether a tier's pending list has been gone through in part."""
        return self._cursors[tier] != _START

    def own_pending(self, known: Known, *, crashed: bool) -> list[Entry]:
        """Entries that are pending for this consumer and that ``known`` does not know.

        After a crash they were a former process's of the same name, and being given them again is a delivery. Otherwise the
        reply that brought them was lost on its way, and the delivery count stays as it is.
        """
        return [entry for tier in TIERS for entry in self._own_pending(tier, known, crashed)]

    def _own_pending(self, tier: Tier, known: Known, crashed: bool) -> list[Entry]:
        stream, start, found = self._keys.stream(tier), "-", []
        while page := self._page(stream, start):
            ids = [item["message_id"].decode() for item in page]
            counts = {id_: item["times_delivered"] for id_, item in zip(ids, page, strict=True)}
            for id_ in ids:
                if not known(tier, id_):
                    options: dict[str, Any] = {} if crashed else {"retrycount": counts[id_]}
                    found += _entries(tier, self._client.xclaim(stream, GROUP, self._name, 0, [id_], **options))
            start = f"({ids[-1]}"
        return found

    def _page(self, stream: str, start: str) -> list[dict[str, Any]]:
        return list(self._client.xpending_range(stream, GROUP, start, "+", MAX_PAGE, consumername=self._name))


def parse_autoclaim(reply: list[Any]) -> tuple[str, list[Any]]:
    """Cursor and entries of an XAUTOCLAIM reply: of two elements (6.2), or of three, the last the deleted ids (7.0 and later)."""
    return reply[0].decode(), reply[1]


def _entries(tier: Tier, entries: Any) -> list[Entry]:
    """An entry that was deleted while pending comes as nil before 7.0: there is nothing to answer, and a renewal drops it."""
    return [Entry(tier, item[0].decode(), item[1]) for item in entries if item is not None and item[0] is not None and item[1] is not None]
