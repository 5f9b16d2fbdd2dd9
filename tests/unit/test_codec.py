"""Wire types to bytes and back: golden vectors, round trips, hostile bytes."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack  # type: ignore[import-untyped]  # it ships no annotations
import pytest
from hypothesis import given
from hypothesis import strategies as st

from producer import codec, validate, wire
from producer.errors import DeadlineExceeded, HeadraceError, InternalError, InvalidRequest
from producer.sampling import SamplingParams
from producer.wire import Choice, Chunk, Encoding, Frame, GenerateRequest, Result, Timings, TokenLogprob, Usage

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "messages.json").read_text(encoding="utf-8"))
ENCODINGS: tuple[Encoding, ...] = ("msgpack", "json")


def as_bytes(entry: dict[str, Any]) -> dict[bytes, bytes]:
    """An entry as Redis returns it."""
    return {name.encode(): value if isinstance(value, bytes) else str(value).encode() for name, value in entry.items()}


def golden_entry(entry: dict[str, str]) -> dict[bytes, bytes]:
    return as_bytes({name: bytes.fromhex(value) if name == "msgpack" else value for name, value in entry.items()})


def golden_request(item: dict[str, Any]) -> GenerateRequest:
    fields = dict(item["request"])
    return GenerateRequest(params=SamplingParams(**fields.pop("params", {})), **fields)


def golden_encoding(item: dict[str, Any]) -> Encoding:
    return "msgpack" if "msgpack" in item["entry"] else "json"


@pytest.mark.parametrize("item", GOLDEN["requests"], ids=lambda item: item["name"])
def test_golden_request_encodes_and_decodes(item: dict[str, Any]) -> None:
    request = golden_request(item)
    assert as_bytes(codec.encode_request(request, golden_encoding(item))) == golden_entry(item["entry"])
    assert codec.decode_request(golden_entry(item["entry"]), request.tier) == request


@pytest.mark.parametrize("item", GOLDEN["frames"], ids=lambda item: item["name"])
def test_golden_frame_encodes_and_decodes(item: dict[str, Any]) -> None:
    frame = codec.decode_frame(golden_entry(item["entry"]))
    assert frame == Frame(item["type"], item["body"], item["attempt"])
    assert as_bytes(codec.encode_frame(frame, golden_encoding(item))) == golden_entry(item["entry"])


@pytest.mark.parametrize("item", GOLDEN["frames"], ids=lambda item: item["name"])
def test_golden_body_survives_the_typed_form(item: dict[str, Any]) -> None:
    frame = Frame(item["type"], item["body"], item["attempt"])
    again = {
        "tokens": lambda: codec.encode_chunk(codec.decode_chunk(frame)),
        "final": lambda: codec.encode_result(codec.decode_result(frame)),
        "error": lambda: codec.encode_error(codec.decode_error(frame)),
    }[item["type"]]()
    assert again == frame.body


@pytest.mark.parametrize(("encoding", "told"), [("json", "\ud800"), ("msgpack", r"\ud800")])
def test_error_that_repeats_a_lone_surrogate_can_be_told(encoding: Encoding, told: str) -> None:
    """Even if the message names the caller's own key, the reply is written and read."""
    error = InvalidRequest("unknown parameter: \ud800", field="\ud800")
    frame = codec.decode_frame(as_bytes(dict(codec.encode_frame(Frame("error", codec.encode_error(error)), encoding))))
    again = codec.decode_error(frame)
    assert (again.message, again.field) == (f"unknown parameter: {told}", told)


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40)
some_text = texts.filter(bool)
names = st.from_regex(r"[A-Za-z0-9._-]{1,128}", fullmatch=True)
token_ids = st.integers(0, 2**31 - 1)
json_trees = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda children: st.lists(children, max_size=3) | st.dictionaries(texts, children, max_size=3),
    max_leaves=8,
)
params = st.builds(
    SamplingParams,
    max_tokens=st.none() | st.integers(20, 1_000_000),
    min_tokens=st.integers(0, 20),
    temperature=st.floats(0, 100),
    top_p=st.floats(0.001, 1),
    top_k=st.integers(-1, 2**31 - 1),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0.01, 100),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    logit_bias=st.dictionaries(token_ids, st.floats(-100, 100), max_size=4),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    stop=st.lists(some_text, max_size=4),
    stop_token_ids=st.lists(token_ids, max_size=4),
    logprobs=st.none() | st.integers(0, 20),
    ignore_eos=st.booleans(),
    n=st.integers(1, 16),
    response_format=st.none() | st.dictionaries(texts, json_trees, max_size=3),
)
prompts = st.one_of(
    st.fixed_dictionaries({"prompt": some_text}),
    st.fixed_dictionaries({"prompt_token_ids": st.lists(token_ids, min_size=1, max_size=8)}),
    st.fixed_dictionaries({"messages": st.lists(st.fixed_dictionaries({"role": some_text, "content": texts}), min_size=1, max_size=3)}),
    st.fixed_dictionaries({"prompt": some_text, "kind": st.just("score"), "continuations": st.lists(some_text, min_size=1, max_size=3)}),
)
millis = st.none() | st.integers(0, 2**63 - 1)


