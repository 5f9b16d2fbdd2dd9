"""Streaming callers on one queue, in one event loop, that record what they get and when."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from secrets import token_hex

from producer.aio import AsyncClient, AsyncHandle
from producer.errors import HeadraceError
from producer.keys import Tier
from producer.load.stats import RequestRecord, latency_figures

SOURCE = "headrace-load"
_WORDS = ("the", "mill", "stream", "turns", "a", "wheel", "and", "water", "runs", "over", "stone", "by", "night", "in", "old", "towns")


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of a request: about ``prompt_tokens`` in (a common word is a token with most tokenisers), ``output_tokens`` out."""

    prompt_tokens: int
    output_tokens: int
    tier: Tier = "realtime"


@dataclass(slots=True)
class LoadCall:
    """One request as its caller saw it.

    Attributes:
        code: of the error that ended it; '' if it was answered in full.
        attempt: which attempt answered it.
    """

    request_id: str
    record: RequestRecord
    code: str = ""
    worker: str = ""
    model: str = ""
    attempt: int = 0


class Callers:
    """Makes calls; all times are in seconds since this was made.

    Args:
        timeout_s: how long a call may take before it is given up and cancelled.
        seed: of the prompts.

    Attributes:
        calls: all that were begun, in order.
    """

    def __init__(self, client: AsyncClient, *, timeout_s: float, seed: int = 0) -> None:
        self.calls: list[LoadCall] = []
        self._client = client
        self._timeout_s = timeout_s
        self._random = random.Random(seed)
        self._run = token_hex(4)
        self._start_s = time.monotonic()

    def now_s(self) -> float:
        return time.monotonic() - self._start_s

    async def call(self, shape: Shape) -> LoadCall:
        """One request from its submission to its last token; errors are recorded, not raised."""
        number = len(self.calls)
        call = LoadCall(f"load-{self._run}-{number}", RequestRecord(number, shape.prompt_tokens, self.now_s()))
        self.calls.append(call)
        try:
            await self._make(call, shape)
        except HeadraceError as error:
            call.code, call.record.finished_s = error.code, self.now_s()
            await self._give_up(call)
        return call

    async def _make(self, call: LoadCall, shape: Shape) -> None:
        handle = await self._client.submit(
            prompt(self._random, shape.prompt_tokens),
            id=call.request_id,
            tier=shape.tier,
            stream=True,
            source=SOURCE,
            temperature=0.0,
            max_tokens=shape.output_tokens,
            ignore_eos=True,
        )
        async for chunk in handle.stream(self._timeout_s):
            call.record.add_tokens(len(chunk.token_ids), self.now_s())
        await self._note_result(call, handle)

    async def _note_result(self, call: LoadCall, handle: AsyncHandle) -> None:
        result = await handle.result(0.0)  # it has been read already
        call.worker, call.model, call.attempt = result.worker, result.model, result.attempt
        call.record.num_prompt_tokens = result.usage.prompt_tokens

    async def _give_up(self, call: LoadCall) -> None:
        try:
            await self._client.get(call.request_id).cancel()
        except HeadraceError:
            return  # what made the call fail

    def for_s(self, seconds: float) -> Callable[[], bool]:
        """A function that says whether fewer than ``seconds`` have passed since now."""
        end_s = self.now_s() + seconds
        return lambda: self.now_s() < end_s

    async def closed_loop(self, shape: Shape, count: int, go_on: Callable[[], bool]) -> list[LoadCall]:
        """``count`` callers, each with one request after the other for as long as ``go_on`` returns True."""

        async def caller() -> list[LoadCall]:
            made = [await self.call(shape)]
            while go_on():
                made.append(await self.call(shape))
            return made

        return [call for made in await asyncio.gather(*(caller() for _ in range(count))) for call in made]

    async def open_loop(self, arrivals: Iterable[tuple[float, Shape]]) -> list[LoadCall]:
        """A request at each arrival (seconds from now), however many are still in flight."""
        base_s = self.now_s()

        async def arrive(at_s: float, shape: Shape) -> LoadCall:
            await asyncio.sleep(max(0.0, base_s + at_s - self.now_s()))
            return await self.call(shape)

        return list(await asyncio.gather(*(arrive(at_s, shape) for at_s, shape in arrivals)))


def prompt(rng: random.Random, num_words: int) -> str:
    """About ``num_words`` tokens; the first ones differ from call to call, so that no prefix is shared."""
    head = [str(rng.randrange(10**6)), rng.choice(_WORDS)]
    return " ".join([*head, *(rng.choice(_WORDS) for _ in range(num_words - 2))][: max(1, num_words)])


def answered(calls: Sequence[LoadCall]) -> list[RequestRecord]:
    """The records of the calls that were answered in full."""
    return [call.record for call in calls if not call.code]


def phase_figures(calls: Sequence[LoadCall], start_s: float, seconds: float) -> dict[str, float]:
    """Latencies of ``calls``, answers per second until the last one, and tokens per second within the ``seconds`` from ``start_s``.

    Only tokens that came while new calls were made are counted: afterwards the last calls run at less than the load.
    """
    records, end_s = answered(calls), start_s + seconds
    tokens = sum(start_s <= at_s < end_s for call in calls for at_s in call.record.token_times_s)
    return {
        "requests": len(calls),
        "failed": sum(bool(call.code) for call in calls),
        "requests_per_s": len(records) / (max(record.finished_s for record in records) - start_s) if records else 0.0,
        "output_tokens_per_s": tokens / seconds,
        **latency_figures(records),
    }
