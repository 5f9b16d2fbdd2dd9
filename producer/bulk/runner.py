"""Streams a bulk file through the batch tier: a bounded window of requests in flight, each line answered once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from producer.aio import AsyncClient, AsyncHandle
from producer.bulk import lines
from producer.bulk.files import JSON_SUFFIXES, Extent, OutputFiles, read_lines
from producer.bulk.lines import Line
from producer.bulk.spec import BulkSpec
from producer.connection import Backoff
from producer.errors import HeadraceError, InvalidRequest, QueueFull, RedisUnavailable, ReplyExpired, UnknownRequest

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 30.0
WITHDRAWERS = 16  # requests cancelled at once
LOST_ATTEMPTS = 3  # attempts looked for beyond a line's retries: one whose reply was lost costs no retry


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one line, as it is written."""

    number: int
    record: Mapping[str, Any]
    succeeded: bool


class BulkRunner:
    """One run of a job. `run` returns when every line is answered, or soon after `stop`."""

    def __init__(self, client: AsyncClient, spec: BulkSpec, files: OutputFiles) -> None:
        self._client = client
        self._spec = spec
        self._files = files
        self._is_json = spec.input.endswith(JSON_SUFFIXES)
        self._window = asyncio.Semaphore(spec.window)
        self._order: deque[int] = deque()
        self._waiting: dict[int, Outcome] = {}
        self._in_flight: set[int] = set()
        self._attempts: dict[int, int] = {}  # the latest of each line that this run has sent and not written
        self._stopped = asyncio.Event()

    @property
    def in_flight(self) -> int:
        """How many requests are on the queue."""
        return len(self._in_flight)

    async def run(self) -> bool:
        """Answer every line that is not answered yet; returns False if `stop` came first.

        Raises:
            RedisUnavailable: Redis refuses the client.
            OSError: a file cannot be read or written.
        """
        if self._stopped.is_set():
            return False
        feeder = asyncio.create_task(self._feed())
        stopped = asyncio.create_task(self._stopped.wait())
        try:
            await asyncio.wait({feeder, stopped}, return_when=asyncio.FIRST_COMPLETED)
            complete = feeder.done()
            if complete:
                await feeder
            return complete
        finally:
            await _end(feeder, stopped)

    def stop(self) -> None:
        """Stop now. Requests in flight continue, and the next run of the job takes their answers, unless `withdraw` cancels them."""
        self._stopped.set()

    async def withdraw(self, extent: Extent) -> None:
        """Cancel, after `run`, what the job still has on the queue, whichever of its runs put it there. The input may be gone.

        Everything that was sent is among the first ``window`` unwritten lines, as in `_feed`. Which unwritten lines are blank is
        not known.

        Args:
            extent: length of the input.

        Raises:
            RedisUnavailable: some may run on; it may be called again.
        """
        unwritten = (number for number in range(1, extent.last + 1) if number not in self._files.done)
        numbers = islice(unwritten, self._spec.window + extent.num_blank)
        await asyncio.gather(*(self._withdraw(numbers) for _ in range(WITHDRAWERS)))

    async def _withdraw(self, numbers: Iterator[int]) -> None:
        """Cancels each line's attempts that Redis knows, and the one that this run may still be sending: a cancelled id is refused."""
        for number in numbers:
            attempts = [attempt for attempt in self._possible_attempts() if await self._is_known(number, attempt)]
            if number in self._attempts and self._attempts[number] not in attempts:
                attempts.append(self._attempts[number])
            for attempt in attempts:
                await self._client.get(self._spec.request_id(number, attempt)).cancel()

    async def _first_attempt(self, number: int) -> int:
        """The first of a line's attempts that Redis knows, as earlier ones are forgotten a day after they have failed; 0 if none is."""
        for attempt in self._possible_attempts():
            if await self._is_known(number, attempt):
                return attempt
        return 0

    def _possible_attempts(self) -> range:
        return range(self._spec.retries + 1 + LOST_ATTEMPTS)

    async def _is_known(self, number: int, attempt: int) -> bool:
        return await self._client.get(self._spec.request_id(number, attempt)).status() != "unknown"

    async def _feed(self) -> None:
        """Lines enter the window in order: what earlier runs have sent is among the first ``window`` unwritten lines."""
        num_perhaps_sent = self._spec.window if self._files.resumed else 0
        try:
            async with asyncio.TaskGroup() as group:
                for number, text in read_lines(self._spec.input):
                    if number not in self._files.done:
                        await self._window.acquire()
                        self._order.append(number)
                        group.create_task(self._answer(number, text, perhaps_sent=num_perhaps_sent > 0))
                        num_perhaps_sent -= 1
        except BaseExceptionGroup as group_error:
            raise group_error.exceptions[0] from None  # the first; the others are cancelled because of it, or say the same

    async def _answer(self, number: int, text: str | None, *, perhaps_sent: bool) -> None:
        """Answer one line, and free its place in the window when it is written."""
        try:
            if text is None:
                raise InvalidRequest(f"the line is longer than {lines.MAX_LINE_BYTES} bytes or not UTF-8")
            line = lines.parse_line(number, text, is_json=self._is_json)
        except InvalidRequest as error:
            custom_id = lines.custom_id_of(text or "")
            self._write(Outcome(number, lines.failure(number, custom_id, self._spec.request_id(number, 0), error), succeeded=False))
        else:
            self._write(await self._ask(line, await self._first_attempt(number) if perhaps_sent else 0))

    async def _ask(self, line: Line, attempt: int) -> Outcome:
        backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        retries_left = self._spec.retries
        while True:
            self._attempts[line.number] = attempt
            request_id = self._spec.request_id(line.number, attempt)
            try:
                result = await (await self._submit(line, request_id)).result()
            except RedisUnavailable:
                raise  # not the line's fault: the job fails, and continues later
            except (ReplyExpired, UnknownRequest):
                pass  # it was answered while nobody listened: not the line's fault either, so it costs no retry
            except HeadraceError as error:
                if not error.retryable or retries_left == 0:
                    return Outcome(line.number, lines.failure(line.number, line.custom_id, request_id, error), succeeded=False)
                retries_left -= 1
            else:
                return Outcome(line.number, lines.answer(line, request_id, result), succeeded=True)
            finally:
                self._in_flight.discard(line.number)
            attempt += 1
            await asyncio.sleep(backoff.next_s())

    async def _submit(self, line: Line, request_id: str) -> AsyncHandle:
        """Put the request on the queue, waiting as long as it takes for room. If the id is there already, that request is waited for."""
        options: Any = {**line.options, "id": request_id, "tier": "batch", "source": self._spec.source}
        backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        while True:
            try:
                handle = await self._client.submit(**options)
            except QueueFull:
                await asyncio.sleep(backoff.next_s())
            else:
                self._in_flight.add(line.number)
                return handle

    def _write(self, outcome: Outcome) -> None:
        """In input order, hold the answer back until those of all earlier lines are written; the window bounds how many are held."""
        if self._spec.order == "completion":
            self._order.remove(outcome.number)
            self._put(outcome)
            return
        self._waiting[outcome.number] = outcome
        while self._order and self._order[0] in self._waiting:
            self._put(self._waiting.pop(self._order.popleft()))

    def _put(self, outcome: Outcome) -> None:
        write: Callable[[int, Mapping[str, Any]], None]
        write = self._files.write_answer if outcome.succeeded else self._files.write_failure
        write(outcome.number, outcome.record)
        self._attempts.pop(outcome.number, None)
        self._window.release()


async def _end(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
