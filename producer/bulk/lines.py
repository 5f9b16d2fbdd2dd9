"""The lines of a bulk file, in and out.

In: OpenAI's batch format (https://platform.openai.com/docs/guides/batch: ``custom_id``, ``url``, ``body``), an object with
`Client.submit`'s keywords, or a prompt alone (a JSON string; in a file that is not ``.jsonl``, the line itself). Out: OpenAI's
response lines for the first, and for the others a flat object.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from producer import validate
from producer.errors import HeadraceError, InvalidRequest
from producer.sampling import FIELD_NAMES
from producer.wire import Choice, Result, TokenLogprob, Usage

Form = Literal["chat", "completion", "embedding", "plain"]
MAX_LINE_BYTES = 8 * 1024 * 1024
_URLS: dict[str, Form] = {"/v1/chat/completions": "chat", "/v1/completions": "completion", "/v1/embeddings": "embedding"}
_RENAMED = {"max_completion_tokens": "max_tokens"}
_IGNORED = frozenset({"model", "store", "metadata", "service_tier", "parallel_tool_calls"})  # fields that do not change the answer
_KEYWORDS = frozenset({*FIELD_NAMES, "messages", "prompt_token_ids", "user", "deadline_s", "kind", "continuations"})


@dataclass(frozen=True, slots=True)
class Line:
    """One request of a bulk file.

    Attributes:
        number: of the line in the file, from 1.
        custom_id: the caller's own, returned with the answer.
        options: keywords of `Client.submit`, ``prompt`` among them.
    """

    number: int
    form: Form
    custom_id: str | None
    options: Mapping[str, Any]


def parse_line(number: int, text: str, *, is_json: bool) -> Line:
    """Read one line.

    Raises:
        InvalidRequest: the line is not a request; the message says why and holds none of its text.
    """
    if not is_json:
        return Line(number, "plain", None, {"prompt": text})
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidRequest("the line is not JSON") from None
    if isinstance(value, str):
        return Line(number, "plain", None, {"prompt": value})
    if not isinstance(value, dict):
        raise validate.invalid("line", f"an object or a string, not {type(value).__name__}")
    return _openai_line(number, value) if "body" in value else _plain_line(number, value)


def custom_id_of(text: str) -> str | None:
    """The ``custom_id`` of a line that may be otherwise wrong, so that its error can be matched to it."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    found = value.get("custom_id") if isinstance(value, dict) else None
    return found if isinstance(found, str) else None


def _plain_line(number: int, value: Mapping[str, Any]) -> Line:
    options = {name: item for name, item in value.items() if name != "custom_id" and item is not None}
    return Line(number, "plain", _custom_id(value), _checked(options))


def _openai_line(number: int, value: Mapping[str, Any]) -> Line:
    if not isinstance(value["body"], dict):
        raise validate.invalid("body", f"an object, not {type(value['body']).__name__}")
    body: dict[str, Any] = value["body"]
    form = _form(value.get("url"), body)
    options = {_RENAMED.get(name, name): item for name, item in body.items() if item is not None and name not in _IGNORED}
    if options.pop("stream", False):
        raise validate.invalid("stream", "absent in a batch")
    options.pop("stream_options", None)
    if form == "chat" or "top_logprobs" in options:
        _chat_logprobs(options)
    if form == "embedding":
        _embedding_options(options)
    if isinstance(options.get("prompt"), list):
        options["prompt_token_ids"] = options.pop("prompt")
    return Line(number, form, _custom_id(value), _checked(options))


def _form(url: object, body: Mapping[str, Any]) -> Form:
    if url is None:
        return "chat" if "messages" in body else "embedding" if "input" in body else "completion"
    if not isinstance(url, str) or url not in _URLS:
        raise validate.invalid("url", f"one of {', '.join(_URLS)}")
    return _URLS[url]


def _chat_logprobs(options: dict[str, Any]) -> None:
    """Chat completions write ``logprobs: true, top_logprobs: 5`` for what completions and we call ``logprobs: 5``."""
    wanted, top = options.pop("logprobs", False), options.pop("top_logprobs", 0)
    if validate.boolean("logprobs", wanted):
        options["logprobs"] = top


def _embedding_options(options: dict[str, Any]) -> None:
    """An embedding's ``input`` is a prompt, its token ids, or a list of one of these: a line is one request."""
    if options.pop("encoding_format", "float") != "float":
        raise validate.invalid("encoding_format", "float")
    given = options.pop("input", None)
    if isinstance(given, list) and len(given) == 1 and isinstance(given[0], str | list):
        [given] = given
    if not isinstance(given, str) and not (isinstance(given, list) and all(isinstance(item, int) for item in given)):
        raise validate.invalid("input", "one text, or the token ids of one")
    options |= {"prompt": given, "kind": "embed"}