@st.composite
def requests(draw: st.DrawFn) -> GenerateRequest:
    prompt, sampling = draw(prompts), draw(params)
    if "kind" in prompt:
        sampling = replace(sampling, n=1)
    return GenerateRequest(
        id=draw(names),
        tier=draw(st.sampled_from(("realtime", "batch"))),
        params=sampling,
        stream="kind" not in prompt and sampling.n == 1 and draw(st.booleans()),
        enqueued_ms=draw(millis),
        deadline_ms=draw(millis),
        source=draw(texts),
        user=draw(texts),
        task=draw(texts),
        **prompt,
    )


@given(requests(), st.sampled_from(ENCODINGS))
def test_any_valid_request_survives_the_wire(request: GenerateRequest, encoding: Encoding) -> None:
    assert codec.decode_request(as_bytes(codec.encode_request(request, encoding)), request.tier) == request


logprob_lists = st.none() | st.lists(
    st.builds(TokenLogprob, token_ids, st.floats(-9999, 0), st.dictionaries(token_ids, st.floats(-9999, 0), max_size=3)), max_size=3
)
results = st.builds(
    Result,
    id=names,
    text=texts,
    token_ids=st.lists(token_ids, max_size=5),
    finish_reason=st.sampled_from(("stop", "length")),
    stop_reason=st.none() | some_text | token_ids,
    usage=st.builds(Usage, *[st.integers(0, 2**31)] * 3),
    timings=st.builds(Timings, *[st.floats(0, 1e9)] * 3),
    attempt=st.integers(1, 99),
    worker=texts,
    model=texts,
    logprobs=logprob_lists,
    choices=st.none()
    | st.lists(
        st.builds(
            Choice,
            st.integers(0, 15),
            texts,
            st.lists(token_ids, max_size=3),
            st.sampled_from(("stop", "length")),
            st.none(),
            logprob_lists,
        ),
        max_size=2,
    ),
    scores=st.none() | st.lists(st.floats(-9999, 0), max_size=3),
    embedding=st.none() | st.lists(st.floats(-1e6, 1e6), max_size=4),
)


@given(results, st.sampled_from(ENCODINGS))
def test_any_result_survives_the_wire(result: Result, encoding: Encoding) -> None:
    entry = codec.encode_frame(Frame("final", codec.encode_result(result), result.attempt), encoding)
    assert codec.decode_result(codec.decode_frame(as_bytes(entry))) == result


def decode(entry: dict[bytes, bytes]) -> None:
    """Decode what may be invalid; the only error allowed is a refusal that names the field."""
    refused: InvalidRequest | None = None
    try:
        codec.decode_request(entry, "realtime")
    except InvalidRequest as error:
        refused = error
    assert refused is None or refused.field


@given(st.binary(max_size=200) | json_trees.map(lambda tree: json.dumps(tree).encode()) | json_trees.map(msgpack.packb))
def test_any_bytes_as_body_raise_nothing_but_invalid_request(body: bytes) -> None:
    for encoding in (b"json", b"msgpack"):
        decode({b"id": b"x", encoding: body})


