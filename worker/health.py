"""``/metrics``, ``/startupz``, ``/healthz`` and ``/readyz`` on a port of the worker's own.

*Started* means that the model is loaded. *Healthy* means that restarting the worker would not help: the engine makes progress while
it has work. *Ready* means that it takes requests. All answer 200 or 503 with JSON that names every check and says why it failed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any, ClassVar

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

JSON = "application/json; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found; ``detail`` is for people."""

    ok: bool
    detail: str = ""


Check = Callable[[], Finding]


class Progress:
    """Tells a busy engine from a wedged one.

    The clock runs while there is work: handing work over starts it, every turn of the engine's loop restarts it, and a
    turn that leaves no work stops it. An engine that is out of memory or has lost its device calls `fail`, and stays failed.

    Args:
        limit_s: how long one turn may take, in seconds.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit_s = limit_s
        self._clock = clock
        self._lock = Lock()
        self._since: float | None = None
        self._num_requests = 0
        self._failure: str | None = None

    def work_arrived(self) -> None:
        """Work was handed to the engine, which must take it within the limit."""
        with self._lock:
            if self._since is None:
                self._since = self._clock()

    def turn(self, num_requests: int) -> None:
        """The engine finished a turn of its loop, and holds ``num_requests`` unfinished requests."""
        with self._lock:
            self._num_requests = num_requests
            self._since = self._clock() if num_requests else None

    def fail(self, reason: str) -> None:
        """The engine cannot continue; the first reason is kept."""
        with self._lock:
            self._failure = self._failure or reason

    @property
    def stalled_s(self) -> float:
        """Seconds since the last sign of progress; 0 while there is no work."""
        with self._lock:
            return 0.0 if self._since is None else self._clock() - self._since

    def check(self) -> Finding:
        """Whether the engine makes progress."""
        stalled_s, held = self.stalled_s, self._num_requests
        if self._failure is not None:
            return Finding(False, self._failure)
        if stalled_s > self.limit_s:
            return Finding(False, f"no step for {stalled_s:.1f} s (limit {self.limit_s:g} s), {held} requests held")
        return Finding(True, f"{held} requests held, last step {stalled_s:.1f} s ago" if held else "idle")


class Wedge:
    """How long the engine has been seen wedged, since the first observation. The time between two observations counts for at most
    ``longest_gap_s``: a process that was stopped for an hour has not been wedged for an hour.
    """

    def __init__(self, longest_gap_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._longest_gap_s = longest_gap_s
        self._clock = clock
        self._observed_s = clock()
        self._seconds = 0.0
        self._was_wedged = False

    def observe(self, wedged: bool) -> float:
        """Record the present state; returns the seconds."""
        now_s = self._clock()
        gap_s = min(now_s - self._observed_s, self._longest_gap_s) if self._was_wedged else 0.0
        self._seconds = self._seconds + gap_s if wedged else 0.0
        self._observed_s, self._was_wedged = now_s, wedged
        return self._seconds


class HealthServer:
    """Serves the pages from threads of its own, until `close`.

    Args:
        port: 0 takes a free one; see `port`.
        started, alive, ready: checks by name, each quick (a probe waits for it) and callable from any thread. One that raises has failed.

    Raises:
        OSError: the port is taken, or not permitted.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        started: Mapping[str, Check],
        alive: Mapping[str, Check],
        ready: Mapping[str, Check],
        host: str = "0.0.0.0",  # noqa: S104  # scrapers and probes come from other hosts; nothing here is secret or writable
        port: int = 0,
    ) -> None:
        checks = {"/startupz": started, "/healthz": alive, "/readyz": ready}
        pages = {"/metrics": _metrics_page(registry), **{path: _checks_page(found) for path, found in checks.items()}}
        handler = type("Handler", (_Handler,), {"pages": pages})
        self._server = _Server((host, port), handler)
        self._thread = Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="health", daemon=True)

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop serving and free the port."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


@dataclass(frozen=True, slots=True)
class _Page:
    status: int
    content_type: str
    body: bytes


_Render = Callable[[str], _Page]  # takes the request's Accept header


def _metrics_page(registry: CollectorRegistry) -> _Render:
    def render(accept: str) -> _Page:
        encode, content_type = choose_encoder(accept)
        return _Page(200, content_type, encode(registry))

    return render


def _checks_page(checks: Mapping[str, Check]) -> _Render:
    def render(_accept: str) -> _Page:
        findings = {name: _run(check) for name, check in checks.items()}
        ok = all(finding.ok for finding in findings.values())
        body = {"status": "ok" if ok else "failing", "checks": {name: asdict(finding) for name, finding in findings.items()}}
        return _Page(200 if ok else 503, JSON, json.dumps(body, indent=2).encode() + b"\n")

    return render


def _run(check: Check) -> Finding:
    try:
        return check()
    except Exception as error:  # any exception of a check is its finding
        return Finding(False, f"{type(error).__name__}: {error}")


class _Server(ThreadingHTTPServer):
    daemon_threads = True  # a stuck check must not delay the worker's end
    block_on_close = False


class _Handler(BaseHTTPRequestHandler):
    pages: ClassVar[Mapping[str, _Render]]
    server_version = "headrace"
    sys_version = ""
    protocol_version = "HTTP/1.1"
    timeout = 10.0  # an idle or half-sent connection frees its thread

    def do_GET(self) -> None:
        """Answer with the page of this path."""
        render = self.pages.get(self.path.partition("?")[0])
        self._send(render(self.headers.get("Accept", "")) if render else self._unknown())

    do_HEAD = do_GET  # noqa: N815  # the base class finds methods by these names

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the name is the base class's
        """Keep scrapes and probes out of the worker's log."""

    def _unknown(self) -> _Page:
        body = {"status": "not found", "paths": sorted(self.pages)}
        return _Page(404, JSON, json.dumps(body).encode() + b"\n")

    def _send(self, page: _Page) -> None:
        self.send_response(page.status)
        self.send_header("Content-Type", page.content_type)
        self.send_header("Content-Length", str(len(page.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(page.body)
