"""The asyncio client: the same calls, and what only tasks can do to them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from functools import partial

import pytest

from producer import AsyncClient, BatchFailed, Cancelled, InvalidRequest, QueueFull, RedisUnavailable, UnknownRequest, WaitTimeout
from tests.proxy import Proxy
from tests.responder import Responder, Taken, echo
from tests.servers import Server, free_port

T_S = 20.0


@pytest.fixture
async def client(any_server: Server, queue: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(any_server.url, queue=queue) as client:
        yield client


@pytest.fixture
def respond(any_server: Server, queue: str) -> Iterator[Callable[..., Responder]]:
    """Starts an answerer that runs a script on each request."""
    with ExitStack() as stack:
        yield lambda script=echo: stack.enter_context(Responder(any_server.url, queue, script).running())


async def test_submit_and_wait_returns_the_result(client: AsyncClient, respond: Callable[..., Responder]) -> None:
    respond()
    result = await client.submit_and_wait("hello", max_tokens=8, timeout=T_S)
    assert (result.text, result.finish_reason) == ("hello", "stop")


async def test_many_tasks_each_get_their_own_answer(client: AsyncClient, respond: Callable[..., Responder]) -> None:
    respond()
    results = await asyncio.gather(*(client.submit_and_wait(f"prompt {i}", timeout=60) for i in range(100)))
    assert [result.text for result in results] == [f"prompt {i}" for i in range(100)]


async def test_stream_yields_chunks_that_join_to_the_text(client: AsyncClient, respond: Callable[..., Responder]) -> None:
    respond()
    handle = await client.submit("hello", stream=True)
    assert [chunk.text async for chunk in handle.stream(timeout=T_S)] == list("hello")
    unasked = await client.submit("hello")
    assert "".join([chunk.text async for chunk in unasked.stream(timeout=T_S)]) == "hello"
    await unasked.result(timeout=T_S)
    assert [chunk.text async for chunk in unasked.stream()] == ["hello"]


async def test_handles_know_status_cancel_and_attach(client: AsyncClient, respond: Callable[..., Responder]) -> None:
    handle = await client.submit("hi", tier="batch")
    assert await handle.status() == "queued"
    assert await client.get(handle.id).cancel() == "cancelled"
    with pytest.raises(Cancelled):
        await handle.result(timeout=T_S)
    with pytest.raises(UnknownRequest):
        await client.get("nobody").result(timeout=T_S)
    respond()
    handles = await client.submit_many(["a", {"prompt": "b"}])
    assert [(await handle.result(timeout=T_S)).text for handle in handles] == ["a", "b"]


async def test_score_and_embed_say_what_they_want(client: AsyncClient, respond: Callable[..., Responder]) -> None:
    responder = respond(lambda taken: taken.final("", []))
    await client.score("a", ["b", "c"], timeout=T_S)
    await client.embed("d", timeout=T_S)
    assert [(request.kind, request.continuations) for request in responder.seen] == [("score", ["b", "c"]), ("embed", None)]


async def test_errors_are_those_of_the_blocking_client(client: AsyncClient, any_server: Server, queue: str) -> None:
    with pytest.raises(InvalidRequest, match="top_p"):
        await client.submit("hi", top_p=0.0)
    async with AsyncClient(any_server.url, queue, max_queue_depth=1) as limited:
        await limited.submit("a")
        with pytest.raises(QueueFull):
            await limited.submit("b")
    async with AsyncClient(f"redis://127.0.0.1:{free_port()}", queue, patience_s=0.2) as nowhere:
        with pytest.raises(RedisUnavailable):
            await nowhere.submit("hi")


async def test_answered_error_is_raised(client: AsyncClient, respond: Callable[..., Responder]) -> None:
    respond(lambda taken: taken.error(BatchFailed("the step failed")))
    with pytest.raises(BatchFailed):
        await client.submit_and_wait("hi", timeout=T_S)


async def test_submit_and_wait_that_times_out_cancels_its_request(client: AsyncClient) -> None:
    with pytest.raises(WaitTimeout) as raised:
        await client.submit_and_wait("hi", timeout=0.2)
    assert raised.value.request_id is not None
    assert await client.get(raised.value.request_id).status() == "cancelled"


async def await_blocked(client: AsyncClient) -> None:
    """Until a caller blocks on its reply."""
    while not any("b" in item["flags"] for item in await client.redis.client_list()):
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("how", ["timeout", "cancelled"])
async def test_caller_of_a_known_id_that_gives_up_leaves_the_request_to_whoever_put_it(client: AsyncClient, how: str) -> None:
    handle = await client.submit("hi", id="order-7")
    call = asyncio.create_task(client.submit_and_wait("hi", id="order-7", timeout=0.2 if how == "timeout" else T_S))
    if how == "cancelled":
        await await_blocked(client)
        call.cancel()
    with pytest.raises(WaitTimeout if how == "timeout" else asyncio.CancelledError):
        await call
    assert (handle.is_new, await handle.status()) == (True, "queued")


async def test_caller_of_a_known_id_that_gives_up_before_it_hears_that_it_is_known_leaves_the_request_to_whoever_put_it(
    server: Server, queue: str
) -> None:
    async with AsyncClient(server.url, queue) as client:
        handle = await client.submit("hi", id="order-7")
        with Proxy(server.port).running() as proxy:
            async with AsyncClient(proxy.url, queue) as another:
                proxy.delay_s = 0.5
                call = asyncio.create_task(another.submit_and_wait("hi", id="order-7", timeout=T_S))
                while not any(item["cmd"] == "evalsha" for item in await client.redis.client_list()):  # its reply is on the way
                    await asyncio.sleep(0.01)
                call.cancel()
                proxy.delay_s = 0.0
                with pytest.raises(asyncio.CancelledError):
                    await call
        assert await handle.status() == "queued"


async def test_cancelled_task_cancels_its_request(client: AsyncClient) -> None:
    waiting = asyncio.create_task(client.submit_and_wait("hi", id="x1"))
    await await_blocked(client)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await client.get("x1").status() == "cancelled"


async def test_cancel_is_heard_whatever_the_task_is_about_to_do(client: AsyncClient) -> None:
    """Python 3.11's `asyncio.wait_for`, which redis-py sends by, swallows a cancel that comes as it is done."""
    for num_turns in range(60):
        waiting = asyncio.create_task(client.submit_and_wait("hi"))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        waiting.cancel()
        _, unheard = await asyncio.wait({waiting}, timeout=T_S)
        assert not unheard
        assert waiting.cancelled()
    put = [fields[b"id"].decode() for _, fields in await client.redis.xrange(client.keys.stream("realtime"))]
    assert {await client.get(request_id).status() for request_id in put} == {"cancelled"}


