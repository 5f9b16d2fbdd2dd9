"""Wire types to Redis stream entries and back, in msgpack or JSON.

An entry has plain fields and one body field whose name is its encoding. Bodies are plain maps,
lists, strings, numbers, booleans and nulls: no msgpack extension types, no binary strings, string
keys only. Whatever bytes come in, decoding a request raises only `InvalidRequest`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields as dataclass_fields
from typing import Any, NoReturn

import msgpack  # type: ignore[import-untyped]  # it ships no annotations

from producer import validate
from producer.errors import HeadraceError, InternalError, InvalidRequest, error_from_code
from producer.keys import Tier, check_name
from producer.sampling import SamplingParams
from producer.wire import (
    MAX_BODY_BYTES,
    MAX_LABEL_BYTES,
    PROTOCOL_VERSION,
    Choice,
    Chunk,
    Encoding,
    Frame,
    GenerateRequest,
    Result,
    Timings,
    TokenLogprob,
    Usage,
)

ENCODINGS: tuple[Encoding, ...] = ("msgpack", "json")
_SURROGATES = "backslashreplace"  # how one is encoded: as \ud800
MIN_LOGPROB = -9999.0  # stands for minus infinity, which JSON does not have; the value is OpenAI's

Fields = dict[str, str | bytes | int]
_PROMPT_FIELDS = ("prompt", "messages", "prompt_token_ids", "continuations")


def encode_request(request: GenerateRequest, encoding: Encoding = "msgpack") -> Fields:
    """The stream entry of ``request``; plain fields without a value are left out."""
    plain: dict[str, str | int | None] = {
        "id": request.id,
        "v": PROTOCOL_VERSION,
        "enqueued_ms": request.enqueued_ms,
        "deadline_ms": request.deadline_ms,
        "source": request.source,
        "user": request.user,
        "task": request.task,
    }
    entry: Fields = {name: value for name, value in plain.items() if value is not None and value != ""}
    body = encode_body(_request_body(request), encoding)
    if len(body) > MAX_BODY_BYTES:
        raise validate.invalid("body", f"at most {MAX_BODY_BYTES} bytes (got {len(body)})")
    entry[encoding] = body
    return entry


def decode_request(entry: Mapping[bytes, bytes], tier: Tier) -> GenerateRequest:
    """The request in a stream entry of ``tier``.

    Raises:
        InvalidRequest: anything is wrong with it; ``field`` names the culprit.
    """
    version = _plain_integer(entry, b"v")
    if version not in (None, PROTOCOL_VERSION):
        raise validate.invalid("v", f"{PROTOCOL_VERSION}, the only supported protocol version (got {version})")
    request_id = check_name("id", _plain_text(entry, b"id", 128) or None)
    body = _decode_request_body(entry)
    return GenerateRequest(
        id=request_id,
        tier=tier,
        params=SamplingParams.from_wire(body),
        enqueued_ms=_plain_integer(entry, b"enqueued_ms"),
        deadline_ms=_plain_integer(entry, b"deadline_ms"),
        source=_plain_text(entry, b"source", MAX_LABEL_BYTES),
        user=_plain_text(entry, b"user", MAX_LABEL_BYTES),
        task=_plain_text(entry, b"task", MAX_LABEL_BYTES),
        **{name: body[name] for name in (*_PROMPT_FIELDS, "kind", "stream") if body.get(name) is not None},
    )


def request_id_of(entry: Mapping[bytes, bytes]) -> str | None:
    """The id of an entry that may be otherwise invalid; None if no reply key can be made of it."""
    try:
        return check_name("id", _plain_text(entry, b"id", 128))
    except InvalidRequest:
        return None


def encoding_of(entry: Mapping[bytes, bytes]) -> Encoding:
    """The encoding to reply in: that of the one body, or JSON if the body is missing or ambiguous."""
    return "msgpack" if b"msgpack" in entry and b"json" not in entry else "json"


def encode_body(body: Mapping[str, Any], encoding: Encoding) -> bytes:
    """``body`` as bytes. Deterministic: map order is kept, and numbers take their shortest form.

    A value that is not of a plain type can only be a map: everything else was refused when the request was made. A lone surrogate,
    which JSON can name and UTF-8 cannot carry, becomes its JSON escape (in msgpack, the text of that escape).
    """
    if encoding == "msgpack":
        packed = msgpack.packb(body, use_bin_type=True, default=dict, unicode_errors=_SURROGATES)
        assert isinstance(packed, bytes)
        return packed
    text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=dict)
    return text.encode(errors=_SURROGATES)


def decode_body(body: bytes, encoding: Encoding) -> dict[str, Any]:
    """The map in ``body``.

    Raises:
        InvalidRequest: it is no such map; the field is the encoding's name.
    """
    parse = _parse_msgpack if encoding == "msgpack" else _parse_json
    try:
        value = parse(body)
    except (RecursionError, msgpack.StackError):
        raise validate.invalid(encoding, "less deeply nested") from None
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException):  # UnicodeError and JSONDecodeError are ValueErrors
        raise validate.invalid(encoding, f"one {encoding} map with string keys and finite numbers") from None
    if not isinstance(value, dict):
        raise validate.invalid(encoding, f"a map, not {type(value).__name__}")
    return value


def encode_frame(frame: Frame, encoding: Encoding) -> Fields:
    """The reply-stream entry of ``frame``."""
    return {"type": frame.type, "attempt": frame.attempt, encoding: encode_body(frame.body, encoding)}


def decode_frame(entry: Mapping[bytes, bytes]) -> Frame:
    """The frame in a reply-stream entry.

    Raises:
        InternalError: the entry is no frame of this protocol.
    """
    kind = entry.get(b"type")
    encoding = encoding_of(entry)
    try:
        body = decode_body(entry[encoding.encode()], encoding)
        attempt = _plain_integer(entry, b"attempt") or 1
    except (InvalidRequest, KeyError) as error:
        raise InternalError(f"malformed reply frame: {error}") from None
    for known in ("tokens", "final", "error"):
        if kind == known.encode():
            return Frame(type=known, body=body, attempt=attempt)
    raise InternalError("malformed reply frame: unknown type")


def encode_chunk(chunk: Chunk) -> dict[str, Any]:
    """The body of a ``tokens`` frame."""
    body: dict[str, Any] = {"index": chunk.index, "text": chunk.text, "token_ids": chunk.token_ids}
    if chunk.logprobs is not None:
        body["logprobs"] = _encode_logprobs(chunk.logprobs)
    return body


def decode_chunk(frame: Frame) -> Chunk:
    """The chunk in a ``tokens`` frame; raises `InternalError` if it is malformed."""
    with _Malformed():
        return Chunk(
            text=str(frame.body["text"]),
            token_ids=[int(token) for token in frame.body["token_ids"]],
            index=int(frame.body["index"]),
            attempt=frame.attempt,
            logprobs=_decode_logprobs(frame.body.get("logprobs")),
        )


def encode_result(result: Result) -> dict[str, Any]:
    """The body of a ``final`` frame; ``attempt`` is a plain field of the frame."""
    optional = {
        "stop_reason": result.stop_reason,
        "logprobs": _encode_logprobs(result.logprobs),
        "choices": [_encode_choice(choice) for choice in result.choices] if result.choices is not None else None,
        "scores": [_finite_logprob(score) for score in result.scores] if result.scores is not None else None,
        "embedding": result.embedding,
    }
    return {
        "id": result.id,
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "usage": _as_map(result.usage),
        "timings": _as_map(result.timings),
        "worker": result.worker,
        "model": result.model,
        **{name: value for name, value in optional.items() if value is not None},
    }


def decode_result(frame: Frame) -> Result:
    """The result in a ``final`` frame; raises `InternalError` if it is malformed."""
    body = frame.body
    with _Malformed():
        return Result(
            id=str(body["id"]),
            text=str(body["text"]),
            token_ids=[int(token) for token in body["token_ids"]],
            finish_reason=body["finish_reason"],
            stop_reason=body.get("stop_reason"),
            usage=_usage(body.get("usage", {})),
            timings=_timings(body.get("timings", {})),
            attempt=frame.attempt,
            worker=str(body.get("worker", "")),
            model=str(body.get("model", "")),
            logprobs=_decode_logprobs(body.get("logprobs")),
            choices=[_decode_choice(choice) for choice in body["choices"]] if body.get("choices") is not None else None,
            scores=body.get("scores"),
            embedding=body.get("embedding"),
        )


def encode_error(error: HeadraceError) -> dict[str, Any]:
    """The body of an ``error`` frame."""
    body: dict[str, Any] = {"code": error.code, "message": error.message, "retryable": error.retryable}
    if error.field is not None:
        body["field"] = error.field
    if error.partial_token_ids or error.partial_text:
        body["partial_text"] = error.partial_text
        body["partial_token_ids"] = error.partial_token_ids
    return body


def decode_error(frame: Frame, request_id: str | None = None) -> HeadraceError:
    """The error in an ``error`` frame, ready to be raised; an unknown code becomes `HeadraceError` itself."""
    body = frame.body
    with _Malformed():
        return error_from_code(
            str(body.get("code", "INTERNAL")),
            str(body.get("message", "")),
            retryable=body.get("retryable") is True,
            request_id=request_id,
            field=body.get("field"),
            partial_text=str(body.get("partial_text", "")),
            partial_token_ids=[int(token) for token in body.get("partial_token_ids", ())],
        )


class _Malformed:
    """Turns the exceptions from a body of the wrong shape into `InternalError`."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, KeyError | TypeError | ValueError | AttributeError) and not isinstance(error, HeadraceError):
            raise InternalError(f"malformed reply frame ({type(error).__name__})") from None


