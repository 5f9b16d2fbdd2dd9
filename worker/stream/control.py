"""The control stream: orders to all workers. Each worker reads all of them, from its own start on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import redis

from producer.keys import Keys

MAX_ORDERS = 1000


@dataclass(frozen=True, slots=True)
class Order:
    """One order: ``cancel`` or ``stream`` a request, ``claim`` what ``worker`` has handed back, ``reload`` with ``model`` (``worker``, or
    all where that is ''); others are for other readers. ``id`` is the entry's.
    """

    op: str
    request_id: str = ""
    worker: str = ""
    model: str = ""
    id: str = ""


class Control:
    """Reads the control stream; used by one thread."""

    def __init__(self, client: redis.Redis, keys: Keys) -> None:
        self._client = client
        self._key = keys.control
        self._last_id: str | None = None

    def start(self) -> None:
        """Orders from now on will be read. To be called before the first request is: earlier orders are in the state hashes."""
        if self._last_id is None:
            last: Any = self._client.xrevrange(self._key, count=1)
            self._last_id = last[0][0].decode() if last else "0-0"

    def read(self, block_ms: int) -> list[Order]:
        """The next orders; waits up to ``block_ms`` for the first."""
        assert self._last_id is not None, "not started"
        reply: Any = self._client.xread({self._key: self._last_id}, count=MAX_ORDERS, block=max(1, block_ms))
        if not reply:
            return []
        [[_, entries]] = reply
        self._last_id = entries[-1][0].decode()
        return [_order(entry_id.decode(), fields) for entry_id, fields in entries]


def _order(entry_id: str, fields: dict[bytes, bytes]) -> Order:
    op, request_id, worker, model = (fields.get(name, b"").decode(errors="replace") for name in (b"op", b"id", b"worker", b"model"))
    return Order(op, request_id, worker, model, entry_id)
