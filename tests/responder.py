"""A stand-in for the worker, for tests of the client: raw Redis, the codec, and a script of what to answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import redis

from producer import codec
from producer.connection import connect
from producer.errors import HeadraceError
from producer.keys import GROUP, TIERS, Keys, Tier
from producer.wire import Chunk, Frame, GenerateRequest, Result, Usage

REPLY_TTL_MS = 60_000


@dataclass
class Taken:
    """One request taken off its stream, to be answered at the test's own pace."""

    client: redis.Redis
    keys: Keys
    tier: Tier
    entry_id: bytes
    fields: Mapping[bytes, bytes]
    request: GenerateRequest
    attempt: int = 1
    sent: int = 0

    def tokens(self, *texts: str) -> None:
        """Publish one frame per text; each text is one token, whose id is its position."""
        for text in texts:
            chunk = Chunk(text=text, token_ids=[self.sent], index=self.sent)
            self.sent += 1
            self._add(Frame("tokens", codec.encode_chunk(chunk), self.attempt))

    def final(self, text: str, token_ids: list[int] | None = None) -> None:
        ids = list(range(self.sent)) if token_ids is None else token_ids
        result = Result(id=self.request.id, text=text, token_ids=ids, usage=Usage(1, len(ids)), worker="responder", model="none")
        self._end(Frame("final", codec.encode_result(result), self.attempt), "done")

    def error(self, error: HeadraceError) -> None:
        self._end(Frame("error", codec.encode_error(error), self.attempt), "failed")

    def _add(self, frame: Frame) -> None:
        entry = codec.encode_frame(frame, codec.encoding_of(self.fields))
        self.client.xadd(self.keys.reply(self.request.id), entry)  # type: ignore[arg-type]  # dict is invariant

    def _end(self, frame: Frame, status: str) -> None:
        with self.client.pipeline(transaction=True) as pipe:
            pipe.xadd(self.keys.reply(self.request.id), codec.encode_frame(frame, codec.encoding_of(self.fields)))  # type: ignore[arg-type]  # dict is invariant
            pipe.pexpire(self.keys.reply(self.request.id), REPLY_TTL_MS)
            pipe.hset(self.keys.state(self.request.id), mapping={"status": status, "attempt": self.attempt})
            pipe.pexpire(self.keys.state(self.request.id), REPLY_TTL_MS)
            pipe.xack(self.keys.stream(self.tier), GROUP, self.entry_id)
            pipe.xdel(self.keys.stream(self.tier), self.entry_id)
            pipe.execute()


Script = Callable[[Taken], None]


def echo(taken: Taken) -> None:
    """Answer with the prompt itself, one character per token."""
    text = taken.request.prompt or ""
    if taken.request.stream:
        taken.tokens(*text)
    taken.final(text, list(range(len(text))))


@dataclass
class Responder:
    """Takes requests in a thread of its own and runs ``script`` on each; what a script raises fails the test at the end."""

    url: str
    queue: str
    script: Script = echo
    seen: list[GenerateRequest] = field(default_factory=list)
    failures: list[BaseException] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.keys = Keys(self.queue)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def take(self, client: redis.Redis, block_ms: int = 100) -> list[Taken]:
        """Take what is on the streams; waits for something up to ``block_ms``."""
        streams = {self.keys.stream(tier): ">" for tier in TIERS}
        for name in streams:
            with suppress(redis.ResponseError):  # it exists
                client.xgroup_create(name, GROUP, id="0", mkstream=True)
        taken = []
        reply: Any = client.xreadgroup(GROUP, "responder", streams, block=block_ms)  # type: ignore[arg-type]  # dict is invariant
        for name, entries in reply or []:
            tier: Tier = "batch" if name.endswith(b"batch") else "realtime"
            taken += [self._begin(client, tier, entry_id, fields) for entry_id, fields in entries]
        return [item for item in taken if item is not None]

    def _begin(self, client: redis.Redis, tier: Tier, entry_id: bytes, fields: Mapping[bytes, bytes]) -> Taken | None:
        request = codec.decode_request(fields, tier)
        state = self.keys.state(request.id)
        if client.hget(state, "status") == b"cancelled":
            client.xack(self.keys.stream(tier), GROUP, entry_id)
            client.xdel(self.keys.stream(tier), entry_id)
            return None
        client.hset(state, mapping={"status": "running", "tier": tier, "worker": "responder"})
        self.seen.append(request)
        return Taken(client, self.keys, tier, entry_id, fields, request)

    def _run(self) -> None:
        with connect(self.url, queue=self.queue) as client:
            while not self._stop.is_set():
                try:
                    for taken in self.take(client):
                        self.script(taken)
                except redis.RedisError:
                    self._stop.wait(0.05)
                except BaseException as error:
                    self.failures.append(error)
                    raise

    @contextmanager
    def running(self) -> Iterator[Responder]:
        self._thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            self._thread.join(timeout=20)
        if self.failures:
            raise self.failures[0]


class Held:
    """A script that holds each request until the test says how to continue."""

    def __init__(self) -> None:
        self._taken: list[Taken] = []
        self._arrived = threading.Semaphore(0)

    def __call__(self, taken: Taken) -> None:
        self._taken.append(taken)
        self._arrived.release()

    def next(self) -> Taken:
        """The request that was taken first of those not given out yet."""
        assert self._arrived.acquire(timeout=20)
        return self._taken.pop(0)


def entries(client: redis.Redis, key: str) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """All of a stream."""
    found: Any = client.xrange(key)
    return list(found)