def _request_body(request: GenerateRequest) -> dict[str, Any]:
    body = {name: getattr(request, name) for name in _PROMPT_FIELDS if getattr(request, name) is not None}
    if request.kind != "generate":
        body["kind"] = request.kind
    if request.stream:
        body["stream"] = True
    return body | request.params.to_wire()


def _decode_request_body(entry: Mapping[bytes, bytes]) -> dict[str, Any]:
    present = [encoding for encoding in ENCODINGS if encoding.encode() in entry]
    if len(present) != 1:
        raise validate.invalid("body", f"exactly one of the fields msgpack and json (got {'both' if present else 'neither'})")
    encoding = present[0]
    body = entry[encoding.encode()]
    if len(body) > MAX_BODY_BYTES:  # a reply's body has no such limit: the request's own limits bound it
        raise validate.invalid(encoding, f"at most {MAX_BODY_BYTES} bytes (got {len(body)})")
    return decode_body(body, encoding)


def _plain_text(entry: Mapping[bytes, bytes], name: bytes, max_bytes: int) -> str:
    value = entry.get(name, b"")
    try:
        return validate.text(name.decode(), value.decode(), max_bytes, allow_empty=True)
    except UnicodeDecodeError:
        raise validate.invalid(name.decode(), "valid UTF-8") from None


