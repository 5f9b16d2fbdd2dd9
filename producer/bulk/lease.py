"""One run of a bulk job at a time, whatever rq believes about the others: the lease that a run holds while it lives."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import redis
from redis.exceptions import LockError, RedisError

RECORDED_WITHIN_S = 1.0  # rq records a run's return within this time


class RunLease:
    """Held by the one run of a job that may send and write; free again ``lease_s`` after the last `renew`.

    It is redis-py's lock, whose token tells runs apart: a run whose token is gone did not renew it in time.
    """

    def __init__(self, connection: redis.Redis, job_id: str, lease_s: float) -> None:
        self._lock = connection.lock(f"rq:headrace-bulk:run:{job_id}", timeout=lease_s, thread_local=False)

    async def take(self) -> bool:
        """Take it; False if another run has it."""
        return await asyncio.to_thread(self._lock.acquire, blocking=False)

    async def renew(self) -> bool:
        """Keep it, or take it again if it has lapsed and no run has it; False if another run has it."""
        try:
            return await asyncio.to_thread(self._lock.reacquire)
        except LockError:
            return await self.take()

    async def release(self) -> None:
        """Let it lapse soon: the next run to take it then finds recorded how this run ended."""
        with suppress(RedisError):
            await asyncio.to_thread(self._lock.extend, RECORDED_WITHIN_S, replace_ttl=True)
