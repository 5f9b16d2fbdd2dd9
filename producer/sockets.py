"""redis-py's blocking connections, which leave no half-open socket behind when their handshake is interrupted.

redis-py closes it on its own errors only; after a KeyboardInterrupt the pool would lend out a connection that still waits
for a reply, and its next user would take that for its own.
"""

from __future__ import annotations

from redis.connection import AbstractConnection, Connection, SSLConnection, UnixDomainSocketConnection
from redis.sentinel import SentinelManagedConnection, SentinelManagedSSLConnection

Address = tuple[str, int]  # host and port


class _CleanHandshake(AbstractConnection):
    def connect(self) -> None:
        try:
            super().connect()  # type: ignore[no-untyped-call]  # redis-py does not annotate it
        except BaseException:
            self.disconnect()  # type: ignore[no-untyped-call]  # redis-py does not annotate it
            raise


class Tcp(_CleanHandshake, Connection):
    pass


class Tls(_CleanHandshake, SSLConnection):
    pass


class Unix(_CleanHandshake, UnixDomainSocketConnection):
    pass


class SentinelTcp(_CleanHandshake, SentinelManagedConnection):
    pass


class SentinelTls(_CleanHandshake, SentinelManagedSSLConnection):
    pass
