"""The servers that other tests stand on."""

from __future__ import annotations

import pytest

from producer.connection import connect
from tests.servers import KINDS, Server, binary


@pytest.mark.parametrize("kind", KINDS)
def test_server_is_on_this_machine(kind: str) -> None:
    """A skip here says which servers the other tests do without."""
    if kind != "valkey" and binary(kind) is None:
        pytest.skip(f"no {kind} on this machine")
    assert binary(kind) is not None


def test_server_serves_over_tcp_and_unix_socket(any_server: Server) -> None:
    for url in (any_server.url, any_server.unix_url):
        with connect(url) as client:
            assert client.ping()


def test_append_only_data_survives_a_kill(server_kind: str) -> None:
    with Server(server_kind, appendonly="yes", appendfsync="always") as server, server.client() as client:
        client.set("k", "v")
        server.restart()
        assert client.get("k") == b"v"
