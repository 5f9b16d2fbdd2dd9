"""Ownership of entries: the only module that begins, publishes, renews, answers, acknowledges and hands back.

Every call is a script that first checks that this consumer still owns the entry (fencing), so a worker that was stopped,
cut off or taken for dead can do no harm when it comes back. Every call may be repeated: if a reply was lost on its way,
the caller simply calls again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import redis
from redis.exceptions import ResponseError

from producer.calls import STATE_TTL_MS
from producer.codec import decode_chunk, decode_frame
from producer.errors import InternalError
from producer.keys import CONTROL_LENGTH, GROUP, TIERS, Keys
from producer.scripts import Argument
from producer.wire import Chunk
from worker.stream.delivery import Delivery, Settlement, TokensFrame
from worker.stream.scripts import ScriptCall, load, run, run_each

ALONE_FROM_ATTEMPT = 3  # two workers died in its attempts
_LOST, _SETTLED = -1, -2
_PAGE = 250  # entries that one call of a script renews or hands back: a few milliseconds in which Redis serves no other client

Purpose = Literal["run", "hold", "due"]
Verdict = Literal["run", "held", "suspect", "cancelled", "expired", "poisoned", "settled", "duplicate", "lost"]
Outcome = Literal["written", "settled", "lost", "behind"]


@dataclass(frozen=True, slots=True)
class Begun:
    """The ledger's answer about a delivery.

    Attributes:
        verdict: ``run`` it; it is ``held``, until its turn comes; it is a ``suspect``, to be run alone; it was ``cancelled``,
            is ``expired`` or ``poisoned`` and is still to be answered; or drop it: it is ``settled`` or a ``duplicate`` (both
            are off the queue now), or ``lost``.
        now_ms: Redis time.
        published: number of output tokens that earlier deliveries published.
    """

    verdict: Verdict
    now_ms: int
    streamed: bool
    published: int
    enqueued_ms: int

    @property
    def resumes(self) -> bool:
        """Whether there is output of earlier deliveries to continue from, or to answer with."""
        return self.published > 0 and self.verdict in ("run", "cancelled", "expired", "poisoned")


@dataclass(frozen=True, slots=True)
class Settled:
    """The result of a settlement. ``behind``: the tail does not continue the ``published`` tokens; send it again."""

    outcome: Outcome
    published: int


@dataclass(frozen=True, slots=True)
class Written:
    """The result of writing frames and settlements.

    Attributes:
        positions: for each frame the number of tokens now published (its own end, or where to continue from), None
            if the delivery is no longer ours to run; or the error with which the server refused all frames.
        settled: for each settlement its result, or the error with which the server refused it.
    """

    positions: list[int | None] | ResponseError
    settled: list[Settled | ResponseError]


class Ledger:
    """One consumer's ledger; may be used from any thread.

    Args:
        reply_ttl_s: lifetime of a reply after its final frame.
        state_ttl_s: lifetime of a finished request's state, and of a reply that no worker continues.
        on_round_trip: called with the duration in seconds of each round trip to begin, publish, answer, renew, hand back or reap.
    """

    def __init__(
        self,
        client: redis.Redis,
        keys: Keys,
        consumer: str,
        *,
        max_attempts: int,
        reply_ttl_s: float,
        state_ttl_s: float,
        on_round_trip: Callable[[float], None],
    ) -> None:
        self._client = client
        self._keys = keys
        self._consumer = consumer
        self._max_attempts = max_attempts
        self._reply_ttl_ms = int(reply_ttl_s * 1000)
        self._state_ttl_ms = int(state_ttl_s * 1000)
        self._on_round_trip = on_round_trip
        self._streams = [keys.stream(tier) for tier in TIERS]

    def begin(self, deliveries: Sequence[Delivery]) -> list[Begun]:
        """Ask whether to run each of ``deliveries``, which were just given and counted; sets ``attempt`` and ``count``."""
        return self._ask(deliveries, "run")

    def hold(self, deliveries: Sequence[Delivery]) -> list[Begun]:
        """Ask whether each of ``deliveries``, which were just given, has to wait for its turn; sets ``attempt`` and ``count``."""
        return self._ask(deliveries, "hold")

    def begin_held(self, deliveries: Sequence[Delivery]) -> list[Begun]:
        """Ask the same for those whose turn has come, including suspects; from now on their attempts count."""
        return self._ask(deliveries, "due")

    def _ask(self, deliveries: Sequence[Delivery], purpose: Purpose) -> list[Begun]:
        """Only a request that will be run counts as an attempt.

        A repeated call gives the same answer, even if a renewal has written the lower count meanwhile: the reads that count a delivery
        are those of a first attempt, which is never less than 1.
        """
        replies = self._timed(run, [self._begin(delivery, purpose) for delivery in deliveries])
        begun = []
        for delivery, (verdict, attempt, now_ms, streamed, published, enqueued_ms, *firsts, vocabulary) in zip(
            deliveries, replies, strict=True
        ):
            said = Begun(cast("Verdict", verdict.decode()), now_ms, bool(streamed), published, enqueued_ms)
            delivery.started_ms, delivery.first_token_ms = firsts
            delivery.vocabulary = None if vocabulary is None else vocabulary.decode(errors="replace")
            delivery.attempt = attempt
            delivery.count = attempt if said.verdict == "run" else attempt - 1
            begun.append(said)
        return begun

    def published(self, delivery: Delivery) -> list[Chunk]:
        """The token frames of earlier deliveries, as far as they follow one another without a gap."""
        chunks: list[Chunk] = []
        after = 0
        entries: Any = self._client.xrange(self._keys.reply(delivery.request_id))
        for _, entry in entries:
            try:
                frame = decode_frame(entry)
                if frame.type != "tokens":
                    break
                chunk = decode_chunk(frame)
            except InternalError:
                break
            if chunk.index != after:
                break
            after += len(chunk.token_ids)
            chunks.append(chunk)
        return chunks

    def write(self, frames: Sequence[TokensFrame], settlements: Sequence[Settlement]) -> Written:
        """Publish ``frames`` and end ``settlements`` in one round trip; the server's refusal of one does not affect the others."""
        calls = ([self._publish(frames)] if frames else []) + [self._finish(settlement) for settlement in settlements]
        replies = self._timed(run_each, calls) if calls else []
        positions = replies.pop(0) if frames else []
        if not isinstance(positions, ResponseError):
            positions = [None if n in (_LOST, _SETTLED) else n for n in positions]
        return Written(positions, [reply if isinstance(reply, ResponseError) else _settled(*reply) for reply in replies])

    def is_writable(self) -> bool:
        """Whether the server accepts writes now."""
        try:
            check_writable(self._client, self._keys)
        except (redis.RedisError, OSError):
            return False
        return True

    def write_counts(self, deliveries: Sequence[Delivery]) -> None:
        """Correct the delivery counts of those that are no attempt yet, but were counted by the read that brought them."""
        self.renew([delivery for delivery in deliveries if delivery.entry.counted and delivery.count != delivery.attempt])

    def renew(self, deliveries: Sequence[Delivery]) -> list[Delivery]:
        """Renew the leases of ``deliveries``; returns those that are lost."""
        return [lost for page in _pages(deliveries) for lost in self._renew(page)]

    def _renew(self, deliveries: Sequence[Delivery]) -> list[Delivery]:
        args = [part for item in deliveries for part in (*self._where(item), _or_nothing(item.count))]
        (kept,) = self._timed(run, [(load("renew"), self._streams, [GROUP, self._consumer, *args])])
        return [delivery for delivery, keeps in zip(deliveries, kept, strict=True) if not keeps]

    def release(self, deliveries: Sequence[Delivery], *, crashed: bool = False, to: str = "") -> int:
        """Hand ``deliveries`` back, claimable at once, and tell the other workers; returns how many were still ours.

        Args:
            crashed: this counts as an attempt of those that were running.
            to: the one worker to tell; '' tells all.
        """
        return sum(self._release(page, crashed, to) for page in _pages(deliveries))

    def _release(self, deliveries: Sequence[Delivery], crashed: bool, to: str) -> int:
        args: list[Argument] = [GROUP, self._consumer, CONTROL_LENGTH, to]
        for item in deliveries:
            args += [*self._where(item), item.count if crashed and item.count is not None else item.count_before]
        states = [self._keys.state(item.request_id) for item in deliveries]
        (count,) = self._timed(run, [(load("release"), [*self._streams, self._keys.control, *states], args)])
        return int(count)

    def reap(self, names: Iterable[str]) -> int:
        """Remove the consumers called ``names`` that have neither a heartbeat nor anything pending; returns how many there were."""
        return sum(self._timed(run, [(load("reap"), [self._keys.worker(name), *self._streams], [GROUP, name]) for name in names]))

    def _timed(self, execute: Callable[[redis.Redis, Sequence[ScriptCall]], list[Any]], calls: Sequence[ScriptCall]) -> list[Any]:
        started_s = time.monotonic()
        replies = execute(self._client, calls)
        self._on_round_trip(time.monotonic() - started_s)
        return replies

    def _where(self, delivery: Delivery) -> tuple[int, str]:
        return TIERS.index(delivery.tier) + 1, delivery.entry.id

    def _reply_and_state(self, delivery: Delivery) -> tuple[str, str]:
        return self._keys.reply(delivery.request_id), self._keys.state(delivery.request_id)

    def _begin(self, delivery: Delivery, purpose: Purpose) -> ScriptCall:
        (other,) = (self._keys.stream(tier) for tier in TIERS if tier != delivery.tier)
        args = [GROUP, self._consumer, delivery.entry.id, delivery.tier, _or_nothing(delivery.deadline_ms), delivery.encoding]
        args += [self._max_attempts, ALONE_FROM_ATTEMPT, purpose, delivery.attempt, int(not delivery.entry.counted), STATE_TTL_MS]
        return load("begin"), [self._keys.stream(delivery.tier), *self._reply_and_state(delivery), other], args

    def _publish(self, frames: Sequence[TokensFrame]) -> ScriptCall:
        args: list[Argument] = [GROUP, self._consumer, self._state_ttl_ms]
        for frame in frames:
            delivery = frame.delivery
            args += [*self._where(delivery), delivery.attempt, frame.first, frame.after, delivery.encoding, frame.body]
            args += [_or_nothing(delivery.first_token_ms), delivery.vocabulary or ""]
        keys = [key for frame in frames for key in self._reply_and_state(frame.delivery)]
        return load("publish"), [*self._streams, *keys], args

    def _finish(self, settlement: Settlement) -> ScriptCall:
        delivery, tail = settlement.delivery, settlement.tail
        args: list[Argument] = [GROUP, self._consumer, delivery.entry.id, delivery.tier, max(1, delivery.attempt), delivery.encoding]
        args += [settlement.type, settlement.body, settlement.status, settlement.code, self._reply_ttl_ms, self._state_ttl_ms]
        args += [tail.first, tail.after, tail.body] if tail is not None else ["", "", ""]
        keys = [self._keys.stream(delivery.tier), *self._reply_and_state(delivery), self._keys.dead]
        usage = settlement.usage
        args += [settlement.dead_letter, *((usage.prompt_tokens, usage.completion_tokens) if usage is not None else ("", ""))]
        args.append(_or_nothing(delivery.first_token_ms))
        return load("finish"), keys, args


def check_writable(client: redis.Redis, keys: Keys) -> None:
    """Raise a `redis.RedisError` if the server accepts no writes: it is away, a replica, short of replicas, or refuses us.

    A script that may write shows this; the one used here renews nothing.
    """
    run(client, [(load("renew"), [keys.stream(tier) for tier in TIERS], [GROUP, ""])])


def _or_nothing(number: int | None) -> int | str:
    return "" if number is None else number


def _settled(outcome: bytes, published: int) -> Settled:
    return Settled(cast("Outcome", outcome.decode()), published)


def _pages(deliveries: Sequence[Delivery]) -> Iterator[Sequence[Delivery]]:
    return (deliveries[start : start + _PAGE] for start in range(0, len(deliveries), _PAGE))
