"""What a bulk job's record says last."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, cast

import redis
from rq.job import Job

from producer.aio import AsyncClient
from producer.bulk.files import OutputFiles
from producer.bulk.job import _Run
from producer.bulk.runner import BulkRunner
from producer.bulk.spec import BulkSpec


class SlowJob:
    """A job's record behind a server that is slow to take the first save."""

    def __init__(self) -> None:
        self.id, self.connection, self.meta = "j", redis.Redis(), dict[str, Any]()
        self.saved: list[Any] = []
        self.began, self.go_on = threading.Event(), threading.Event()

    def save_meta(self) -> None:
        state = self.meta["state"]
        if not self.began.is_set():
            self.began.set()
            assert self.go_on.wait(30)
        self.saved.append(state)


def test_a_ticks_save_that_is_under_way_does_not_overtake_the_last_one() -> None:
    async def scenario() -> list[Any]:
        job, spec = SlowJob(), BulkSpec(job_id="j", input="/i", output="/o", errors="/e")
        files = OutputFiles(spec)
        run = _Run(cast("Job", job), spec, files, BulkRunner(cast("AsyncClient", None), spec, files))
        tick = asyncio.create_task(run._save())
        await asyncio.to_thread(job.began.wait, 30)
        run._state = "done"
        last = asyncio.create_task(run._save(in_flight=0))
        late_tick = asyncio.create_task(run._save())
        await asyncio.sleep(0)  # the others have begun
        job.go_on.set()
        await asyncio.gather(tick, last, late_tick)
        return job.saved

    assert asyncio.run(scenario()) == ["running", "done", "done"]
