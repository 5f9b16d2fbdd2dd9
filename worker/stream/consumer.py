"""Reading from the request streams as one consumer of the group. Nothing here acknowledges, replies or counts attempts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import redis
from redis.exceptions import ResponseError

from producer.codec import request_id_of
from producer.keys import GROUP, TIERS, Keys, Tier
from producer.scripts import Argument
from worker.stream.scripts import load, run

MAX_PAGE = 100
_START = "0-0"


@dataclass(frozen=True, slots=True)
class Entry:
    """One request entry on a stream.

    Attributes:
        counted: whether the group's delivery count includes this delivery. If not, it is counted when it is begun, so that
            a delivery that a worker never began does not count against the request.
    """

    tier: Tier
    id: str
    fields: Mapping[bytes, bytes]
    counted: bool = True

    @property
    def position(self) -> tuple[int, int]:
        """On its stream: the server's Unix time in milliseconds when it was put, and a number among those of the same millisecond."""
        ms, _, sequence = self.id.partition("-")
        return int(ms), int(sequence)


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
        """Make streams and group if they are missing; a new group begins at the stream's first entry."""
        for tier in TIERS:
            try:
                self._client.xgroup_create(self._keys.stream(tier), GROUP, id="0", mkstream=True)
            except ResponseError as error:
                if not str(error).startswith("BUSYGROUP"):
                    raise

    def read(self, room: Mapping[Tier, int], block_ms: int) -> list[Entry]:
        """New entries, at most ``room`` of each tier: realtime alone if only it has room, else both tiers in one call.

        Waits up to ``block_ms`` for the first.
        """
        tiers, count = _page_of(room)
        streams: dict[Any, Any] = {self._keys.stream(tier): ">" for tier in tiers}
        reply: Any = self._client.xreadgroup(GROUP, self._name, streams, count=count, block=max(1, block_ms))
        by_stream = {stream.decode(): entries for stream, entries in reply or ()}
        return [entry for tier in tiers for entry in _entries(tier, by_stream.get(self._keys.stream(tier), ()))]

    def read_now(self, room: Mapping[Tier, int]) -> list[Entry]:
        """As `read`, without waiting; these are not counted."""
        tiers, count = _page_of(room)
        (reply,) = run(self._client, [(load("read_now"), [self._keys.stream(tier) for tier in tiers], [GROUP, self._name, count])])
        by_stream = {stream.decode(): entries for stream, entries in reply}
        return [entry for tier in tiers for entry in _uncounted(tier, by_stream.get(self._keys.stream(tier), ()))]

    def claim(self, tier: Tier, count: int) -> list[Entry]:
        """Take over up to ``count`` entries whose lease lapsed or that were handed back.

        One page of the pending list per call; the cursor is kept, so that successive calls go through all of it.
        """
        args: list[Argument] = [GROUP, self._name, self._lease_ms, self._cursors[tier], min(count, MAX_PAGE)]
        ((cursor, entries),) = run(self._client, [(load("claim"), [self._keys.stream(tier)], args)])
        self._cursors[tier] = cursor.decode()
        return _uncounted(tier, entries)

    def claim_is_under_way(self, tier: Tier) -> bool:
        """Whether a tier's pending list has been read in part."""
        return self._cursors[tier] != _START

    def own_pending(self, known: Known, *, crashed: bool) -> list[Entry]:
        """Entries that are pending for this consumer and not in ``known``.

        After a crash they belonged to a former process of the same name, and this is a new delivery. It is one too if a worker
        has begun them before and died, or handed them back. Otherwise the reply that brought them was lost on its way. The
        delivery count does not change, however often this is called.
        """
        return [entry for tier in TIERS for entry in self._own_pending(tier, known, crashed)]

    def _own_pending(self, tier: Tier, known: Known, crashed: bool) -> list[Entry]:
        stream, start, found = self._keys.stream(tier), "-", []
        while page := self._page(stream, start):
            ids = [item["message_id"].decode() for item in page]
            unknown = [entry_id for entry_id in ids if not known(tier, entry_id)]
            (held,) = run(self._client, [(load("reclaim"), [stream], [GROUP, self._name, *unknown])])
            entries = _uncounted(tier, [entry for _, entry in held])
            just_read = self._never_begun(entries) if not crashed else [False] * len(entries)
            found += [
                replace(entry, counted=count == 1 and fresh)  # a read counts by itself
                for entry, (count, _), fresh in zip(entries, held, just_read, strict=True)
            ]
            start = f"({ids[-1]}"
        return found

    def _never_begun(self, entries: Sequence[Entry]) -> list[bool]:
        with self._client.pipeline(transaction=False) as pipeline:
            for entry in entries:
                pipeline.hget(self._keys.state(request_id_of(entry.fields) or entry.id), "attempt")
            return [not isinstance(attempt, bytes) for attempt in pipeline.execute(raise_on_error=False)]

    def _page(self, stream: str, start: str) -> list[dict[str, Any]]:
        return list(self._client.xpending_range(stream, GROUP, start, "+", MAX_PAGE, consumername=self._name))


def _page_of(room: Mapping[Tier, int]) -> tuple[list[Tier], int]:
    tiers = [tier for tier in TIERS if room.get(tier, 0) > 0]
    assert tiers, "nothing to read for"
    return tiers, min(MAX_PAGE, *(room[tier] for tier in tiers))


def _uncounted(tier: Tier, entries: Any) -> list[Entry]:
    """Entries from a script's reply, in which fields are a flat list."""
    return [Entry(tier, id_.decode(), dict(zip(fields[::2], fields[1::2], strict=True)), counted=False) for id_, fields in entries]


def _entries(tier: Tier, entries: Any) -> list[Entry]:
    """Entries from the reply of a redis-py command. One that was deleted while pending may come as nil."""
    return [Entry(tier, item[0].decode(), item[1]) for item in entries if item is not None and None not in item]