@given(st.dictionaries(st.sampled_from([*wire.GenerateRequest.__slots__, *SamplingParams.__slots__]), json_trees, max_size=6))
def test_any_values_in_the_body_raise_nothing_but_invalid_request(body: dict[str, Any]) -> None:
    decode({b"id": b"x", b"json": json.dumps(body | {"prompt": "hi"}).encode()})


plain_names = st.sampled_from([b"id", b"v", b"enqueued_ms", b"deadline_ms", b"source", b"user", b"task", b"json", b"msgpack", b"other"])


@given(st.dictionaries(plain_names, st.binary(max_size=30)))
def test_any_plain_fields_raise_nothing_but_invalid_request(entry: dict[bytes, bytes]) -> None:
    decode({b"id": b"x", b"json": b'{"prompt":"hi"}'} | entry)
    codec.request_id_of(entry)
    codec.encoding_of(entry)


@given(st.binary(max_size=100), st.sampled_from([b"tokens", b"final", b"error", b"?"]))
def test_any_bytes_as_frame_raise_nothing_but_internal_error(body: bytes, kind: bytes) -> None:
    try:
        frame = codec.decode_frame({b"type": kind, b"json": body})
        {"tokens": codec.decode_chunk, "final": codec.decode_result, "error": codec.decode_error}[frame.type](frame)
    except InternalError:
        pass


