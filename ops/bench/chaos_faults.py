"""The faults of `ops.bench.chaos`: workers that die, stop or are drained, a server that crashes, connections that fail."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from tests.proxy import Proxy
from tests.servers import Server
from tests.workers import WorkerProcess

FAULTS = ("sigkill", "sigterm", "sigstop", "kill_server", "cut", "lose_replies", "delay", "silence")
Launch = Callable[[Path], WorkerProcess]


class Supervisor:
    """Keeps ``count`` workers running: one that ends is started again."""

    def __init__(self, launch: Launch, count: int, folder: Path) -> None:
        self.num_started = 0
        self._launch = launch
        self._folder = folder
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._workers = [self._start() for _ in range(count)]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def signal(self, index: int, number: signal.Signals) -> WorkerProcess:
        """Send a signal to a worker; returns the worker, because it may be replaced at any time."""
        with self._lock:
            worker = self._workers[index]
            if worker.process.poll() is None:
                worker.signal(number)
            return worker

    def stop(self) -> list[int]:
        """Drain all workers; returns their exit codes."""
        self._stopping.set()
        self._thread.join()
        for worker in self._workers:
            worker.signal(signal.SIGCONT)
            worker.signal(signal.SIGTERM)
        return [worker.wait(60) for worker in self._workers]

    def kill(self) -> None:
        """End everything at once, after a failure."""
        self._stopping.set()
        for worker in self._workers:
            worker.__exit__(None, None, None)

    def _run(self) -> None:
        while not self._stopping.wait(0.05):
            with self._lock:
                self._workers = [worker if worker.process.poll() is None else self._start() for worker in self._workers]

    def _start(self) -> WorkerProcess:
        self.num_started += 1
        return self._launch(self._folder / f"worker-{self.num_started}.log")


class Faults:
    """Injects faults at random times drawn from ``chance``.

    Args:
        workers_side, callers_side: the proxies through which their connections go.
        lease_s: of the workers, which are stopped for longer than that.
        pause_s: the longest pause between two faults.
        names: of the faults, as in `FAULTS`.
    """

    def __init__(
        self,
        server: Server,
        supervisor: Supervisor,
        workers_side: Proxy,
        callers_side: Proxy,
        *,
        num_workers: int,
        lease_s: float,
        pause_s: float,
        names: Sequence[str],
        chance: random.Random,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._server = server
        self._supervisor = supervisor
        self._proxies = (workers_side, callers_side)
        self._num_workers = num_workers
        self._lease_s = lease_s
        self._pause_s = pause_s
        self._chance = chance
        self._faults = [getattr(self, name) for name in names]

    def run(self, seconds: float) -> None:
        """One fault after the other, sometimes two at a time."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            time.sleep(self._chance.uniform(0.05, 1.0) * self._pause_s)
            fault = self._chance.choice(self._faults)
            self.counts[fault.__name__] += 1
            fault()
        self.heal()

    def heal(self) -> None:
        """End all trouble."""
        for proxy in self._proxies:
            proxy.silent, proxy.delay_s, proxy.cut_replies = False, 0.0, 0
        for index in range(self._num_workers):
            self._supervisor.signal(index, signal.SIGCONT)

    def sigkill(self) -> None:
        self._supervisor.signal(self._any_worker(), signal.SIGKILL)

    def sigterm(self) -> None:
        worker = self._supervisor.signal(self._any_worker(), signal.SIGTERM)
        if self._chance.random() < 0.5 and worker.process.poll() is None:
            time.sleep(self._chance.uniform(0.0, 0.2))
            worker.signal(signal.SIGTERM)

    def sigstop(self) -> None:
        """For longer than the lease, while other faults continue."""
        worker = self._supervisor.signal(self._any_worker(), signal.SIGSTOP)
        threading.Timer(self._lease_s * self._chance.uniform(1.2, 3.0), worker.signal, [signal.SIGCONT]).start()

    def kill_server(self) -> None:
        self._server.kill()
        time.sleep(self._chance.uniform(0.0, 1.0))
        self._server.start()

    def cut(self) -> None:
        self._chance.choice(self._proxies).cut_all()

    def lose_replies(self) -> None:
        self._chance.choice(self._proxies).cut_replies = self._chance.randint(1, 5)

    def delay(self) -> None:
        proxy = self._chance.choice(self._proxies)
        proxy.delay_s = self._chance.uniform(0.005, 0.1)
        threading.Timer(self._chance.uniform(0.5, 2.0), setattr, [proxy, "delay_s", 0.0]).start()

    def silence(self) -> None:
        proxy = self._chance.choice(self._proxies)
        proxy.silent = True
        threading.Timer(self._chance.uniform(0.2, 1.5), setattr, [proxy, "silent", False]).start()

    def _any_worker(self) -> int:
        return self._chance.randrange(self._num_workers)


def proxied(stack: ExitStack, server: Server) -> Proxy:
    """A proxy in front of ``server``, until the end of ``stack``."""
    return stack.enter_context(Proxy(server.port).running())
