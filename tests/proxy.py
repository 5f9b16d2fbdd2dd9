"""A TCP proxy whose connections a test can cut, delay or let fall silent, and whose replies it can swallow."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_CHUNK = 65536


class Proxy:
    """Forwards connections on `port` to ``target_port``, each way in a thread of its own.

    Attributes:
        target_port: where connections go from now on; those that are open stay where they are.
        cut_replies: how many more replies are swallowed, each together with its connection.
        num_connections: how many were opened so far.
        delay_s: how late everything arrives, each way.
        bytes_per_s: how fast everything arrives, each way and on each connection.
        silent: nothing arrives any more, and nobody is told; a connection that lost something so stays silent for good.
    """

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.cut_replies = 0
        self.num_connections = 0
        self.delay_s = 0.0
        self.bytes_per_s = math.inf
        self.silent = False
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @contextmanager
    def running(self) -> Iterator[Proxy]:
        thread = threading.Thread(target=self._accept, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            _close(self._listener)
            self.cut_all()
            thread.join(timeout=10)

    def cut_all(self) -> None:
        """Cut every connection there is."""
        with self._lock:
            connections, self._open = self._open, set()
        for connection in connections:
            _close(connection)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self.target_port))
            except OSError:  # refused, as by the server itself
                _close(client)
                continue
            self.num_connections += 1
            with self._lock:
                self._open |= {client, server}
            threading.Thread(target=self._forward, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self._forward, args=(server, client, True), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket, replies: bool) -> None:
        silent = False
        try:
            while data := source.recv(_CHUNK):
                if replies and self._swallow():
                    break
                if pause_s := self.delay_s + len(data) / self.bytes_per_s:
                    time.sleep(pause_s)
                silent = silent or self.silent
                if not silent:
                    target.sendall(data)
        except OSError:
            pass
        finally:
            _close(source)
            _close(target)

    def _swallow(self) -> bool:
        with self._lock:
            if self.cut_replies == 0:
                return False
            self.cut_replies -= 1
            return True


def _close(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
