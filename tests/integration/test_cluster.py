"""A real cluster of three primaries: all that a queue does on one server, wherever its slot is, and while it moves."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from producer import AsyncClient, Client
from producer.cli.group import main
from producer.errors import Cancelled, Poisoned, RedisUnavailable
from producer.keys import Keys
from producer.status import read_status
from tests.certificates import TLS_KIND, make_certificates, needs_tls
from tests.cluster import PRIMARIES, Cluster
from tests.fakes import CRASH, FakeEngine, expected_text, expected_tokens
from tests.servers import Server, free_port
from tests.tiny_engine import byte_tokenizer
from tests.tiny_models import tiny_model
from tests.workers import QueueView, WorkerProcess, eventually, worker_thread


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Shared by the tests that do not move its slots."""
    with Cluster() as running:
        yield running


@pytest.fixture(params=range(PRIMARIES))
def node(request: pytest.FixtureRequest) -> int:
    """Each primary in turn; clients know only the first."""
    return int(request.param)


@pytest.fixture
def queue(cluster: Cluster, node: int) -> str:
    return cluster.queue_on(node)


@pytest.fixture
def view(cluster: Cluster, node: int, queue: str) -> QueueView:
    return QueueView(cluster.client(node), queue)


def headrace(cluster: Cluster, queue: str, *args: str) -> Result:
    return CliRunner().invoke(main, [*args, "--redis", cluster.url, "--queue", queue], prog_name="headrace")


def test_requests_are_answered_streamed_and_cancelled(cluster: Cluster, queue: str, view: QueueView) -> None:
    with worker_thread(cluster.url, queue, FakeEngine(step_s=0.002)) as worker, Client(cluster.url, queue) as client:
        assert client.submit_and_wait("hello", max_tokens=5, timeout=30).token_ids == expected_tokens("hello", 5)
        assert "".join(chunk.text for chunk in client.submit("hi", max_tokens=20).stream(timeout=30)) == expected_text("hi", 20)
        handles = client.submit_many([{"prompt": f"p{i}", "max_tokens": 9, "tier": ("realtime", "batch")[i % 2]} for i in range(40)])
        assert [handle.result(timeout=30).token_ids for handle in handles] == [expected_tokens(f"p{i}", 9) for i in range(40)]
        assert client.submit("durable", max_tokens=2, durable=True).result(timeout=30).text == expected_text("durable", 2)
        endless = client.submit("endless", max_tokens=50_000)
        eventually(lambda: endless.status() == "running", "it runs")
        assert endless.cancel() == "cancelling"
        with pytest.raises(Cancelled):
            endless.result(timeout=30)
        eventually(lambda: len(worker.registry) == 0, "nothing is left")
    view.assert_clean()


def test_worker_process_with_a_real_model(cluster: Cluster, tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    queue, port = cluster.queue_on(2), free_port()
    options = ("--model", tmp_path, "--kv-memory", "8MiB", "--metrics-port", port)
    with (
        WorkerProcess(cluster.url_of_all, queue, *options, module=("worker.cli", "worker")) as worker,
        Client(cluster.url, queue) as client,
    ):
        eventually(lambda: [said for said in read_status(client.redis, queue).workers if said.state == "running"], "it serves", 120)
        assert client.submit_and_wait("a mill", max_tokens=8, ignore_eos=True, timeout=60).usage.completion_tokens == 8
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=10) as page:
            assert page.status == 200
        assert worker.drain() == 0


async def test_asyncio_client(cluster: Cluster, queue: str) -> None:
    with worker_thread(cluster.url, queue):
        async with AsyncClient(cluster.url, queue) as client:
            assert (await client.submit_and_wait("hello", max_tokens=5, timeout=30)).text == expected_text("hello", 5)
            handle = await client.submit("hi", max_tokens=20)
            assert "".join([chunk.text async for chunk in handle.stream(timeout=30)]) == expected_text("hi", 20)
            endless = await client.submit("endless", max_tokens=50_000)
            assert await endless.cancel() in ("cancelled", "cancelling")
            with pytest.raises(Cancelled):
                await endless.result(timeout=30)


