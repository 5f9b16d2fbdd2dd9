"""Bulk jobs as rq jobs: submitting, viewing, cancelling, running. Everything is JSON on the wire, no pickle."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from types import FrameType
from typing import Any

import redis
from redis.backoff import ExponentialWithJitterBackoff
from redis.retry import Retry as RedisRetry
from rq import Queue, Retry, Worker
from rq.exceptions import DeserializationError, NoSuchJobError
from rq.job import Job, JobStatus
from rq.scheduler import RQScheduler
from rq.serializers import JSONSerializer

from producer.bulk.job import CANCEL_FIELD, Interrupted
from producer.bulk.spec import BulkSpec
from producer.connection import CLUSTER_SCHEMES, connect
from producer.errors import InvalidRequest, UnknownRequest

QUEUE_NAME = "headrace-bulk"
FUNCTION = "producer.bulk.job.run"
MAX_CRASHES = 10  # runs that may die or raise before the job is failed for good
RESULT_TTL_S = 7 * 86400
FAILURE_TTL_S = 30 * 86400
FOREIGN = "not a Headrace job"
_OUTAGE_TRIES = 60  # of at most two seconds each: how long rq's own commands wait for Redis


@dataclass(frozen=True, slots=True)
class JobView:
    """A bulk job as an operator sees it.

    Attributes:
        status: rq's: ``scheduled``, ``queued``, ``started``, ``finished``, ``failed``, ``canceled``, ….
        input, output: empty if the job is not Headrace's, but another application's on the same rq queue.
        progress: the fields of `producer.bulk.job.Progress`; empty before the first run.
        error: the last line of what the last run raised, if it did; `FOREIGN` if the job is not Headrace's.
    """

    id: str
    status: str
    input: str
    output: str
    progress: dict[str, Any]
    error: str | None


def rq_connection(url: str) -> redis.Redis:
    """A connection for rq, whose commands may be sent twice: it waits for Redis within each command.

    Raises:
        ValueError: the URL is malformed, or a cluster's.
    """
    if url.partition("://")[0] in CLUSTER_SCHEMES:
        raise ValueError("rq does not work on a Redis Cluster: bulk jobs need a single server, or one behind sentinels")
    client = connect(url)
    client.set_retry(RedisRetry(ExponentialWithJitterBackoff(base=0.1, cap=2.0), _OUTAGE_TRIES))
    return client


def bulk_queue(connection: redis.Redis) -> Queue:
    return Queue(QUEUE_NAME, connection=connection, serializer=JSONSerializer, default_timeout=-1)


def submit(connection: redis.Redis, spec: BulkSpec, at: datetime | None = None) -> Job:
    """Enqueue a job, now or at a time (local if it names no zone); a known job, in whatever state, is returned as it is.

    Raises:
        InvalidRequest: the id is that of another job.
    """
    known = find(connection, spec)
    if known is not None:
        return known
    queue = bulk_queue(connection)
    options: dict[str, Any] = {
        "args": (spec.to_json(),),
        "job_id": spec.job_id,
        "description": f"bulk {spec.input} -> {spec.output}",
        "job_timeout": -1,
        "result_ttl": RESULT_TTL_S,
        "failure_ttl": FAILURE_TTL_S,
        "retry": Retry(max=MAX_CRASHES),
    }
    return queue.enqueue(FUNCTION, **options) if at is None else queue.enqueue_at(at.astimezone(), FUNCTION, **options)


def find(connection: redis.Redis, spec: BulkSpec) -> Job | None:
    """The known job of this id and specification; None if the id is new.

    Raises:
        InvalidRequest: the id is that of another job.
    """
    try:
        job = fetch(connection, spec.job_id)
    except UnknownRequest:
        return None
    known = _spec(job)
    if known is None:
        raise InvalidRequest(f"{spec.job_id} is {FOREIGN}", field="id")
    if known != spec:
        differing = [name for name, value in spec.to_json().items() if value != known.to_json()[name]]
        raise InvalidRequest(f"id {spec.job_id} is known as a job with another {', '.join(differing)}", field="id")
    return job


def fetch(connection: redis.Redis, job_id: str) -> Job:
    """Raises `UnknownRequest` if there is no such job."""
    try:
        return Job.fetch(job_id, connection=connection, serializer=JSONSerializer)
    except NoSuchJobError:
        raise UnknownRequest(f"no bulk job {job_id}") from None


def cancel(connection: redis.Redis, job_id: str) -> str:
    """Cancel a job and its requests on the queue; what is written stays.

    Returns:
        ``cancelled`` if it had not begun; ``cancelling`` if it runs (its worker notices within a second or two), or was interrupted
        or has failed (the next worker withdraws what it left on the queue); ``finished`` if there was nothing left to cancel.
    """
    job = fetch(connection, job_id)
    if _spec(job) is None:
        raise InvalidRequest(f"{job_id} is {FOREIGN}", field="id")
    status = job.get_status()
    failed = status in (JobStatus.FAILED, JobStatus.STOPPED)
    if status in (JobStatus.FINISHED, JobStatus.CANCELED) or (failed and not job.meta):
        return "finished"
    connection.hset(job.key, CANCEL_FIELD, "1")
    if failed:
        job.retries_left = MAX_CRASHES
        job.requeue()
    if status == JobStatus.STARTED or job.meta:
        return "cancelling"
    job.cancel()
    return "cancelled"


def jobs(connection: redis.Redis) -> Iterator[JobView]:
    """All jobs that rq still knows: running ones first, then queued, then ended ones."""
    queue = bulk_queue(connection)
    registries = (queue.started_job_registry, queue.scheduled_job_registry, queue.failed_job_registry)
    ended = (queue.finished_job_registry, queue.canceled_job_registry)
    ids = [*registries[0].get_job_ids(cleanup=False), *queue.job_ids]
    ids += [job_id for registry in (*registries[1:], *ended) for job_id in registry.get_job_ids(cleanup=False)]
    for job_id in dict.fromkeys(ids):
        with suppress(UnknownRequest):  # it has expired meanwhile
            yield view(fetch(connection, job_id))


def view(job: Job) -> JobView:
    """One job; one that cannot be read as ours is shown too."""
    spec = _spec(job)
    status = str(job.get_status(refresh=False).value)
    if spec is None:
        return JobView(id=job.id, status=status, input="", output="", progress={}, error=FOREIGN)
    result = job.latest_result()
    raised = (result.exc_string or "").strip().splitlines() if result is not None else []
    error = raised[-1] if raised else None
    return JobView(id=job.id, status=status, input=spec.input, output=spec.output, progress=dict(job.meta), error=error)


def _spec(job: Job) -> BulkSpec | None:
    """A job's spec; None if the job is pickled, of another function, or has no valid spec."""
    try:
        return BulkSpec.from_json(job.args[0]) if job.func_name == FUNCTION else None
    except (DeserializationError, InvalidRequest, LookupError, TypeError):
        return None