def _plain_integer(entry: Mapping[bytes, bytes], name: bytes) -> int | None:
    value = entry.get(name)
    if value is None:
        return None
    if not (value.isdigit() and len(value) <= 19):
        raise validate.invalid(name.decode(), "a decimal integer of at most 19 digits")
    return validate.integer(name.decode(), int(value))


def _parse_json(body: bytes) -> object:
    return json.loads(body.decode(), parse_constant=_refuse)


def _parse_msgpack(body: bytes) -> object:
    return msgpack.unpackb(body, raw=False, strict_map_key=True, max_ext_len=0, ext_hook=_refuse_extension)


def _refuse(_: str) -> NoReturn:
    raise ValueError


def _refuse_extension(_code: int, _data: bytes) -> NoReturn:
    raise ValueError


def _usage(body: Mapping[str, Any]) -> Usage:
    return Usage(**{f.name: int(body[f.name]) for f in dataclass_fields(Usage) if f.name in body})


def _timings(body: Mapping[str, Any]) -> Timings:
    return Timings(**{f.name: float(body[f.name]) for f in dataclass_fields(Timings) if f.name in body})


def _as_map(value: Usage | Timings) -> dict[str, Any]:
    return {f.name: getattr(value, f.name) for f in dataclass_fields(value)}


def _finite_logprob(value: float) -> float:
    return max(MIN_LOGPROB, value)


def _encode_logprobs(logprobs: list[TokenLogprob] | None) -> list[dict[str, Any]] | None:
    if logprobs is None:
        return None
    return [
        {
            "token_id": item.token_id,
            "logprob": _finite_logprob(item.logprob),
            "top": {str(token): _finite_logprob(value) for token, value in item.top.items()},
        }
        for item in logprobs
    ]


def _decode_logprobs(items: list[dict[str, Any]] | None) -> list[TokenLogprob] | None:
    if items is None:
        return None
    return [
        TokenLogprob(item["token_id"], item["logprob"], {int(token): value for token, value in item.get("top", {}).items()})
        for item in items
    ]


def _encode_choice(choice: Choice) -> dict[str, Any]:
    body = {name: getattr(choice, name) for name in ("index", "text", "token_ids", "finish_reason", "stop_reason")}
    if choice.logprobs is not None:
        body["logprobs"] = _encode_logprobs(choice.logprobs)
    return body


def _decode_choice(body: Mapping[str, Any]) -> Choice:
    return Choice(
        index=body["index"],
        text=body["text"],
        token_ids=body["token_ids"],
        finish_reason=body["finish_reason"],
        stop_reason=body.get("stop_reason"),
        logprobs=_decode_logprobs(body.get("logprobs")),
    )