async def test_task_cancelled_in_result_leaves_the_request_running(client: AsyncClient) -> None:
    handle = await client.submit("hi")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await handle.result()
    assert await handle.status() == "queued"


async def test_cancelled_task_never_leaves_its_reply_to_another(client: AsyncClient, respond: Callable[..., Responder]) -> None:
    async def ask(i: int) -> bool:
        """Whether the answer came; a wrong one fails the test."""
        try:
            async with asyncio.timeout(random.Random(i).uniform(0.0, 0.02)):
                result = await client.submit_and_wait(f"prompt {i}", timeout=T_S)
        except TimeoutError:
            return False
        assert result.text == f"prompt {i}"
        return True

    respond()
    answered = [await asyncio.gather(*(ask(10 * round_ + i) for i in range(10))) for round_ in range(20)]
    assert not all(map(all, answered))
    for i in range(10):
        assert (await client.submit_and_wait(f"after {i}", timeout=T_S)).text == f"after {i}"


async def test_stream_goes_on_after_its_connection_was_cut(server: Server, queue: str) -> None:
    held: list[Taken] = []
    with Proxy(server.port).running() as proxy, Responder(server.url, queue, held.append).running():
        async with AsyncClient(proxy.url, queue) as client:
            handle = await client.submit("hi", stream=True)
            texts = []
            while not held:
                await asyncio.sleep(0.01)
            held[0].tokens("a")
            async for chunk in handle.stream(timeout=T_S):
                texts.append(chunk.text)
                proxy.cut_all()
                held[0].tokens("b") if len(texts) < 4 else held[0].final("abbb")
                if len(texts) == 4:
                    break
    assert texts == ["a", "b", "b", "b"]


async def test_stalled_server_is_an_error_soon_after_the_timeout(queue: str) -> None:
    with Server() as server:
        async with AsyncClient(server.url, queue) as client:
            handle = await client.submit("hi")
            server.pause()
            with pytest.raises(RedisUnavailable):
                async with asyncio.timeout(5):
                    await handle.result(timeout=0.5)
            server.resume()
            assert await handle.status() == "queued"


@pytest.mark.parametrize("connection", ["fresh", "idle"])
async def test_timeout_bounds_a_call_to_a_server_that_answers_nothing(queue: str, connection: str) -> None:
    with Server() as server:
        async with AsyncClient(server.url, queue, patience_s=0.5) as client:
            if connection == "idle":
                await client.submit("hi")
                for idle in client.redis.connection_pool._available_connections:
                    idle.next_health_check = 0.0  # as after a minute
            server.pause()
            for call in (client.submit, partial(client.submit_and_wait, timeout=0.5)):
                with pytest.raises(RedisUnavailable):
                    async with asyncio.timeout(4):
                        await call("hi")


async def test_wait_longer_than_the_socket_timeout_returns(server: Server, queue: str) -> None:
    async with AsyncClient(f"{server.url}?socket_timeout=0.5", queue) as client:
        answer = asyncio.create_task(client.submit_and_wait("hi", timeout=T_S))
        done, _ = await asyncio.wait([answer], timeout=1.5)
        assert not done
        with Responder(server.url, queue).running():
            assert (await answer).text == "hi"


async def test_client_connects_anew_after_it_was_closed(client: AsyncClient) -> None:
    await client.submit("hi")
    await client.close()
    assert await client.get("x").status() == "unknown"