def test_operator_sees_reloads_and_replays(cluster: Cluster, queue: str, view: QueueView) -> None:
    with Client(cluster.url, queue) as client:
        with WorkerProcess(cluster.url, queue, "--lease", 1, "--name", "w1") as worker:
            view.await_running()
            assert headrace(cluster, queue, "reload", "--model", "second").output == "w1: serves second\n"
            poison = client.submit(CRASH, max_tokens=2)
            assert worker.wait() == 1
        with WorkerProcess(cluster.url, queue, "--lease", 1, "--max-attempts", 1), pytest.raises(Poisoned):
            poison.result(timeout=30)
        status = json.loads(headrace(cluster, queue, "status", "--json").output)
        assert (status["queue"], status["dead"]) == (queue, 1)
        assert "1 dead letter" in headrace(cluster, queue, "status").output
        screen = headrace(cluster, queue, "top", "--count", "1").output
        assert "1 dead letter" in screen
        assert poison.id in screen
        assert f"\t{poison.id}\trealtime\tPOISONED\t" in headrace(cluster, queue, "dead", "list").output
        assert json.loads(headrace(cluster, queue, "dead", "show", poison.id, "--json").output)["request"]["id"] == poison.id
        assert headrace(cluster, queue, "dead", "replay", poison.id).output == f"{poison.id}\n"
        assert poison.status() == "queued"
        assert headrace(cluster, queue, "dead", "list").output == ""
        with WorkerProcess(cluster.url, queue, "--lease", 1, "--max-attempts", 1) as dying:
            assert dying.wait() == 1
        with WorkerProcess(cluster.url, queue, "--lease", 1, "--max-attempts", 1):
            eventually(lambda: poison.status() == "failed", "it is given up again")
        assert headrace(cluster, queue, "dead", "purge", "--all").output == f"{poison.id}\n"


@pytest.mark.slow
@pytest.mark.parametrize("migrate", [Cluster.migrate, Cluster.migrate_at_once])
def test_slot_that_migrates_while_callers_wait(migrate: Callable[[Cluster, str, int, int], None]) -> None:
    with Cluster() as cluster, ThreadPoolExecutor(8) as pool:
        queue = cluster.queue_on(1)
        with worker_thread(cluster.url, queue, FakeEngine(step_s=0.01), checkpoint_s=0.05) as worker, Client(cluster.url, queue) as client:
            calls = [pool.submit(client.submit_and_wait, f"p{i}", max_tokens=200, timeout=60) for i in range(8)]
            eventually(lambda: worker.loop.num_tokens > 100, "all under way")
            for source, target in ((1, 2), (2, 0)):
                migrate(cluster, queue, source, target)
            results = [call.result(60) for call in calls]
            assert [result.token_ids for result in results] == [expected_tokens(f"p{i}", 200) for i in range(8)]
            assert {result.attempt for result in results} == {1}
            assert client.submit_and_wait("after", max_tokens=3, timeout=30).token_ids == expected_tokens("after", 3)
        QueueView(cluster.client(0), queue).assert_clean()


@pytest.mark.slow
@pytest.mark.parametrize("end", [Server.kill, Server.pause])
def test_replica_that_takes_over_while_callers_wait(end: Callable[[Server], None]) -> None:
    with Cluster(replicas=1) as cluster, ThreadPoolExecutor(8) as pool:
        queue = cluster.queue_on(0)  # on the node that the URL names first
        url = cluster.url_of_all
        with worker_thread(url, queue, FakeEngine(step_s=0.01), checkpoint_s=0.05) as worker, Client(url, queue) as client:
            calls = [pool.submit(client.submit_and_wait, f"p{i}", max_tokens=200, timeout=60) for i in range(8)]
            eventually(lambda: worker.loop.num_tokens > 100, "all under way")
            end(cluster.servers[0])
            assert [call.result(60).token_ids for call in calls] == [expected_tokens(f"p{i}", 200) for i in range(8)]


