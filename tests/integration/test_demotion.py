"""A master that becomes a replica behind one address: its connections stay open, and no client may stay on them."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from producer import AsyncClient, Client, Result
from tests.fakes import expected_tokens
from tests.integration.test_worker_pages import scene
from tests.proxy import Proxy
from tests.servers import Server
from tests.workers import eventually


async def ask(url: str, queue: str) -> Result:
    async with AsyncClient(url, queue) as client:
        return await client.submit_and_wait("asyncio", max_tokens=5, timeout=30)


def test_worker_and_callers_leave_a_demoted_master(server_kind: str, queue: str) -> None:
    with (
        Server(server_kind) as first,
        Server(server_kind, replicaof=f"127.0.0.1 {first.port}") as second,
        first.client() as old,
        second.client() as new,
        Proxy(first.port).running() as proxy,
        ThreadPoolExecutor(2) as pool,
    ):
        eventually(lambda: new.info("replication")["master_link_status"] == "up", "the replica follows")
        with scene(proxy.url, queue) as worker, Client(proxy.url, queue) as client:
            assert client.submit_and_wait("before", max_tokens=5, timeout=30).token_ids == expected_tokens("before", 5)
            new.replicaof("NO", "ONE")
            old.replicaof("127.0.0.1", str(second.port))
            calls = [
                pool.submit(client.submit_and_wait, "blocking", max_tokens=5, timeout=30),
                pool.submit(asyncio.run, ask(proxy.url, queue)),
            ]
            eventually(lambda: first.num_refusals("READONLY") > 10, "all of them are refused")
            status, page = worker.page("/readyz")
            assert (status, page["checks"]["redis"]["detail"]) == (503, "ConnectionError: the server is a replica now and takes no writes")
            assert worker.page("/healthz")[0] == 200
            proxy.target_port = second.port
            assert [call.result(60).token_ids for call in calls] == [expected_tokens(prompt, 5) for prompt in ("blocking", "asyncio")]
            eventually(lambda: worker.statuses() == (200, 200), "it is ready again")