def renew_tries(connection: redis.Redis) -> None:
    """Give jobs that have failed for good the tries of fresh ones, in case they are requeued: rq's tools leave them at 0."""
    ids = bulk_queue(connection).failed_job_registry.get_job_ids(cleanup=False)
    for job in Job.fetch_many(ids, connection=connection, serializer=JSONSerializer):
        if job is not None and not job.should_retry and _spec(job) is not None:
            connection.hset(job.key, "retries_left", MAX_CRASHES)  # only this field: the job may be on its way back to the queue by now


class BulkWorker(Worker):
    """An rq worker that notices within ``lease_s`` that another one died, and that puts its job back on SIGTERM.

    A worker's death loses nothing of a job: its files are the record. Jobs whose time has come are put on the queue here,
    between jobs, and not by a process of rq's scheduler, which would outlive a killed worker.
    """

    def __init__(self, connection: redis.Redis, *, name: str | None = None, lease_s: int = 30) -> None:
        if lease_s < 2:
            raise InvalidRequest("lease must be at least 2 seconds", field="lease")
        self._lease_s = lease_s
        super().__init__(
            [bulk_queue(connection)],
            connection=connection,
            name=name,
            serializer=JSONSerializer,
            job_monitoring_interval=max(1, lease_s // 3),
            maintenance_interval=lease_s,
            worker_ttl=lease_s + 15,  # rq looks for work, and for the jobs of dead workers, every ``worker_ttl - 15`` seconds
        )
        self._clock = RQScheduler(self.queues, connection, serializer=JSONSerializer, logging_level=logging.WARNING)

    def run_maintenance_tasks(self) -> None:
        """Every ``lease_s``, besides rq's own tasks: one worker at a time enqueues what is due, and failed jobs become requeueable."""
        self._clock.acquire_locks()
        try:
            self._clock.enqueue_scheduled_jobs()
        finally:
            self._clock.release_locks()
        super().run_maintenance_tasks()  # type: ignore[no-untyped-call]  # untyped in rq
        renew_tries(self.connection)

    def get_heartbeat_ttl(self, job: Job, working_time: float = 0.0) -> int:  # noqa: ARG002 - rq's signature
        """Seconds after which a job whose worker is silent is given to another."""
        return self._lease_s

    def handle_exception(self, job: Job, *exc_info: Any) -> None:
        """An interrupted run is not a fault, and gets no traceback."""
        if exc_info[0] is Interrupted:
            self.log.info("Worker %s: job %s interrupted, it continues with the next worker", self.name, job.id)
        else:
            super().handle_exception(job, *exc_info)

    def request_stop(self, signum: int, frame: FrameType | None) -> None:
        """First signal: have the job save where it is and end; then this worker ends too."""
        if self.horse_pid:
            os.kill(self.horse_pid, signal.SIGTERM)
        super().request_stop(signum, frame)  # type: ignore[no-untyped-call]  # untyped in rq
