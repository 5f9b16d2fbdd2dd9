"""Two consumers of one queue, and what they do with its entries."""

from __future__ import annotations

from typing import Any

import redis

from producer.keys import GROUP, Keys
from producer.wire import Chunk, Result
from tests.workers import QueueView
from worker.stream.consumer import Consumer
from worker.stream.delivery import Delivery, Settlement
from worker.stream.ledger import Begun, Ledger, Settled

BODY = b'{"prompt":"hi"}'


class LedgerPair:
    """A queue with the ledgers of two consumers, `one` and `two`, on it."""

    def __init__(self, client: redis.Redis, queue: str) -> None:
        self.client = client
        self.keys = Keys(queue)
        self.round_trips: list[float] = []
        self.view = QueueView(client, queue)
        self.one, self.two = (self.ledger(name) for name in ("one", "two"))
        Consumer(client, self.keys, "one", 1.0).ensure_groups()

    def ledger(self, name: str, **options: Any) -> Ledger:
        return Ledger(
            self.client,
            self.keys,
            name,
            **{"max_attempts": 3, "reply_ttl_s": 3600, "state_ttl_s": 86400, "on_round_trip": self.round_trips.append} | options,
        )

    def put(self, request_id: str = "x1", tier: str = "realtime", **fields: Any) -> str:
        entry: bytes = self.client.xadd(self.keys.prefix + tier, {"id": request_id, "json": BODY, **fields})
        return entry.decode()

    def read(self, name: str = "one", lease_s: float = 1.0) -> list[Delivery]:
        entries = Consumer(self.client, self.keys, name, lease_s).read({"realtime": 10, "batch": 10}, block_ms=1)
        return [Delivery(entry) for entry in entries]

    def begun(self, name: str = "one", **fields: Any) -> Delivery:
        """A request that consumer ``name`` has and runs."""
        self.put(**fields)
        (delivery,) = self.read(name)
        (begun,) = self.ledger(name).begin([delivery])
        assert begun.verdict == "run"
        return delivery

    def stolen_by(self, name: str, delivery: Delivery) -> Delivery:
        """The same entry as another consumer's, as if the lease had lapsed."""
        self.client.xclaim(self.keys.stream(delivery.tier), GROUP, name, 0, [delivery.entry.id])
        return Delivery(delivery.entry)

    def count(self, delivery: Delivery) -> int:
        (pending,) = self.client.xpending_range(self.keys.stream(delivery.tier), GROUP, delivery.entry.id, delivery.entry.id, 1)
        return int(pending["times_delivered"])


def settle(ledger: Ledger, settlement: Settlement) -> Settled:
    (settled,) = ledger.write([], [settlement]).settled
    assert isinstance(settled, Settled), settled
    return settled


def finish(ledger: Ledger, delivery: Delivery, text: str = "ok") -> Settled:
    return settle(ledger, delivery.success(Result(id=delivery.request_id, text=text)))


def publish(ledger: Ledger, delivery: Delivery, index: int, *tokens: int) -> int | None:
    positions = ledger.write([delivery.tokens_frame(Chunk("".join(f" {t}" for t in tokens), list(tokens), index))], []).positions
    if isinstance(positions, redis.ResponseError):
        raise positions
    (position,) = positions
    return position


def begin(ledger: Ledger, delivery: Delivery) -> Begun:
    (begun,) = ledger.begin([delivery])
    return begun
