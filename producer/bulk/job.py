"""The function that rq runs: one bulk job, from wherever the last run left it, to its summary."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from redis import RedisError
from rq import get_current_job
from rq.job import Job

from producer.aio import AsyncClient
from producer.bulk.files import OutputFiles, read_lines
from producer.bulk.runner import BulkRunner
from producer.bulk.spec import BulkSpec
from producer.core import DEFAULT_URL
from producer.errors import InvalidRequest

URL_VARIABLE = "HEADRACE_REDIS"  # not among the job's arguments: it may hold a password
CANCEL_FIELD = "headrace_cancel"  # of the rq job's hash
TICK_S = 1.0
PATIENCE_S = 600.0

State = Literal["running", "interrupted", "cancelled", "done"]


class Interrupted(Exception):
    """The bulk worker is to stop, or has died; the job goes on with the next one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a job is; kept in the rq job's ``meta``, and its result in the end.

    Attributes:
        total: lines that are not blank.
        resumed: of those done, how many earlier runs did.
        in_flight: requests on the queue.
        seconds: that this run has taken.
    """

    state: State
    total: int
    succeeded: int
    failed: int
    resumed: int
    in_flight: int
    prompt_tokens: int
    completion_tokens: int
    seconds: float
    output: str
    errors: str | None


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """Run a bulk job inside an rq worker; returns its `Progress` at the end.

    Raises:
        Interrupted: the worker was told to stop; rq puts the job back, and that counts as no retry.
        InvalidRequest, FileNotFoundError: the job can never be run; rq does not retry it.
    """
    job = get_current_job()
    assert job is not None, "called by rq alone"
    try:
        return asdict(asyncio.run(_Run(job, BulkSpec.from_json(spec)).run()))
    except (InvalidRequest, FileNotFoundError):
        job.retries_left = 0
        raise
    except Interrupted:
        job.retries_left = (job.retries_left or 0) + 1
        raise


class _Run:
    """A run: the runner, and beside it a tick a second that saves the progress and looks for reasons to stop."""

    def __init__(self, job: Job, spec: BulkSpec) -> None:
        self._job = job
        self._spec = spec
        self._parent = os.getppid()
        self._started_s = time.monotonic()
        self._state: State = "running"

    async def run(self) -> Progress:
        total = sum(1 for _ in read_lines(self._spec.input))
        url = os.environ.get(URL_VARIABLE, DEFAULT_URL)
        with OutputFiles(self._spec) as files:
            resumed = len(files.done)
            async with AsyncClient(url, queue=self._spec.queue, patience_s=PATIENCE_S) as client:
                runner = BulkRunner(client, self._spec, files)

                def progress() -> Progress:
                    return self._progress(files, runner, total, resumed)

                await self._run_ticking(runner, progress)
            await self._save(replace(progress(), in_flight=0))
            if self._state == "interrupted":
                raise Interrupted
            if self._state == "done":
                files.finish()
            return replace(progress(), in_flight=0)

    async def _run_ticking(self, runner: BulkRunner, progress: Callable[[], Progress]) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._interrupt, runner)
        await self._save(progress())  # it has begun: from here on `queue.cancel` leaves its requests to the last run
        await self._heed_cancel(runner)
        ticker = asyncio.create_task(_every(TICK_S, lambda: self._tick(runner, progress)))
        try:
            if await runner.run():
                self._state = "done"
            elif self._state == "cancelled":
                await runner.withdraw()
        finally:
            ticker.cancel()
            await asyncio.gather(ticker, return_exceptions=True)
            loop.remove_signal_handler(signal.SIGTERM)

    async def _tick(self, runner: BulkRunner, progress: Callable[[], Progress]) -> None:
        """What Redis does not take now waits for the next tick. A parent that an outage has ended is missed in spite of it."""
        if os.getppid() != self._parent:
            self._interrupt(runner)
            return
        with suppress(RedisError):
            await self._save(progress())
            await self._heed_cancel(runner)

    async def _heed_cancel(self, runner: BulkRunner) -> None:
        if await asyncio.to_thread(self._job.connection.hexists, self._job.key, CANCEL_FIELD):
            self._state = "cancelled"
            runner.stop()

    def _interrupt(self, runner: BulkRunner) -> None:
        self._state = "interrupted"
        runner.stop()

    async def _save(self, progress: Progress) -> None:
        self._job.meta = asdict(progress)
        await asyncio.to_thread(self._job.save_meta)

    def _progress(self, files: OutputFiles, runner: BulkRunner, total: int, resumed: int) -> Progress:
        return Progress(
            state=self._state,
            total=total,
            succeeded=files.succeeded,
            failed=files.failed,
            resumed=resumed,
            in_flight=runner.in_flight,
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
