"""The messages: `GenerateRequest` in, `Frame`s and a `Result` out. `codec` turns them into bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from producer import validate
from producer.keys import Tier, check_name, check_tier
from producer.sampling import SamplingParams

PROTOCOL_VERSION = 1
MAX_BODY_BYTES = 4 * 1024 * 1024
MAX_PROMPT_BYTES = 2 * 1024 * 1024
MAX_PROMPT_TOKENS = 1_000_000
MAX_MESSAGES = 1024
MAX_LABEL_BYTES = 256
MAX_CONTINUATIONS = 256

Kind = Literal["generate", "score", "embed"]
KINDS: tuple[Kind, ...] = ("generate", "score", "embed")
Encoding = Literal["msgpack", "json"]
FinishReason = Literal["stop", "length"]
FrameType = Literal["tokens", "final", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One request as it is on a stream. Exactly one of ``prompt``, ``messages``, ``prompt_token_ids`` is given.

    Attributes:
        id: the producer's id, 1-128 characters of ``[A-Za-z0-9._-]``.
        tier: the stream it is put on.
        kind: ``generate`` text, ``score`` continuations, or ``embed`` the prompt.
        stream: publish one frame per step; otherwise tokens are only checkpointed now and then. Only for a single text.
        continuations: with ``score``, the texts whose log-probability after the prompt is wanted.
        enqueued_ms, deadline_ms: absolute, Redis ``TIME`` in milliseconds.
        source, user, task: the caller's labels, for routing, fairness and logs.
    """

    id: str
    tier: Tier = "realtime"
    prompt: str | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    prompt_token_ids: Sequence[int] | None = None
    params: SamplingParams = field(default_factory=SamplingParams)
    kind: Kind = "generate"
    stream: bool = False
    continuations: Sequence[str] | None = None
    enqueued_ms: int | None = None
    deadline_ms: int | None = None
    source: str = ""
    user: str = ""
    task: str = ""

    def __post_init__(self) -> None:
        check_name("id", self.id)
        check_tier(self.tier)
        if self.kind not in KINDS:
            raise validate.invalid("kind", f"one of {', '.join(KINDS)}")
        _check_prompt(self)
        _check_continuations(self)
        _check_outputs(self)
        for name in ("enqueued_ms", "deadline_ms"):
            value = getattr(self, name)
            if value is not None:
                validate.integer(name, value, 0)
        for name in ("source", "user", "task"):
            validate.text(name, getattr(self, name), MAX_LABEL_BYTES, allow_empty=True)


def _check_prompt(request: GenerateRequest) -> None:
    given = [name for name in ("prompt", "messages", "prompt_token_ids") if getattr(request, name) is not None]
    if len(given) != 1:
        what = f"got {' and '.join(given)}" if given else "got none"
        raise validate.invalid("prompt", f"given as exactly one of prompt, messages, prompt_token_ids ({what})")
    if request.prompt is not None:
        validate.text("prompt", request.prompt, MAX_PROMPT_BYTES)
    elif request.prompt_token_ids is not None:
        validate.token_ids("prompt_token_ids", request.prompt_token_ids, MAX_PROMPT_TOKENS)
        if not request.prompt_token_ids:
            raise validate.invalid("prompt_token_ids", "a non-empty list")
    else:
        _check_messages(request.messages)


def _check_messages(messages: object) -> None:
    items = validate.sequence("messages", messages, MAX_MESSAGES)
    if not items:
        raise validate.invalid("messages", "a non-empty list")
    for i, message in enumerate(items):
        if not isinstance(message, Mapping):
            raise validate.invalid(f"messages[{i}]", f"an object, not {type(message).__name__}")
        validate.text(f"messages[{i}].role", message.get("role"), 64)
        validate.text(f"messages[{i}].content", message.get("content"), MAX_PROMPT_BYTES, allow_empty=True)
        validate.tree(f"messages[{i}]", message, MAX_PROMPT_BYTES)


def _check_continuations(request: GenerateRequest) -> None:
    if request.kind != "score":
        if request.continuations is not None:
            raise validate.invalid("continuations", "absent unless kind is score")
        return
    items = validate.sequence("continuations", request.continuations, MAX_CONTINUATIONS)
    if not items:
        raise validate.invalid("continuations", "a non-empty list")
    for i, item in enumerate(items):
        validate.text(f"continuations[{i}]", item, MAX_PROMPT_BYTES)


def _check_outputs(request: GenerateRequest) -> None:
    if request.kind != "generate" and request.params.n != 1:
        raise validate.invalid("n", "1 unless kind is generate")
    if validate.boolean("stream", request.stream) and (request.kind != "generate" or request.params.n != 1):
        raise validate.invalid("stream", "false unless there is one output of text (kind generate, n 1)")


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Timings:
    """Where a request's time went, in milliseconds.

    ``queue_ms`` ends at its first step, ``ttft_ms`` (from enqueueing) at the first token, ``total_ms`` at the last.
    """

    queue_ms: float = 0.0
    ttft_ms: float = 0.0
    total_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The chosen token's log-probability, and those of the likeliest tokens (``top``: token id -> log-probability)."""

    token_id: int
    logprob: float
    top: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a streamed answer; ``text`` may lag behind ``token_ids`` while a character or stop string is incomplete."""

    text: str
    token_ids: list[int]
    index: int = 0
    attempt: int = 1
    logprobs: list[TokenLogprob] | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the ``n`` outputs of a request with ``n`` > 1."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprob] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The final reply of a request that succeeded.

    Attributes:
        stop_reason: the stop string or stop token id that ended it; None for EOS or length.
        attempt: which attempt produced it, from 1.
        choices: the outputs when ``n`` > 1, the first of them also in ``text`` and ``token_ids``.
        scores: with kind ``score``, the summed log-probability of each continuation.
        embedding: with kind ``embed``, the pooled hidden state.
    """

    id: str
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason = "stop"
    stop_reason: str | int | None = None
    usage: Usage = Usage()
    timings: Timings = Timings()
    attempt: int = 1
    worker: str = ""
    model: str = ""
    logprobs: list[TokenLogprob] | None = None
    choices: list[Choice] | None = None
    scores: list[float] | None = None
    embedding: list[float] | None = None


@dataclass(frozen=True, slots=True)
class Frame:
    """One entry of a reply stream: a `Chunk` of tokens, the final `Result`, or an error's map (``code``, ``message``, …)."""

    type: FrameType
    body: Mapping[str, Any]
    attempt: int = 1
