"""Folding the frames of one reply into chunks and an outcome. Pure bookkeeping: no Redis here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from producer import codec
from producer.errors import InternalError
from producer.wire import Chunk, Frame, Result

START = "0-0"


def outcome(frame: Frame, request_id: str) -> Result:
    """The result in a reply's last frame.

    Raises:
        HeadraceError: the frame holds this error instead.
    """
    if frame.type == "error":
        raise codec.decode_error(frame, request_id)
    return codec.decode_result(frame)


class ReplyFold:
    """What has been read of one reply stream.

    Frames are folded by the index of their tokens, so a token is never returned twice. What was missed (frames that
    Redis lost, a reader that came late) is filled in from the final frame: the joined chunks are the final text.

    Attributes:
        last_id: entry id from which to continue reading.
        final: the last frame, once it is there.
    """

    def __init__(self, *, streaming: bool) -> None:
        """Args: streaming: return chunks; otherwise only the last frame is looked at."""
        self._streaming = streaming
        self.last_id = START
        self.final: Frame | None = None
        self._num_tokens = 0
        self._texts: list[str] = []

    def rewind(self) -> None:
        """Read from the start again; what was already returned is skipped."""
        self.last_id = START

    def feed(self, entries: Sequence[tuple[bytes, Mapping[bytes, bytes]]]) -> list[Chunk]:
        """Take the entries that follow ``last_id`` and return the chunks that are new.

        Raises:
            InternalError: an entry is no frame of this protocol, or the final text contradicts what was streamed.
        """
        chunks = []
        for entry_id, fields in entries:
            self.last_id = entry_id.decode()
            if self.final is None and (self._streaming or fields.get(b"type") != b"tokens"):
                chunk = self._take(codec.decode_frame(fields))
                if chunk is not None:
                    chunks.append(chunk)
        return chunks

    def _take(self, frame: Frame) -> Chunk | None:
        if frame.type == "tokens":
            return self._next(codec.decode_chunk(frame))
        self.final = frame
        return self._remainder(codec.decode_result(frame)) if self._streaming and frame.type == "final" else None

    def _next(self, chunk: Chunk) -> Chunk | None:
        """``chunk`` if it continues where the last one ended, else None: a repeated one is dropped, and the final frame fills a gap."""
        if chunk.index != self._num_tokens or not chunk.token_ids:
            return None
        self._num_tokens += len(chunk.token_ids)
        self._texts.append(chunk.text)
        return chunk

    def _remainder(self, result: Result) -> Chunk | None:
        given = "".join(self._texts)
        if not result.text.startswith(given):
            raise InternalError("the final text differs from what was streamed", request_id=result.id)
        text, token_ids = result.text[len(given) :], result.token_ids[self._num_tokens :]
        logprobs = result.logprobs[self._num_tokens :] if result.logprobs is not None else None
        if not (text or token_ids):
            return None
        return Chunk(text=text, token_ids=token_ids, index=self._num_tokens, attempt=result.attempt, logprobs=logprobs)


def parse_entries(reply: Any) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """The entries in a raw RESP2 reply of XREAD on one stream."""
    if not reply:
        return []
    [[_, entries]] = reply
    return [(entry_id, pairs(fields)) for entry_id, fields in entries]


def pairs(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    """``[k, v, k, v, …]`` as a map."""
    return dict(zip(flat[::2], flat[1::2], strict=True))
