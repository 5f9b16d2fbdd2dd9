"""`ops/redis-start.sh`, `redis.conf` and `users.acl` on a real server, with both sides of the queue working under their rights."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
from click.testing import CliRunner

from producer import Client
from producer.cli.group import main
from producer.connection import connect
from producer.errors import Poisoned
from producer.keys import Keys
from producer.status import read_status
from tests.certificates import TLS_KIND, make_certificates, needs_tls
from tests.fakes import CRASH
from tests.responder import Responder, Taken
from tests.servers import binary, free_port
from tests.workers import QueueView, WorkerProcess, eventually

OPS = Path(__file__).parents[2] / "ops"
USERS = ("admin", "operator", "producer", "bulk", "worker", "monitor")


class Guarded:
    """A server started as compose does it."""

    def __init__(self, port: int) -> None:
        self.port = port

    def url(self, user: str) -> str:
        return f"redis://{user}:{user}-secret@127.0.0.1:{self.port}/0"

    def client(self, user: str) -> redis.Redis:
        return connect(self.url(user))

    def refusals(self) -> list[tuple[str, str, str]]:
        """Who was refused what, and why."""
        with self.client("admin") as admin:
            return [(entry["username"], entry["object"], entry["reason"]) for entry in admin.acl_log()]


@contextmanager
def started(kind: str, folder: Path, **passwords: str) -> Iterator[Guarded]:
    path = binary(kind)
    assert path is not None
    (folder / "bin").mkdir()
    (folder / "bin" / "redis-server").symlink_to(path)
    port = free_port()
    environment = {
        **{f"{user.upper()}_PASSWORD": passwords.get(user, f"{user}-secret") for user in USERS},
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "REDIS_ETC": str(OPS),
        "REDIS_RUN": str(folder),
    }
    command = ["sh", OPS / "redis-start.sh", "--port", str(port), "--dir", str(folder)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        await_serving(port, process, folder / "log")
        yield Guarded(port)
    finally:
        process.kill()
        process.wait()


def await_serving(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + 20
    while time.monotonic() < deadline_s and process.poll() is None:
        try:
            connect(f"redis://127.0.0.1:{port}").ping()
        except redis.AuthenticationError:
            return
        except redis.ConnectionError:
            time.sleep(0.02)
    raise AssertionError(log.read_text())


@pytest.fixture(scope="module")
def guarded(server_kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with started(server_kind, tmp_path_factory.mktemp("guarded")) as running:
        yield running


@pytest.fixture
def untouched(guarded: Guarded) -> Guarded:
    """The server, with an empty log of refusals."""
    with guarded.client("admin") as admin:
        admin.acl_log_reset()
    return guarded


def test_server_has_the_settings_of_redis_conf(guarded: Guarded) -> None:
    with guarded.client("admin") as admin:
        settings = admin.config_get("maxmemory-policy", "appendonly", "appendfsync", "save", "lazyfree-lazy-user-del")
    assert settings == {
        "maxmemory-policy": "noeviction",
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "lazyfree-lazy-user-del": "yes",
    }


def test_nobody_works_without_a_name_and_no_placeholder_is_left(guarded: Guarded) -> None:
    with connect(f"redis://127.0.0.1:{guarded.port}") as nobody, pytest.raises(redis.AuthenticationError):
        nobody.ping()
    with guarded.client("admin") as admin:
        assert sorted(admin.acl_users()) == sorted(["default", *USERS])


def test_client_does_all_it_can_with_exactly_the_producers_rights(untouched: Guarded, queue: str) -> None:
    def answer(taken: Taken) -> None:
        if taken.request.prompt != "never":
            taken.tokens(*"ok")
            taken.final("ok")

    worker = Responder(untouched.url("admin"), queue, answer)
    with worker.running(), Client(untouched.url("producer"), queue=queue) as client:
        assert client.submit_and_wait("hello", timeout=20).text == "ok"
        handle = client.submit("hello", stream=True)
        assert "".join(chunk.text for chunk in handle.stream(timeout=20)) == "ok"
        assert client.get(handle.id).status() == "done"
        assert [each.result(timeout=20).text for each in client.submit_many(["a", "b"])] == ["ok", "ok"]
        endless = client.submit("never")
        assert endless.cancel() in ("cancelled", "cancelling")
    assert untouched.refusals() == []


def test_worker_does_all_it_must_with_exactly_its_rights(untouched: Guarded, queue: str) -> None:
    admin = untouched.client("admin")
    view = QueueView(admin, queue)
    with Client(untouched.url("producer"), queue=queue) as client:
        with WorkerProcess(untouched.url("worker"), queue, "--lease", 1, "--step-ms", 20) as worker:
            view.await_running()
            assert client.submit_and_wait("hello", max_tokens=3, timeout=20).text
            handles = client.submit_many(
                [{"prompt": f"p{i}", "max_tokens": 100, "tier": tier} for i, tier in enumerate(("realtime", "batch"))]
            )
            eventually(lambda: len(view.pending()) + len(view.pending("batch")) == 2, "both run")
            worker.kill()
        with WorkerProcess(untouched.url("worker"), queue, "--lease", 1) as worker:
            assert [handle.result(timeout=20).attempt for handle in handles] == [2, 2]
            assert client.submit("never", max_tokens=3000).cancel() in ("cancelled", "cancelling")
            poisoned = client.submit(CRASH + "now", max_tokens=3)
            assert worker.wait() == 1
        with WorkerProcess(untouched.url("worker"), queue, "--lease", 1, "--max-attempts", 1) as worker, pytest.raises(Poisoned):
            poisoned.result(timeout=20)
        with WorkerProcess(untouched.url("worker"), queue, "--lease", 1) as worker:
            eventually(lambda: {"pid": str(worker.pid), "state": "running"}.items() <= newest(view).items(), "it runs")
            assert worker.drain() == 0
    assert admin.xlen(Keys(queue).dead) == 1
    assert untouched.refusals() == []
    admin.close()


def newest(view: QueueView) -> dict[str, str]:
    """The heartbeat of the worker that was started last."""
    return max(view.workers().values(), key=lambda said: int(said.get("started_ms", 0)), default={})


def test_durable_submission_works_with_the_producers_rights(untouched: Guarded, server_kind: str, queue: str) -> None:
    if server_kind == "redis7":
        pytest.skip("WAITAOF came with Redis 7.2")
    with Client(untouched.url("producer"), queue=queue) as client:
        assert client.submit("hello", durable=True).status() == "queued"
    assert untouched.refusals() == []


def test_bulk_jobs_run_with_exactly_their_rights(untouched: Guarded, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("a\nb\n")
    headrace = [sys.executable, "-c", "from producer.cli import main; main()", "bulk"]
    environment = os.environ | {"HEADRACE_REDIS": untouched.url("bulk")}

    def run(*arguments: str) -> str:
        return subprocess.run([*headrace, *arguments], env=environment, check=True, capture_output=True, text=True, timeout=60).stdout

    with Responder(untouched.url("admin"), "default").running():
        job_id = run("submit", f"{tmp_path}/in.txt", "--output", f"{tmp_path}/out.jsonl").strip()
        run("worker", "--burst")
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 2
    info = [sys.executable, "-m", "rq.cli", "info", "-u", untouched.url("bulk"), "headrace-bulk"]
    assert "headrace-bulk" in subprocess.run(info, check=True, capture_output=True, text=True, timeout=60).stdout
    assert '"succeeded": 2' in run("status", job_id, "--json")
    assert run("cancel", run("submit", f"{tmp_path}/in.txt", "--output", f"{tmp_path}/two.jsonl").strip()) == "cancelled\n"
    assert untouched.refusals() == []


def test_operator_reads_the_queue_and_cancels(untouched: Guarded, queue: str) -> None:
    with Client(untouched.url("producer"), queue=queue) as client:
        request_id = client.submit("hello", tier="batch").id
    with Client(untouched.url("operator"), queue=queue) as operator:
        status = read_status(operator.redis, queue)
        assert {tier.tier: tier.queued for tier in status.tiers} == {"realtime": 0, "batch": 1}
        assert operator.get(request_id).cancel() == "cancelled"
    assert untouched.refusals() == []


def test_operator_has_a_worker_reload(untouched: Guarded, queue: str) -> None:
    with untouched.client("admin") as admin, WorkerProcess(untouched.url("worker"), queue, "--name", "w1"):
        QueueView(admin, queue).await_running()
        arguments = ["reload", "--model", "second", "--redis", untouched.url("operator"), "--queue", queue]
        assert CliRunner().invoke(main, arguments).output == "w1: serves second\n"
    assert untouched.refusals() == []


@pytest.mark.parametrize("user", ["producer", "worker", "operator"])
def test_who_follows_a_queue_on_a_cluster_may_ask_where_it_is(guarded: Guarded, user: str) -> None:
    with guarded.client("admin") as admin:
        assert admin.execute_command("ACL", "DRYRUN", user, "CLUSTER", "SLOTS") == b"OK"


def test_monitor_counts_and_reads_no_text(untouched: Guarded, queue: str) -> None:
    keys = Keys(queue)
    with Client(untouched.url("producer"), queue=queue) as client:
        request_id = client.submit("secret").id
    with untouched.client("worker") as worker:
        worker.xgroup_create(keys.stream("realtime"), "workers", id="0")
    with untouched.client("monitor") as monitor:
        assert monitor.xlen(keys.stream("realtime")) == 1
        assert monitor.xinfo_groups(keys.stream("realtime"))[0]["lag"] == 1
        assert monitor.xpending(keys.stream("realtime"), "workers")["pending"] == 0
        for command in (
            ("XRANGE", keys.stream("realtime"), "-", "+"),
            ("XINFO", "STREAM", keys.stream("realtime")),
            ("HGETALL", keys.state(request_id)),
            ("XADD", keys.stream("realtime"), "*", "a", "b"),
        ):
            with pytest.raises(redis.exceptions.NoPermissionError):
                monitor.execute_command(*command)


@pytest.mark.parametrize(
    "command",
    [
        ("FLUSHALL",),
        ("KEYS", "*"),
        ("CONFIG", "GET", "*"),
        ("ACL", "LIST"),
        ("SET", "headrace:{q}:state:x", "1"),
        ("SCAN", "0"),
        ("XREADGROUP", "GROUP", "workers", "me", "STREAMS", "headrace:{q}:realtime", ">"),
        ("XACK", "headrace:{q}:realtime", "workers", "0-1"),
        ("XDEL", "headrace:{q}:realtime", "0-1"),
        ("XRANGE", "headrace:{q}:realtime", "-", "+"),
        ("XREAD", "STREAMS", "headrace:{q}:dead", "0"),
        ("XADD", "elsewhere", "*", "a", "b"),
        ("XADD", "headrace:{q}:admin", "*", "op", "reload"),
        ("EVAL", "return redis.call('XADD', 'headrace:{q}:admin', '*', 'op', 'reload')", "0"),
        ("HSET", "headrace:{q}:limits", "max_depth:realtime", "1000000"),
        ("EVAL", "return redis.call('FLUSHALL')", "0"),
        ("EVAL", "return redis.call('HGETALL', 'headrace:{q}:worker:w')", "0"),
    ],
    ids=" ".join,
)
def test_producer_may_not(guarded: Guarded, command: tuple[str, ...]) -> None:
    with (
        guarded.client("producer") as producer,
        pytest.raises(redis.ResponseError, match=r"(?i)permission|NOPERM|can't run|can't access"),
    ):
        producer.execute_command(*command)


@pytest.mark.parametrize(
    "command", [("FLUSHALL",), ("CONFIG", "SET", "save", ""), ("KEYS", "*"), ("GET", "elsewhere"), ("SHUTDOWN",)], ids=" ".join
)
def test_worker_may_not(guarded: Guarded, command: tuple[str, ...]) -> None:
    with guarded.client("worker") as worker, pytest.raises(redis.exceptions.NoPermissionError):
        worker.execute_command(*command)


@pytest.mark.parametrize(
    "command",
    [
        ("FLUSHALL",),
        ("KEYS", "rq:*"),
        ("XREADGROUP", "GROUP", "workers", "me", "STREAMS", "headrace:{q}:batch", ">"),
        ("DEL", "headrace:{q}:batch"),
        ("XADD", "headrace:{q}:admin", "*", "op", "reload"),
        ("SET", "elsewhere", "1"),
        ("PUBLISH", "elsewhere", "x"),
    ],
    ids=" ".join,
)
def test_bulk_may_not(guarded: Guarded, command: tuple[str, ...]) -> None:
    with guarded.client("bulk") as bulk, pytest.raises(redis.exceptions.NoPermissionError):
        bulk.execute_command(*command)


def test_user_without_a_password_stays_locked(tmp_path: Path) -> None:
    with started("valkey", tmp_path, operator="") as server:
        with connect(f"redis://operator:@127.0.0.1:{server.port}") as client, pytest.raises(redis.AuthenticationError):
            client.ping()
        with server.client("producer") as client:
            assert client.ping()


@needs_tls
def test_tls_serves_encrypted_connections_alone(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    config = (OPS / "redis-tls.conf").read_text().replace("/etc/redis/tls", str(tmp_path))
    port = free_port()
    (tmp_path / "redis-tls.conf").write_text(config.replace("6379", str(port)))
    command = [str(binary(TLS_KIND)), OPS / "redis.conf", "--dir", tmp_path, "--include", tmp_path / "redis-tls.conf"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        await_tls(port, tmp_path)
        with connect(f"redis://127.0.0.1:{port}") as plain, pytest.raises(redis.ConnectionError):
            plain.ping()
        queue, responder_url = "q", f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={tmp_path}/ca.crt"
        with Responder(responder_url, queue).running(), Client(responder_url, queue=queue) as client:
            assert client.submit_and_wait("hello", timeout=20).text == "hello"
    finally:
        process.kill()
        process.wait()


def await_tls(port: int, folder: Path) -> None:
    deadline_s = time.monotonic() + 20
    while time.monotonic() < deadline_s:
        try:
            connect(f"rediss://127.0.0.1:{port}?ssl_ca_certs={folder}/ca.crt").ping()
        except redis.ConnectionError:
            time.sleep(0.02)
        else:
            return
    raise AssertionError((folder / "log").read_text())
