"""Clients made from URLs, and which errors pass by waiting."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from redis import exceptions as redis_errors
from redis.crc import key_slot

from producer.cluster import Slot
from producer.connection import BLOCK_S, SOCKET_TIMEOUT_S, Backoff, connect, connect_async, is_transient, redact


def settings(url: str, **options: Any) -> dict[str, Any]:
    sync, coroutine = (
        connect(url, **options).connection_pool.connection_kwargs,
        connect_async(url, **options).connection_pool.connection_kwargs,
    )
    names = ("host", "port", "db", "username", "password", "socket_timeout", "path", "protocol", "decode_responses")
    assert [sync.get(name) for name in names] == [coroutine.get(name) for name in names]
    return dict(sync)


def test_time_limits_and_retries_are_explicit() -> None:
    kwargs = settings("redis://example:6380/3")
    assert (kwargs["host"], kwargs["port"], kwargs["db"]) == ("example", 6380, 3)
    assert kwargs["socket_timeout"] == SOCKET_TIMEOUT_S > BLOCK_S
    assert kwargs["socket_connect_timeout"] > 0
    assert kwargs["socket_keepalive"]
    assert kwargs["retry"].get_retries() == 0


def test_pool_does_not_limit_the_callers() -> None:
    assert connect("redis://example").connection_pool.max_connections > 100_000
    assert connect_async("redis://example").connection_pool.max_connections > 100_000


def test_url_options_win_but_cannot_change_the_shape_of_replies() -> None:
    kwargs = settings("redis://example?socket_timeout=33&decode_responses=True&protocol=3", socket_timeout=1.0)
    assert (kwargs["socket_timeout"], kwargs["decode_responses"], kwargs["protocol"]) == (33.0, False, 2)


def test_unix_and_tls_urls_are_understood() -> None:
    assert settings("unix:///run/redis.sock?db=2")["path"] == "/run/redis.sock"
    assert "Tls" in connect("rediss://example").connection_pool.connection_class.__name__


@pytest.mark.parametrize(
    "url",
    [
        "",
        "http://example",
        "redis://example?colour=red",
        "redis://example?socket_timeout=soon",
        "redis+sentinel://a:1",
        "redis+sentinel:///service",
        "redis+sentinel://a:one/service",
        "redis+cluster://",
        "redis+cluster://a:one",
        "redis+cluster://a:1/3",
        "redis+cluster://a:1?colour=red",
        "rediss://a:1?ssl_ca_certs=/none/ca.crt",
        "rediss+sentinel://a:1/service?ssl_certfile=/none/redis.crt",
        "rediss+cluster://a:1?ssl_keyfile=/none/redis.key",
    ],
)
def test_malformed_url_is_a_value_error(url: str) -> None:
    for make in (connect, connect_async):
        with pytest.raises(ValueError, match=r"."):
            make(url, queue="q")


def test_sentinel_url_carries_service_database_and_password() -> None:
    pool: Any = connect("redis+sentinel://user:pa%20ss@a:1,b,[::1]:3/my%2Dservice/4").connection_pool
    assert pool.service_name == "my-service"
    assert (pool.connection_kwargs["db"], pool.connection_kwargs["username"], pool.connection_kwargs["password"]) == (4, "user", "pa ss")
    sentinels = [client.connection_pool.connection_kwargs for client in pool.sentinel_manager.sentinels]
    assert [(kwargs["host"], kwargs["port"]) for kwargs in sentinels] == [("a", 1), ("b", 26379), ("::1", 3)]
    assert all("password" not in kwargs or kwargs["password"] is None for kwargs in sentinels)


def test_cluster_url_carries_nodes_and_password() -> None:
    for make in (connect, connect_async):
        pool: Any = make("rediss+cluster://user:pa%20ss@a:1,b,[::1]:3?socket_timeout=7", queue="q").connection_pool
        kwargs = pool.connection_kwargs
        assert kwargs["slot"].nodes == [("a", 1), ("b", 6379), ("::1", 3)]
        assert (kwargs["username"], kwargs["password"], kwargs["socket_timeout"], kwargs["protocol"]) == ("user", "pa ss", 7.0, 2)
        assert "Tls" in pool.connection_class.__name__


def test_urls_of_several_hosts_may_begin_with_an_ipv6_address_and_need_no_port() -> None:
    for make in (connect, connect_async):
        pool: Any = make("redis+cluster://[fe80::a],[::1]:3", queue="q").connection_pool
        assert pool.connection_kwargs["slot"].nodes == [("fe80::a", 6379), ("::1", 3)]
    pool = connect("redis+sentinel://[fe80::a],[::1]:3/main").connection_pool
    sentinels = [client.connection_pool.connection_kwargs for client in pool.sentinel_manager.sentinels]
    assert [(kwargs["host"], kwargs["port"]) for kwargs in sentinels] == [("fe80::a", 26379), ("::1", 3)]
    assert (pool.service_name, pool.connection_kwargs["db"]) == ("main", 0)


def test_cluster_url_without_a_queue_is_refused() -> None:
    for make in (connect, connect_async):
        with pytest.raises(ValueError, match="needs a queue"):
            make("redis+cluster://a:1")


def test_slot_is_where_the_last_answer_says() -> None:
    slot = Slot("headrace:{q}:", [("seed", 1)])
    number = key_slot(b"q")
    assert slot.learn(("seed", 1), [[0, number - 1, [b"x", 2]], [number, 16383, [b"", 3, b"id"], [None, 4, b"id"]]]) == ("seed", 3)
    assert slot.nodes == [("seed", 1), ("x", 2), ("seed", 3), ("seed", 4)]
    slot.lose(("x", 2))
    assert slot.primary == ("seed", 3)
    slot.move(("seed", 3), redis_errors.MovedError(f"{number} y:5"))
    assert slot.primary == ("y", 5)
    slot.move(("y", 5), redis_errors.MovedError(f"{number} :6"))
    assert slot.primary == ("y", 6)
    slot.lose(("y", 6))
    assert slot.primary is None
    assert slot.nodes == [("x", 2), ("seed", 3), ("seed", 4), ("seed", 1)]  # who named it is asked last
    with pytest.raises(redis_errors.ClusterDownError):
        slot.learn(("x", 2), [[number + 1, 16383, [b"x", 2]]])
    assert slot.nodes == [("x", 2), ("seed", 1)]


def test_redacted_url_holds_no_secret() -> None:
    assert redact("redis://user:secret@host:1/0?password=secret") == "redis://host:1/0"
    assert redact("unix:///run/redis.sock?password=secret") == "unix:///run/redis.sock"
    assert redact("redis://host/0") == "redis://host/0"


@pytest.mark.parametrize(
    "error",
    [
        redis_errors.ConnectionError(),
        redis_errors.TimeoutError(),
        redis_errors.ReadOnlyError("x"),
        redis_errors.AskError("1 a:1"),
        redis_errors.TryAgainError("x"),
        redis_errors.ClusterDownError("x"),
    ],
)
def test_what_passes_is_waited_for(error: Exception) -> None:
    assert is_transient(error)


@pytest.mark.parametrize("error", [redis_errors.AuthenticationError(), redis_errors.NoPermissionError("x"), ValueError(), OSError()])
def test_what_does_not_pass_is_not_waited_for(error: Exception) -> None:
    assert not is_transient(error)


def test_backoff_starts_small_again_after_the_trouble() -> None:
    backoff = Backoff(first_s=1.0, cap_s=8.0)
    assert [0.5 * 2**n <= backoff.next_s() <= 1.0 * 2**n for n in range(4)] == [True] * 4
    assert all(backoff.next_s() <= 8.0 for _ in range(2000))
    backoff.reset()
    assert backoff.next_s() <= 1.0


def test_unreachable_server_is_a_redis_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with connect(f"redis://127.0.0.1:{taken.getsockname()[1]}") as client, pytest.raises(redis_errors.ConnectionError):
            client.ping()
