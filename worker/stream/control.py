"""Orders to workers: from any caller, or from operators and other workers. Each worker reads all of them since its start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import redis

from producer.keys import CONTROL_LENGTH, Keys

MAX_ORDERS = 1000


@dataclass(frozen=True, slots=True)
class Order:
    """One order. ``id`` is the entry's.

    ``cancel`` or ``stream`` a request; ``claim`` what ``worker`` has handed back (for ``recipient``, or all workers if that is '');
    ``share`` waiting requests of ``worker`` with ``recipient``; ``reload`` with ``model`` (``worker``, or all if that is '').
    """

    op: str
    request_id: str = ""
    worker: str = ""
    model: str = ""
    recipient: str = ""
    id: str = ""


class Control:
    """Reads both streams; used by one thread. An order on the wrong stream is ignored: rights are granted by stream."""

    def __init__(self, client: redis.Redis, keys: Keys) -> None:
        self._client = client
        self._ops = {keys.control: ("cancel", "stream", "claim"), keys.admin: ("reload", "share")}
        self._admin = keys.admin
        self._last_ids: dict[Any, Any] = {}

    def start(self) -> None:
        """Read orders from now on. To be called before the first request is read: earlier orders are in the state hashes."""
        if not self._last_ids:
            self._last_ids = {key: self._last_id(key) for key in self._ops}

    def _last_id(self, key: str) -> str:
        last: Any = self._client.xrevrange(key, count=1)
        return last[0][0].decode() if last else "0-0"

    def read(self, block_ms: int) -> list[Order]:
        """The next orders; waits up to ``block_ms`` for the first."""
        assert self._last_ids, "not started"
        reply: Any = self._client.xread(self._last_ids, count=MAX_ORDERS, block=max(1, block_ms))
        orders = []
        for raw_key, entries in reply or ():
            key = raw_key.decode()
            self._last_ids[key] = entries[-1][0].decode()
            found = [_order(entry_id.decode(), fields) for entry_id, fields in entries]
            orders += [order for order in found if order.op in self._ops[key]]
        return orders

    def ask_to_share(self, worker: str, recipient: str) -> None:
        """Have ``worker`` hand back some of its waiting requests, for ``recipient`` to claim."""
        self._client.xadd(self._admin, {"op": "share", "worker": worker, "for": recipient}, maxlen=CONTROL_LENGTH)


def _order(entry_id: str, fields: dict[bytes, bytes]) -> Order:
    names = (b"op", b"id", b"worker", b"model", b"for")
    op, request_id, worker, model, recipient = (fields.get(name, b"").decode(errors="replace") for name in names)
    return Order(op, request_id, worker, model, recipient, entry_id)
