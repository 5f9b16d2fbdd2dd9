"""What a caller may specify for a request, and the `GenerateRequest` made of it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypedDict

from producer import validate
from producer.errors import InvalidRequest
from producer.keys import Tier
from producer.sampling import FIELD_NAMES, SamplingParams
from producer.wire import GenerateRequest, Kind

MAX_DEADLINE_S = 10 * 365 * 86400.0


class CommonOptions(TypedDict, total=False):
    """Keywords of every submitting call. The sampling ones are the fields of `SamplingParams`; ``params`` sets them all at once.

    Attributes:
        messages: chat messages (``role``, ``content``), instead of a prompt; the model's chat template is applied.
        prompt_token_ids: the prompt as token ids, instead of text.
        tier: ``realtime`` (default) or ``batch``.
        id: 1-128 characters of ``[A-Za-z0-9._-]``; None makes a UUIDv7. A known id is not run again.
        deadline_s: seconds from now, on Redis's clock, after which the request fails with `DeadlineExceeded`.
        source, user, task: the caller's own labels.
        stream: have one frame per step published from the first step on; `Handle.stream` asks for that if it was not set. Refused
            with ``n`` > 1, whose outputs come with the final reply only.
        durable: return only when the request is on Redis's disk (WAITAOF; Redis 7.2 with ``appendonly yes``).
            A request that is not on disk in time is cancelled, and its id is used up.
    """

    messages: Sequence[Mapping[str, Any]] | None
    prompt_token_ids: Sequence[int] | None
    tier: Tier
    id: str | None
    deadline_s: float | None
    source: str
    user: str
    task: str
    stream: bool
    durable: bool
    params: SamplingParams | None
    max_tokens: int | None
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    logprobs: int | None
    ignore_eos: bool
    n: int
    response_format: Mapping[str, Any] | None


class RequestOptions(CommonOptions, total=False):
    """Keywords of `Client.submit`.

    Attributes:
        kind: ``generate`` (default), ``score`` (with ``continuations``) or ``embed``.
    """

    kind: Kind
    continuations: Sequence[str] | None


class BatchItem(RequestOptions, total=False):
    """One item of `Client.submit_many`."""

    prompt: str | None


@dataclass(frozen=True, slots=True)
class Wanted:
    """A checked request, and what accompanies it.

    Attributes:
        generated_id: the id was made for this request, so whatever Redis has under it is this request.
    """

    request: GenerateRequest
    deadline_s: float | None
    durable: bool
    generated_id: bool


_REQUEST_FIELDS = frozenset(f.name for f in fields(GenerateRequest)) - {"params", "enqueued_ms", "deadline_ms"}


def build(prompt: str | None, options: Mapping[str, Any]) -> Wanted:
    """Check everything that can be checked without the model.

    Raises:
        InvalidRequest: a value is wrong, or a keyword unknown; ``field`` names it.
    """
    given = {name: value for name, value in options.items() if value is not None}
    deadline_s = given.pop("deadline_s", None)
    if deadline_s is not None and validate.number("deadline_s", deadline_s, 0.0, MAX_DEADLINE_S) == 0.0:
        raise validate.invalid("deadline_s", "greater than 0")
    durable = validate.boolean("durable", given.pop("durable", False))
    request_fields = {name: given.pop(name) for name in _REQUEST_FIELDS & given.keys()}
    generated_id = "id" not in request_fields
    if generated_id:
        request_fields["id"] = new_id()
    request = GenerateRequest(prompt=prompt, params=_params(given), **request_fields)
    return Wanted(request, deadline_s, durable, generated_id)


def build_many(items: Sequence[str | Mapping[str, Any]]) -> list[Wanted]:
    """`build` for each; an error's ``field`` begins with the item's number, as in ``[3].top_p``."""
    wanted = []
    for i, item in enumerate(items):
        try:
            options = {"prompt": item} if isinstance(item, str) else dict(item)
            wanted.append(build(options.pop("prompt", None), options))
        except InvalidRequest as error:
            raise InvalidRequest(f"[{i}].{error.message}", field=f"[{i}].{error.field}") from None
    return wanted


def new_id() -> str:
    """A UUID of version 7 (RFC 9562, section 5.7): 48 bits of Unix milliseconds, then random bits; sorts by age."""
    value = time.time_ns() // 1_000_000 << 80 | int.from_bytes(os.urandom(10))
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    digits = f"{value:032x}"
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def _params(given: dict[str, Any]) -> SamplingParams:
    params = given.pop("params", None)
    if params is None:
        return SamplingParams.from_keywords(given)
    if not isinstance(params, SamplingParams):
        raise validate.invalid("params", f"SamplingParams, not {type(params).__name__}")
    if given:
        name = min(given)
        raise InvalidRequest(f"{name} is {'given beside params' if name in FIELD_NAMES else 'an unknown parameter'}", field=name)
    return params