def deep(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


PROMPT = b'{"prompt":"hi"}'
BAD_ENTRIES: dict[str, tuple[dict[bytes, bytes], str]] = {
    "no id": ({b"json": PROMPT}, "id"),
    "empty id": ({b"id": b"", b"json": PROMPT}, "id"),
    "id with a colon": ({b"id": b"a:b", b"json": PROMPT}, "id"),
    "id with a newline": ({b"id": b"a\n", b"json": PROMPT}, "id"),
    "long id": ({b"id": b"a" * 129, b"json": PROMPT}, "id"),
    "id that is not UTF-8": ({b"id": b"\xff", b"json": PROMPT}, "id"),
    "another version": ({b"id": b"x", b"v": b"2", b"json": PROMPT}, "v"),
    "version that is no number": ({b"id": b"x", b"v": b"one", b"json": PROMPT}, "v"),
    "negative deadline": ({b"id": b"x", b"deadline_ms": b"-1", b"json": PROMPT}, "deadline_ms"),
    "deadline over 64 bits": ({b"id": b"x", b"deadline_ms": b"9" * 19, b"json": PROMPT}, "deadline_ms"),
    "long label": ({b"id": b"x", b"source": b"s" * 257, b"json": PROMPT}, "source"),
    "label with NUL": ({b"id": b"x", b"user": b"a\0", b"json": PROMPT}, "user"),
    "no body": ({b"id": b"x"}, "body"),
    "two bodies": ({b"id": b"x", b"json": PROMPT, b"msgpack": b"\x80"}, "body"),
    "body that is no map": ({b"id": b"x", b"json": b"[]"}, "json"),
    "broken JSON": ({b"id": b"x", b"json": b'{"prompt":'}, "json"),
    "UTF-16": ({b"id": b"x", b"json": '{"prompt":"hi"}'.encode("utf-16")}, "json"),
    "NaN": ({b"id": b"x", b"json": b'{"prompt":"hi","top_p":NaN}'}, "json"),
    "Infinity": ({b"id": b"x", b"json": b'{"prompt":"hi","top_p":-Infinity}'}, "json"),
    "number that overflows": ({b"id": b"x", b"json": b'{"prompt":"hi","temperature":1e999}'}, "temperature"),
    "integer of 5000 digits": ({b"id": b"x", b"json": b'{"prompt":"hi","seed":' + b"9" * 5000 + b"}"}, "json"),
    "integer over 64 bits": ({b"id": b"x", b"json": b'{"prompt":"hi","seed":9223372036854775808}'}, "seed"),
    "deep JSON": ({b"id": b"x", b"json": b'{"prompt":' + deep(100_000) + b"}"}, "json"),
    "deep msgpack": ({b"id": b"x", b"msgpack": b"\x91" * 100_000 + b"\x90"}, "msgpack"),
    "deep format": ({b"id": b"x", b"json": b'{"prompt":"hi","response_format":{"a":' + deep(100) + b"}}"}, "response_format"),
    "truncated msgpack": ({b"id": b"x", b"msgpack": b"\x81\xa6prompt"}, "msgpack"),
    "bytes after msgpack": ({b"id": b"x", b"msgpack": msgpack.packb({"prompt": "hi"}) + b"\xc0"}, "msgpack"),
    "extension type": ({b"id": b"x", b"msgpack": msgpack.packb({"prompt": msgpack.ExtType(5, b"x")})}, "msgpack"),
    "timestamp": ({b"id": b"x", b"msgpack": msgpack.packb({"prompt": msgpack.Timestamp(1)})}, "msgpack"),
    "integer keys": ({b"id": b"x", b"msgpack": msgpack.packb({"prompt": "hi", "logit_bias": {5: 1.0}})}, "msgpack"),
    "binary prompt": ({b"id": b"x", b"msgpack": msgpack.packb({"prompt": b"hi"})}, "prompt"),
    "msgpack string that is not UTF-8": ({b"id": b"x", b"msgpack": b"\x81\xa6prompt\xa1\xff"}, "msgpack"),
    "lone surrogate": ({b"id": b"x", b"json": b'{"prompt":"\\ud800"}'}, "prompt"),
    "NUL": ({b"id": b"x", b"json": b'{"prompt":"a\\u0000"}'}, "prompt"),
    "empty prompt": ({b"id": b"x", b"json": b'{"prompt":""}'}, "prompt"),
    "no prompt": ({b"id": b"x", b"json": b"{}"}, "prompt"),
    "two prompts": ({b"id": b"x", b"json": b'{"prompt":"hi","prompt_token_ids":[1]}'}, "prompt"),
    "max_tokens 0": ({b"id": b"x", b"json": b'{"prompt":"hi","max_tokens":0}'}, "max_tokens"),
    "huge max_tokens": ({b"id": b"x", b"json": b'{"prompt":"hi","max_tokens":1000001}'}, "max_tokens"),
    "token id that is a boolean": ({b"id": b"x", b"json": b'{"prompt_token_ids":[1,true]}'}, "prompt_token_ids[1]"),
    "surrogate beside the content": (
        {b"id": b"x", b"json": b'{"messages":[{"role":"user","content":"hi","name":"\\udc00"}]}'},
        "messages[0]",
    ),
    "oversized body": ({b"id": b"x", b"json": b'{"prompt":"' + b"a" * wire.MAX_BODY_BYTES + b'"}'}, "json"),
    "oversized prompt": ({b"id": b"x", b"json": b'{"prompt":"' + b"a" * (wire.MAX_PROMPT_BYTES + 1) + b'"}'}, "prompt"),
}


@pytest.mark.parametrize("name", BAD_ENTRIES)
def test_bad_entry_is_refused_and_the_field_named(name: str) -> None:
    entry, field = BAD_ENTRIES[name]
    with pytest.raises(InvalidRequest) as refused:
        codec.decode_request(entry, "realtime")
    assert refused.value.field == field
    assert field in refused.value.message


def test_unknown_fields_and_nulls_are_ignored() -> None:
    entry = {b"id": b"x", b"colour": b"red", b"json": b'{"prompt":"hi","colour":"red","top_p":null,"messages":null}'}
    assert codec.decode_request(entry, "batch") == GenerateRequest(id="x", tier="batch", prompt="hi")


def test_bare_request_needs_only_id_and_body() -> None:
    request = codec.decode_request({b"id": b"x1", b"json": b'{"prompt":"Hi","max_tokens":8}'}, "realtime")
    assert request == GenerateRequest(id="x1", prompt="Hi", params=SamplingParams(max_tokens=8))


def test_request_too_large_to_send_is_refused_before_sending() -> None:
    messages = [{"role": "user", "content": "a" * (wire.MAX_PROMPT_BYTES - 1)}] * 3
    with pytest.raises(InvalidRequest) as refused:
        codec.encode_request(GenerateRequest(id="x", messages=messages))
    assert refused.value.field == "body"


@pytest.mark.parametrize(
    ("entry", "encoding"),
    [({b"msgpack": b""}, "msgpack"), ({b"json": b""}, "json"), ({}, "json"), ({b"json": b"", b"msgpack": b""}, "json")],
)
def test_reply_encoding_follows_the_request(entry: dict[bytes, bytes], encoding: str) -> None:
    assert codec.encoding_of(entry) == encoding


def test_request_id_of_invalid_entry_is_found_where_usable() -> None:
    assert codec.request_id_of({b"id": b"x1"}) == "x1"
    assert codec.request_id_of({b"id": b"../x"}) is None
    assert codec.request_id_of({}) is None


def test_minus_infinity_becomes_a_number_that_json_has() -> None:
    chunk = Chunk("a", [1], logprobs=[TokenLogprob(1, -math.inf, {2: -math.inf})])
    body = json.loads(codec.encode_body(codec.encode_chunk(chunk), "json"))
    assert body["logprobs"] == [{"token_id": 1, "logprob": codec.MIN_LOGPROB, "top": {"2": codec.MIN_LOGPROB}}]


def test_error_keeps_what_had_been_generated() -> None:
    error = DeadlineExceeded("late", partial_text="Once", partial_token_ids=[1, 2])
    again = codec.decode_error(Frame("error", codec.encode_error(error)), "x1")
    assert type(again) is DeadlineExceeded
    assert (again.message, again.partial_text, again.partial_token_ids, again.request_id) == ("late", "Once", [1, 2], "x1")


LONG_TEXT, LONG_IDS = "word " * 900_000, [150_000] * 1000
LONG_CHOICE = Choice(0, LONG_TEXT, LONG_IDS, "length", logprobs=[TokenLogprob(7, -0.5, {7: -0.5, 8: -1.5})] * 1000)
LARGE: dict[str, tuple[Any, Any, Any]] = {
    "tokens": (Chunk(LONG_TEXT, LONG_IDS), codec.encode_chunk, codec.decode_chunk),
    "final": (Result(id="x", choices=[LONG_CHOICE, replace(LONG_CHOICE, index=1)]), codec.encode_result, codec.decode_result),
    "error": (DeadlineExceeded("late", partial_text=LONG_TEXT, partial_token_ids=LONG_IDS), codec.encode_error, codec.decode_error),
}


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("kind", LARGE)
def test_whatever_a_worker_can_write_can_be_read(kind: Any, encoding: Encoding) -> None:
    value, encode, decode = LARGE[kind]
    entry = as_bytes(codec.encode_frame(Frame(kind, encode(value)), encoding))
    assert len(entry[encoding.encode()]) > wire.MAX_BODY_BYTES
    again = decode(codec.decode_frame(entry))
    if kind == "error":
        assert (again.partial_text, again.partial_token_ids) == (LONG_TEXT, LONG_IDS)
    else:
        assert again == value


def test_unknown_error_code_becomes_the_base_error() -> None:
    error = codec.decode_error(Frame("error", {"code": "NEW_IN_V2", "message": "hm", "retryable": True}))
    assert type(error) is HeadraceError
    assert (error.code, error.retryable) == ("NEW_IN_V2", True)


def test_maps_that_are_no_dict_are_sent() -> None:
    from types import MappingProxyType

    request = GenerateRequest(id="x", messages=[MappingProxyType({"role": "user", "content": "hi"})])
    for encoding in ENCODINGS:
        decoded = codec.decode_request(as_bytes(codec.encode_request(request, encoding)), "realtime")
        assert decoded.messages == [{"role": "user", "content": "hi"}]


def test_depth_limit_is_exact() -> None:
    tree: Any = "leaf"
    for _ in range(validate.MAX_DEPTH - 1):
        tree = [tree]
    validate.tree("f", tree, 100)
    with pytest.raises(InvalidRequest):
        validate.tree("f", [tree], 100)
