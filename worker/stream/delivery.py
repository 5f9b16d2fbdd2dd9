"""One delivered request as a unit of work: it builds its possible endings, and `ledger` carries them out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from producer.codec import encode_body, encode_chunk, encode_error, encode_result, encoding_of, request_id_of
from producer.errors import Cancelled, HeadraceError, Poisoned
from producer.keys import Tier
from producer.wire import MAX_LABEL_BYTES, Chunk, Encoding, Result, Usage
from worker.stream.consumer import Entry

MAX_REPLY_BYTES = 256 * 2**20  # of one frame: half of Redis's default limit (proto-max-bulk-len)
LEAST_BULK_BYTES = 2**20  # the lowest limit that a server can be set to

Status = Literal["done", "failed", "cancelled"]


@dataclass(frozen=True, slots=True)
class TokensFrame:
    """Tokens ``first .. after-1`` of one request's output, encoded."""

    delivery: Delivery
    first: int
    after: int
    body: bytes


@dataclass(frozen=True, slots=True)
class Settlement:
    """How a delivery ends: its final frame, and what accompanies it.

    Attributes:
        tail: the last tokens' frame of a streamed request, written with the final one.
        dead_letter: the reason, if the request also becomes a dead letter.
        usage: how many tokens it took, if it succeeded; kept in its state.
    """

    delivery: Delivery
    type: Literal["final", "error"]
    body: bytes
    status: Status
    code: str = ""
    tail: TokensFrame | None = None
    dead_letter: str = ""
    usage: Usage | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of its longest frame, which the server has to accept as one argument."""
        return max(len(self.body), len(self.tail.body) if self.tail is not None else 0)


@dataclass(slots=True, eq=False)
class Delivery:
    """An entry delivered to this consumer.

    An entry without a usable id is answered under the entry's own id, which its XADD returned.

    Attributes:
        attempt: which attempt this is, from 1; 0 until the ledger has seen it.
        count: the group's delivery count while it is held: ``attempt``, or one less while it only waits
            for its turn, so that a crash that it cannot have caused does not count against it; None until the ledger has seen it.
        started_ms, first_token_ms: Redis time; when a worker first began it, and when its first token came, possibly in an earlier
            attempt whose output is published. None before.
        vocabulary: that of its output's token ids; None before there are any, and if that of published ones is not known.
    """

    entry: Entry
    request_id: str = field(init=False)
    encoding: Encoding = field(init=False)
    attempt: int = 0
    count: int | None = None
    started_ms: int | None = None
    first_token_ms: int | None = None
    vocabulary: str | None = None

    def __post_init__(self) -> None:
        self.request_id = request_id_of(self.fields) or self.entry.id
        self.encoding = encoding_of(self.fields)

    @property
    def tier(self) -> Tier:
        return self.entry.tier

    @property
    def fields(self) -> Mapping[bytes, bytes]:
        return self.entry.fields

    @property
    def count_before(self) -> int | Literal["", "less"]:
        """The group's delivery count before this delivery: '' if it has not changed, ``less`` if it was one less than now."""
        if self.attempt:
            return self.attempt - 1
        return "less" if self.entry.counted else ""

    @property
    def source(self) -> str:
        """Its source label, read before the entry is decoded, which may refuse the label."""
        return self.fields.get(b"source", b"")[:MAX_LABEL_BYTES].decode(errors="replace")

    @property
    def deadline_ms(self) -> int | None:
        """Absolute, Redis time; None if there is none, or it cannot be read (decoding will refuse that)."""
        raw = self.fields.get(b"deadline_ms", b"")
        return int(raw) if raw.isdigit() and len(raw) <= 16 else None

    def tokens_frame(self, chunk: Chunk) -> TokensFrame:
        """A frame of tokens that continues what was published."""
        body = encode_body(encode_chunk(chunk), self.encoding)
        return TokensFrame(self, chunk.index, chunk.index + len(chunk.token_ids), body)

    def success(self, result: Result, tail: TokensFrame | None = None) -> Settlement:
        """The settlement of a success."""
        return Settlement(self, "final", encode_body(encode_result(result), self.encoding), "done", tail=tail, usage=result.usage)

    def failure(self, error: HeadraceError) -> Settlement:
        """The settlement of a failure or cancellation; a request that was given up also becomes a dead letter."""
        body = encode_body(encode_error(error), self.encoding)
        status: Status = "cancelled" if isinstance(error, Cancelled) else "failed"
        return Settlement(self, "error", body, status, error.code, dead_letter=error.message if isinstance(error, Poisoned) else "")
