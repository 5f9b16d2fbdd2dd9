"""Workers for the tests: in this process on a thread, or as a process of their own that real signals reach."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import redis

from producer.keys import GROUP, TIERS, Keys
from tests.fakes import FakeEngine
from worker.config import WorkerConfig
from worker.metrics import WorkerMetrics
from worker.publisher import OnEnd
from worker.reload import CheckModel, LoadModel
from worker.worker import Worker

ROOT = Path(__file__).parent.parent
PATIENCE_S = 30.0


def eventually(condition: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S) -> Any:
    """Poll ``condition`` until it gives something true, and return that."""
    deadline_s = time.monotonic() + timeout_s
    while not (result := condition()):
        assert time.monotonic() < deadline_s, f"never: {what}"
        time.sleep(0.01)
    return result


@contextmanager
def worker_thread(
    url: str,
    queue: str,
    engine: FakeEngine | None = None,
    load: LoadModel | None = None,
    on_end: OnEnd | None = None,
    check_model: CheckModel = lambda _: None,
    metrics: WorkerMetrics | None = None,
    **config: Any,
) -> Iterator[Worker]:
    """A worker in this process, with ``engine`` or what ``load`` makes; drained at the end."""
    settings = WorkerConfig(redis_url=url, queue=queue, **{"lease_s": 2.0, "drain_s": 5.0} | config)
    make = load or (lambda model: engine if engine is not None else FakeEngine(model))
    worker = Worker(settings, make, metrics, on_end=on_end, check_model=check_model)
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(worker.run()), daemon=True)
    thread.start()
    try:
        yield worker
    finally:
        worker.request_stop()
        thread.join(PATIENCE_S)
    assert codes == [0], "the worker ends in order"


def idle(worker: Worker) -> bool:
    """It holds no request, and nothing is left in its engine."""
    stats = worker.loop.stats
    return len(worker.registry) == 0 and stats.used_blocks == stats.waiting_realtime == stats.waiting_batch == 0


class WorkerProcess:
    """A worker process with the fake engine (see `tests.fakes` for ``options``), or with ``module`` another."""

    def __init__(self, url: str, queue: str, *options: object, module: tuple[str, ...] = ("tests.fakes",), log: Path | None = None) -> None:
        command = [sys.executable, "-m", *module, "--redis", url, "--queue", queue, *map(str, options)]
        with (log or Path(os.devnull)).open("ab") as out:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out)

    @property
    def pid(self) -> int:
        return self.process.pid

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def drain(self, timeout_s: float = PATIENCE_S) -> int:
        """SIGTERM; the exit code."""
        self.process.terminate()
        return self.process.wait(timeout_s)

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        return self.process.wait(timeout_s)

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()


class QueueView:
    """What an operator sees of one queue."""

    def __init__(self, client: redis.Redis, queue: str) -> None:
        self.client = client
        self.keys = Keys(queue)

    def length(self) -> int:
        """Entries on the streams: queued and running."""
        return sum(int(self.client.xlen(self.keys.stream(tier))) for tier in TIERS)

    def pending(self, tier: str = "realtime") -> list[dict[str, Any]]:
        try:
            return list(self.client.xpending_range(self.keys.prefix + tier, GROUP, "-", "+", 1000))
        except redis.exceptions.ResponseError:  # no worker has made the group yet
            return []

    def frames(self, request_id: str) -> list[dict[bytes, bytes]]:
        return [fields for _, fields in self.client.xrange(self.keys.reply(request_id))]

    def finals(self, request_id: str) -> int:
        return sum(frame[b"type"] in (b"final", b"error") for frame in self.frames(request_id))

    def state(self, request_id: str) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.client.hgetall(self.keys.state(request_id)).items()}

    def consumers(self) -> set[str]:
        try:
            return {c["name"].decode() for tier in TIERS for c in self.client.xinfo_consumers(self.keys.stream(tier), GROUP)}
        except redis.exceptions.ResponseError:  # no worker has made the group yet
            return set()

    def workers(self) -> dict[str, dict[str, str]]:
        """Heartbeats by worker name."""
        prefix = self.keys.worker("")
        found = {}
        for key in self.client.scan_iter(match=f"{prefix}*"):
            fields = self.client.hgetall(key)
            found[key.decode().removeprefix(prefix)] = {name.decode(): value.decode() for name, value in fields.items()}
        return found

    def await_running(self, count: int = 1) -> None:
        eventually(lambda: sum(w.get("state") == "running" for w in self.workers().values()) >= count, f"{count} workers running")

    def assert_clean(self) -> None:
        """Nothing is queued, running or kept for ever."""
        assert self.length() == 0
        assert not [entry for tier in TIERS for entry in self.pending(tier)]
        for pattern in ("reply:*", "state:*"):
            for key in self.client.scan_iter(match=self.keys.prefix + pattern):
                assert self.client.pttl(key) > 0, key
