"""Fetches a worker's next requests: first those that it owns already, then those without an owner, then new ones."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence

from redis.exceptions import ResponseError

from producer.keys import TIERS, Tier
from worker.registry import Registry
from worker.stream.consumer import Consumer, Entry

BLOCK_MS = 250  # one slice of a blocking read: how late a claim or a stop may be noticed


class Fetcher:
    """Fetches entries that the registry does not know. Used by one thread, except `claim_soon` and `reread_soon`."""

    def __init__(self, consumer: Consumer, registry: Registry, lease_s: float) -> None:
        self._consumer = consumer
        self._registry = registry
        self._lease_s = lease_s
        self._first = True
        self._reread = True  # there may be entries pending for us that we do not know
        self._claim_at_s = 0.0
        self._claim_wanted = threading.Event()
        self._claiming: set[Tier] = set()  # tiers whose pending list has not been searched to its end

    @property
    def claiming(self) -> bool:
        """Whether pending lists are being searched, and more may be found there."""
        return bool(self._claiming)

    def claim_soon(self) -> None:
        """Another worker has handed requests back. May be called from any thread."""
        self._claim_wanted.set()

    def reread_soon(self) -> None:
        """There may be entries pending for us that we do not know. May be called from any thread."""
        self._reread = True

    def fetch(self, wanted: Mapping[Tier, int], *, patient: bool) -> Sequence[Entry]:
        """Return at most ``wanted`` entries of each tier, and all that belong to this worker already.

        Args:
            patient: wait up to `BLOCK_MS` for something new.
        """
        if self._reread:
            return self._own_pending()
        claimed = self._claim(wanted)
        taken = Counter(entry.tier for entry in claimed)
        left = {tier: wanted[tier] - taken[tier] for tier in TIERS}
        if not any(left.values()):
            return claimed
        patient = patient and not any(wanted[tier] for tier in self._claiming)
        return claimed + (self._consumer.read(left, BLOCK_MS) if patient else self._consumer.read_now(left))

    def recover(self, error: Exception) -> None:
        """Redis was in trouble: replies on their way may be lost, and so may the group."""
        self._reread = True
        self._claiming.clear()
        # Leases ran on meanwhile: living workers renew theirs first.
        self._claim_at_s = max(self._claim_at_s, time.monotonic() + self._lease_s / 3)
        if isinstance(error, ResponseError) and str(error).startswith("NOGROUP"):
            self._consumer.ensure_groups()

    def _own_pending(self) -> Sequence[Entry]:
        if self._first:
            self._consumer.ensure_groups()
        entries = self._consumer.own_pending(self._registry.knows, crashed=self._first)
        self._first = self._reread = False
        return entries

    def _claim(self, wanted: Mapping[Tier, int]) -> list[Entry]:
        if self._claim_wanted.is_set() or time.monotonic() >= self._claim_at_s:
            self._claim_wanted.clear()
            self._claiming.update(TIERS)
            self._claim_at_s = time.monotonic() + self._lease_s / 2 * random.uniform(0.8, 1.0)
        claimed: list[Entry] = []
        for tier in [tier for tier in TIERS if tier in self._claiming and wanted[tier]]:
            page = self._consumer.claim(tier, wanted[tier])
            if not page and not self._consumer.claim_is_under_way(tier):
                self._claiming.discard(tier)
            claimed += [entry for entry in page if not self._registry.knows(tier, entry.id)]
        return claimed