async def test_asyncio_client_follows_a_slot_that_moves() -> None:
    with Cluster() as cluster:
        queue = cluster.queue_on(1)
        async with AsyncClient(cluster.url, queue) as client:
            handle = await client.submit("hello", max_tokens=5)
            moving = threading.Thread(target=cluster.migrate, args=(queue, 1, 0))
            moving.start()
            assert await handle.status() == "queued"
            moving.join()
            with worker_thread(cluster.url, queue):
                assert (await handle.result(timeout=30)).text == expected_text("hello", 5)


def test_url_of_several_nodes_needs_one_that_lives(cluster: Cluster) -> None:
    with Client(f"redis+cluster://127.0.0.1:{free_port()},127.0.0.1:{cluster.servers[2].port}", "default") as client:
        assert client.redis.ping()


def test_server_that_is_no_cluster_says_so(server: Server) -> None:
    with Client(f"redis+cluster://127.0.0.1:{server.port}", "default") as client, pytest.raises(RedisUnavailable, match="cluster support"):
        client.submit("hello")


def test_no_node_that_answers_is_waited_for_and_told() -> None:
    with (
        Client(f"redis+cluster://127.0.0.1:{free_port()}", "default", patience_s=0.2) as client,
        pytest.raises(RedisUnavailable, match="no node of the cluster knows"),
    ):
        client.submit("hello")


async def test_timeout_bounds_asking_nodes_that_answer_nothing() -> None:
    with Cluster() as cluster:
        for server in cluster.servers:
            server.pause()
        with Client(cluster.url_of_all, "default", patience_s=0.5) as client:
            started = time.monotonic()
            with pytest.raises(RedisUnavailable):
                client.submit("hello")
            assert time.monotonic() - started < 4  # far less than any socket timeout
        async with AsyncClient(cluster.url_of_all, "default", patience_s=0.5) as coroutine:
            with pytest.raises(RedisUnavailable):
                async with asyncio.timeout(4):
                    await coroutine.submit("hello")


def test_wrong_password_is_an_error_at_once() -> None:
    with Cluster(requirepass="secret", masterauth="secret") as cluster:
        url = cluster.url.replace("://", "://:wrong@")
        with Client(url, "default", patience_s=3600) as client, pytest.raises(RedisUnavailable, match=r"(?i)password"):
            client.submit("hello")
        with Client(cluster.url.replace("://", "://:secret@"), "default") as client:
            assert client.submit("hello").status() == "queued"


@needs_tls
async def test_tls_and_a_certificate_of_the_client_on_every_node(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    with Cluster(TLS_KIND, certificates=tmp_path) as cluster:
        url = cluster.tls_url
        with Client(url, cluster.queue_on(0)) as client:
            assert client.redis.ping()
            cluster.migrate(client.queue, 0, 1)
            assert client.submit("hello").status() == "queued"
        for queue in map(cluster.queue_on, range(PRIMARIES)):
            with worker_thread(url, queue), Client(url, queue) as client:
                assert client.submit_and_wait("hello", max_tokens=5, timeout=30).token_ids == expected_tokens("hello", 5)
                async with AsyncClient(url, queue) as coroutine:
                    assert (await coroutine.submit_and_wait("hi", max_tokens=5, timeout=30)).token_ids == expected_tokens("hi", 5)
        trusting = url.partition("&")[0]
        for bare in (trusting, trusting.partition("?")[0]):
            with Client(bare, queue, patience_s=0.2) as client, pytest.raises(RedisUnavailable, match="no node of the cluster knows"):
                client.submit("hello")


def test_bulk_jobs_say_that_rq_needs_a_single_server(cluster: Cluster) -> None:
    said = CliRunner().invoke(main, ["bulk", "status", "--redis", cluster.url])
    assert said.exit_code == 2
    assert "rq does not work on a Redis Cluster" in said.output


def test_every_key_of_a_queue_is_on_one_node(cluster: Cluster, queue: str, node: int) -> None:
    with worker_thread(cluster.url, queue), Client(cluster.url, queue) as client:
        client.submit_and_wait("hello", max_tokens=3, timeout=30)
        prefix = Keys(queue).prefix.encode()
        owners = [any(key.startswith(prefix) for key in cluster.client(i).scan_iter()) for i in range(PRIMARIES)]
    assert owners == [i == node for i in range(PRIMARIES)]
