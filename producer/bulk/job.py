"""The function that rq runs: one bulk job, from wherever the last run left it, to its summary."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal

from redis import RedisError
from rq import get_current_job
from rq.job import Job

from producer.aio import AsyncClient
from producer.bulk.files import Extent, OutputFiles
from producer.bulk.lease import RunLease
from producer.bulk.runner import BulkRunner
from producer.bulk.spec import BulkSpec
from producer.core import DEFAULT_URL
from producer.errors import InvalidRequest

URL_VARIABLE = "HEADRACE_REDIS"  # not an argument of the job: it may hold a password
LEASE_VARIABLE = "HEADRACE_BULK_LEASE_S"  # the worker's ``--lease``, for the runs in its processes
LEASE_S = 30.0
CANCEL_FIELD = "headrace_cancel"  # of the rq job's hash
TICK_S = 1.0
PATIENCE_S = 600.0

State = Literal["running", "interrupted", "cancelled", "done"]


class Interrupted(Exception):
    """The bulk worker has to stop, or has died; the job continues with the next one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a job is; kept in the rq job's ``meta``, and the job's result at the end.

    Attributes:
        total: lines that are not blank; ``last_line`` is the number of the last of them.
        resumed: how many of those done were done by earlier runs.
        in_flight: requests on the queue.
        seconds: how long this run has taken.
    """

    state: State
    total: int
    last_line: int
    succeeded: int
    failed: int
    resumed: int
    in_flight: int
    prompt_tokens: int
    completion_tokens: int
    seconds: float
    output: str
    errors: str | None


def run(spec: dict[str, Any]) -> dict[str, Any] | None:
    """Run a bulk job inside an rq worker; returns its `Progress` at the end.

    Raises:
        Interrupted: the worker was told to stop; rq puts the job back, and does not count a retry.
        InvalidRequest, FileNotFoundError: the job can never be run; rq does not retry it.
    """
    job = get_current_job()
    assert job is not None, "called by rq alone"
    try:
        progress = asyncio.run(_run(job, BulkSpec.from_json(spec)))
        return asdict(progress) if progress is not None else job.return_value(refresh=True)
    except (InvalidRequest, FileNotFoundError):
        job.retries_left = 0
        raise
    except Interrupted:
        job.retries_left = (job.retries_left or 0) + 1
        raise


async def _run(job: Job, spec: BulkSpec) -> Progress | None:
    url = os.environ.get(URL_VARIABLE, DEFAULT_URL)
    async with AsyncClient(url, queue=spec.queue, patience_s=PATIENCE_S) as client:
        files = OutputFiles(spec)
        return await _Run(job, spec, files, BulkRunner(client, spec, files)).run()


class _Run:
    """A run: the runner, and beside it one tick per second that renews the lease, saves the progress and checks for reasons to stop.

    rq may put a job on its queue twice: a run that was cut off puts its job back when it finds that it has to stop, and the workers
    that took it for dead have done so already. The second run waits for the lease of the first.
    """

    def __init__(self, job: Job, spec: BulkSpec, files: OutputFiles, runner: BulkRunner) -> None:
        self._job = job
        self._spec = spec
        self._files = files
        self._runner = runner
        self._lease = RunLease(job.connection, job.id, float(os.environ.get(LEASE_VARIABLE, LEASE_S)))
        self._parent = os.getppid()
        self._started_s = time.monotonic()
        self._state: State = "running"
        self._begun = False
        self._saving = asyncio.Lock()  # the last save must be of the latest progress
        self._extent = Extent()
        self._resumed = 0

    async def run(self) -> Progress | None:
        """None if another run, which this one waited for, has finished the job."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._interrupt)
        try:
            while not await self._lease.take():
                await self._wait()
            try:
                return await self._run_alone() if not await self._is_finished() else None
            finally:
                await self._lease.release()
        finally:
            loop.remove_signal_handler(signal.SIGTERM)

    async def _wait(self) -> None:
        self._heed_parent()
        if self._state == "interrupted":
            raise Interrupted
        await asyncio.sleep(TICK_S)

    async def _is_finished(self) -> bool:
        """Whether some run has stored a result; the status does not tell, as rq has set it to started again by now."""
        return await asyncio.to_thread(self._job.return_value, True) is not None

    async def _run_alone(self) -> Progress:
        ticker = asyncio.create_task(_every(TICK_S, self._tick))
        try:
            await self._heed_cancel()
            self._extent = await self._measure()
            with ExitStack() as stack:
                await asyncio.to_thread(stack.enter_context, self._files)
                self._resumed = len(self._files.done)
                return await self._answer_lines()
        finally:
            ticker.cancel()
            await asyncio.gather(ticker, return_exceptions=True)

    async def _measure(self) -> Extent:
        """A cancelled job sends nothing more: earlier runs recorded how long its input was, even if it is gone by now."""
        if self._state != "cancelled":
            return await asyncio.to_thread(Extent.of, self._spec.input)
        meta = await asyncio.to_thread(self._job.get_meta)
        total = meta.get("total", 0)
        return Extent(total, meta.get("last_line", total))

    async def _answer_lines(self) -> Progress:
        await self._save()  # the job has begun: from here on `queue.cancel` leaves its requests to the last run
        self._begun = True
        await self._heed_cancel()
        if await self._runner.run():
            self._state = "done"
        elif self._state == "cancelled":
            await self._runner.withdraw(self._extent)
        await self._save(in_flight=0)
        if self._state == "interrupted":
            raise Interrupted
        if self._state == "done":
            self._files.finish()
        return self._progress(in_flight=0)

    async def _tick(self) -> None:
        """What Redis does not accept now waits for the next tick. A parent process that ended is noticed even during an outage."""
        self._heed_parent()
        with suppress(RedisError):
            if not await self._lease.renew():
                self._interrupt()
            if self._begun and self._state == "running":
                await self._save()
                await self._heed_cancel()

    def _heed_parent(self) -> None:
        if os.getppid() != self._parent:
            self._interrupt()

    async def _heed_cancel(self) -> None:
        if await asyncio.to_thread(self._job.connection.hexists, self._job.key, CANCEL_FIELD):
            self._state = "cancelled"
            self._runner.stop()

    def _interrupt(self) -> None:
        self._state = "interrupted"
        self._runner.stop()

    async def _save(self, in_flight: int | None = None) -> None:
        async with self._saving:
            self._job.meta = asdict(self._progress(in_flight))
            await asyncio.to_thread(self._job.save_meta)

    def _progress(self, in_flight: int | None = None) -> Progress:
        files = self._files
        return Progress(
            state=self._state,
            total=self._extent.total,
            last_line=self._extent.last,
            succeeded=files.succeeded,
            failed=files.failed,
            resumed=self._resumed,
            in_flight=self._runner.in_flight if in_flight is None else in_flight,
            prompt_tokens=files.usage.prompt_tokens,
            completion_tokens=files.usage.completion_tokens,
            seconds=round(time.monotonic() - self._started_s, 3),
            output=self._spec.output,
            errors=self._spec.errors if files.failed else None,
        )


async def _every(seconds: float, action: Callable[[], Awaitable[None]]) -> None:
    while True:
        await action()
        await asyncio.sleep(seconds)
