"""Folding frames into chunks: no repeat, no gap, and the final text in the end."""

from __future__ import annotations

import pytest

from producer import codec
from producer.errors import Cancelled, InternalError
from producer.reply import START, ReplyFold, outcome, parse_entries
from producer.wire import Chunk, Frame, Result

Entry = tuple[bytes, dict[bytes, bytes]]


def entry(number: int, frame: Frame) -> Entry:
    fields = codec.encode_frame(frame, "json")
    return f"{number}-0".encode(), {k.encode(): v if isinstance(v, bytes) else str(v).encode() for k, v in fields.items()}


def tokens(number: int, index: int, *texts: str, attempt: int = 1) -> Entry:
    chunk = Chunk("".join(texts), list(range(index, index + len(texts))), index)
    return entry(number, Frame("tokens", codec.encode_chunk(chunk), attempt))


def final(number: int, text: str, num_tokens: int) -> Entry:
    return entry(number, Frame("final", codec.encode_result(Result(id="x", text=text, token_ids=list(range(num_tokens)))), 2))


def fold(*entries: Entry) -> tuple[ReplyFold, str, list[int]]:
    state = ReplyFold(streaming=True)
    chunks = state.feed(entries)
    return state, "".join(chunk.text for chunk in chunks), [token for chunk in chunks for token in chunk.token_ids]


def test_chunks_join_to_the_final_text() -> None:
    state, text, ids = fold(tokens(1, 0, "a", "b"), tokens(2, 2, "c"), final(3, "abc", 3))
    assert (text, ids, state.last_id) == ("abc", [0, 1, 2], "3-0")
    assert state.final is not None
    assert outcome(state.final, "x").text == "abc"


def test_late_text_comes_with_the_final_frame() -> None:
    _, text, ids = fold(tokens(1, 0, "a", ""), final(2, "a🙂", 2))
    assert (text, ids) == ("a🙂", [0, 1])


def test_unstreamed_reply_is_one_chunk() -> None:
    _, text, ids = fold(final(1, "abc", 3))
    assert (text, ids) == ("abc", [0, 1, 2])


def test_repeated_frame_is_given_out_once() -> None:
    _, text, ids = fold(tokens(1, 0, "a", "b"), tokens(2, 0, "a", "b", attempt=2), tokens(3, 2, "c", attempt=2), final(4, "abc", 3))
    assert (text, ids) == ("abc", [0, 1, 2])


def test_overlapping_frame_waits_for_the_final_one() -> None:
    _, text, ids = fold(tokens(1, 0, "a", "b"), tokens(2, 1, "b", "c", attempt=2), tokens(3, 3, "d", attempt=2), final(4, "abcd", 4))
    assert (text, ids) == ("abcd", [0, 1, 2, 3])


def test_missing_frame_is_made_up_for_by_the_final_one() -> None:
    _, text, ids = fold(tokens(1, 0, "a"), tokens(3, 2, "c"), final(4, "abc", 3))
    assert (text, ids) == ("abc", [0, 1, 2])


def test_reading_again_from_the_start_repeats_nothing() -> None:
    state = ReplyFold(streaming=True)
    first = state.feed([tokens(5, 0, "a"), tokens(6, 1, "b")])
    state.rewind()
    assert state.last_id == START
    again = state.feed([tokens(1, 0, "a"), tokens(2, 1, "b"), tokens(3, 2, "c"), final(4, "abc", 3)])
    assert "".join(chunk.text for chunk in first + again) == "abc"


def test_nothing_follows_the_final_frame() -> None:
    state, text, _ = fold(final(1, "a", 1), tokens(2, 1, "b"))
    assert text == "a"
    assert state.final is not None


def test_final_text_that_contradicts_the_stream_is_an_error_and_the_result_stands() -> None:
    state = ReplyFold(streaming=True)
    with pytest.raises(InternalError, match="differs"):
        state.feed([tokens(1, 0, "a"), final(2, "b", 1)])
    assert state.final is not None


def test_waiting_for_the_result_alone_does_not_decode_token_frames() -> None:
    state = ReplyFold(streaming=False)
    assert state.feed([(b"1-0", {b"type": b"tokens", b"json": b"garbage"}), final(2, "a", 1)]) == []
    assert state.final is not None


def test_malformed_frame_is_a_typed_error() -> None:
    with pytest.raises(InternalError):
        ReplyFold(streaming=True).feed([(b"1-0", {b"type": b"tokens", b"json": b"garbage"})])


def test_error_frame_is_raised_anew_each_time() -> None:
    frame = Frame("error", codec.encode_error(Cancelled("why")))
    caught = []
    for _ in range(2):
        with pytest.raises(Cancelled) as raised:
            outcome(frame, "x")
        caught.append(raised.value)
    assert caught[0] is not caught[1]
    assert caught[0].request_id == "x"


def test_raw_reply_of_a_read_is_parsed() -> None:
    assert parse_entries(None) == []
    assert parse_entries([[b"key", [[b"1-0", [b"a", b"1", b"b", b"2"]]]]]) == [(b"1-0", {b"a": b"1", b"b": b"2"})]