def _custom_id(value: Mapping[str, Any]) -> str | None:
    custom_id = value.get("custom_id")
    return None if custom_id is None else validate.text("custom_id", custom_id, 512)


def _checked(options: dict[str, Any]) -> dict[str, Any]:
    unknown = sorted(options.keys() - _KEYWORDS - {"prompt"})
    if unknown:
        raise InvalidRequest(f"unknown parameter: {', '.join(unknown)}", field=unknown[0])
    return options


def answer(line: Line, request_id: str, result: Result) -> dict[str, Any]:
    """The output line of a request that succeeded."""
    if line.form == "plain":
        return _plain_answer(line, request_id, result)
    body = _embedding_body(result) if line.form == "embedding" else _body(line.form, request_id, result)
    response = {"status_code": 200, "request_id": request_id, "body": body}
    return {"id": request_id, "custom_id": line.custom_id, "response": response, "error": None}


def failure(number: int, custom_id: str | None, request_id: str, error: HeadraceError) -> dict[str, Any]:
    """The line in the errors file of a request that failed for good."""
    said = {"code": error.code, "message": error.message, "param": error.field}
    return {"id": request_id, "custom_id": custom_id, "line": number, "response": None, "error": said}


def usage_of(record: Mapping[str, Any]) -> Usage:
    """The token counts in an output line."""
    holder = record if record.get("response") is None else record["response"]["body"]
    usage = holder.get("usage") or {}
    return Usage(int(usage.get("prompt_tokens", 0)), int(usage.get("completion_tokens", 0)))


def _plain_answer(line: Line, request_id: str, result: Result) -> dict[str, Any]:
    said: dict[str, Any] = {"id": request_id, "line": line.number}
    if line.custom_id is not None:
        said["custom_id"] = line.custom_id
    said |= {"text": result.text, "finish_reason": result.finish_reason, "usage": _usage(result.usage), "model": result.model}
    optional = {
        "logprobs": [_logprob(item) for item in result.logprobs] if result.logprobs is not None else None,
        "choices": [choice.text for choice in result.choices] if result.choices is not None else None,
        "scores": result.scores,
        "embedding": result.embedding,
    }
    return said | {name: value for name, value in optional.items() if value is not None}


def _body(form: Form, request_id: str, result: Result) -> dict[str, Any]:
    first = Choice(0, result.text, result.token_ids, result.finish_reason, result.stop_reason, result.logprobs)
    make: Callable[[Choice], dict[str, Any]] = _chat_choice if form == "chat" else _completion_choice
    return {
        "id": request_id,
        "object": "chat.completion" if form == "chat" else "text_completion",
        "created": int(time.time()),
        "model": result.model,
        "choices": [make(choice) for choice in result.choices or [first]],
        "usage": _usage(result.usage),
    }


def _embedding_body(result: Result) -> dict[str, Any]:
    data = [{"object": "embedding", "index": 0, "embedding": result.embedding}]
    usage = {"prompt_tokens": result.usage.prompt_tokens, "total_tokens": result.usage.total_tokens}
    return {"object": "list", "data": data, "model": result.model, "usage": usage}


def _chat_choice(choice: Choice) -> dict[str, Any]:
    message = {"role": "assistant", "content": choice.text}
    return {"index": choice.index, "message": message, "finish_reason": choice.finish_reason, "logprobs": _logprobs(choice)}


def _completion_choice(choice: Choice) -> dict[str, Any]:
    return {"index": choice.index, "text": choice.text, "finish_reason": choice.finish_reason, "logprobs": _logprobs(choice)}


def _logprobs(choice: Choice) -> dict[str, Any] | None:
    return None if choice.logprobs is None else {"content": [_logprob(item) for item in choice.logprobs]}


def _logprob(item: TokenLogprob) -> dict[str, Any]:
    """Tokens are named by id: only the worker has the tokenizer that knows their text."""
    top = [{"token_id": token_id, "logprob": logprob} for token_id, logprob in item.top.items()]
    return {"token_id": item.token_id, "logprob": item.logprob, "top_logprobs": top}


def _usage(usage: Usage) -> dict[str, int]:
    return {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens, "total_tokens": usage.total_tokens}
