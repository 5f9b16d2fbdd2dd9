"""``limits``: every documented limit answers fast with a typed error that says what is wrong."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from secrets import token_hex
from typing import Any

from producer import sampling, wire
from producer.client import Client
from producer.errors import HeadraceError
from producer.keys import TIERS
from producer.load.callers import SOURCE
from producer.load.report import Cell, Check, Panel, Report, Series
from producer.options import MAX_DEADLINE_S, new_id

_ANSWER_S = 60.0  # how long to wait for a worker's answer, whatever the goal
_WAIT_S = 0.05
_MESSAGE_LENGTH = range(10, 300)

Act = Callable[[Client], object]


@dataclass(frozen=True, slots=True)
class Case:
    """What is done, and the code that must answer it.

    Attributes:
        field: what the message must name.
    """

    name: str
    code: str
    field: str
    act: Act


@dataclass(frozen=True, slots=True)
class Answer:
    """``code`` is '' if there was no error."""

    case: Case
    code: str
    message: str
    seconds: float

    def check(self, goal_ms: float) -> Check:
        ms = 1000 * self.seconds
        readable = len(self.message) in _MESSAGE_LENGTH and "\n" not in self.message and self.case.field in self.message
        ok = self.code == self.case.code and readable and ms <= goal_ms
        return Check(self.case.name, ok, f"{self.code or 'no error'} in {ms:.0f} ms: {self.message}")


def _refused(name: str, field: str, **options: Any) -> Case:
    """Refused by the client, before anything is sent."""
    return Case(name, "INVALID_REQUEST", field, lambda client: client.submit(**{"prompt": "hi", **options}))


def _answered(name: str, code: str, field: str, **options: Any) -> Case:
    """Refused by the worker."""
    given = {"prompt": "hi", "source": SOURCE, **options}
    return Case(name, code, field, lambda client: client.submit_and_wait(timeout=_ANSWER_S, **given))


def _raw(name: str, field: str, **entry: str) -> Case:
    """Put on the stream without a client, and refused by the worker."""

    def act(client: Client) -> object:
        request_id = new_id()
        fields: dict[Any, Any] = {"id": request_id, **entry}
        client.redis.xadd(client.keys.stream("realtime"), fields)
        deadline_at_s = time.monotonic() + _ANSWER_S
        while (handle := client.get(request_id)).status() == "unknown" and time.monotonic() < deadline_at_s:
            time.sleep(0.01)
        return handle.result(_ANSWER_S)

    return Case(name, "INVALID_REQUEST", field, act)


def _full(client: Client) -> object:
    client.redis.hset(client.keys.limits, "max_depth:realtime", "1")
    client.submit("hi")
    return client.submit("hi")


_MESSAGE = {"role": "user", "content": "hi"}
CASES: tuple[Case, ...] = (
    _refused("empty prompt", "prompt", prompt=""),
    _refused("prompt of more than 2 MiB", "prompt", prompt="a" * (wire.MAX_PROMPT_BYTES + 1)),
    _refused("more than 1,024 messages", "messages", prompt=None, messages=[_MESSAGE] * (wire.MAX_MESSAGES + 1)),
    _refused("prompt and messages", "prompt", messages=[_MESSAGE]),
    _refused("malformed id", "id", id="a:b"),
    _refused("label of more than 256 bytes", "user", user="u" * (wire.MAX_LABEL_BYTES + 1)),
    _refused("unknown tier", "tier", tier="express"),
    _refused("unknown parameter", "frobnicate", frobnicate=1),
    _refused("max_tokens 0", "max_tokens", max_tokens=0),
    _refused("max_tokens of more than 1,000,000", "max_tokens", max_tokens=sampling.MAX_TOKENS + 1),
    _refused("temperature below 0", "temperature", temperature=-0.1),
    _refused("top_p above 1", "top_p", top_p=1.1),
    _refused("more than 16 stop strings", "stop", stop=["x"] * (sampling.MAX_STOP_STRINGS + 1)),
    _refused("more than 1,024 biases", "logit_bias", logit_bias=dict.fromkeys(range(sampling.MAX_LOGIT_BIAS + 1), 0.0)),
    _refused("more than 20 log-probabilities", "logprobs", logprobs=sampling.MAX_LOGPROBS + 1),
    _refused("more than 16 outputs", "n", n=sampling.MAX_N + 1),
    _refused("deadline beyond ten years", "deadline_s", deadline_s=2 * MAX_DEADLINE_S),
    Case("unknown request", "UNKNOWN_REQUEST", "id", lambda client: client.get(new_id()).result(_ANSWER_S)),
    _answered("output longer than the context", "CONTEXT_LENGTH_EXCEEDED", "max_tokens", max_tokens=sampling.MAX_TOKENS),
    _answered("prompt longer than the context", "CONTEXT_LENGTH_EXCEEDED", "", prompt=None, prompt_token_ids=[1] * wire.MAX_PROMPT_TOKENS),
    _answered("deadline that has passed", "DEADLINE_EXCEEDED", "deadline", deadline_s=0.001),
    _raw("body that is no JSON", "json", json='{"prompt":'),
    _raw("body of more than 4 MiB", "json", json='{"prompt":"' + "a" * wire.MAX_BODY_BYTES + '"}'),
    _raw("unknown protocol version", "v", v="99", json='{"prompt":"hi"}'),
)
ON_A_QUEUE_OF_ITS_OWN: tuple[Case, ...] = (
    Case("queue that is full", "QUEUE_FULL", "limit", _full),
    Case("caller that runs out of time", "WAIT_TIMEOUT", "s", lambda client: client.submit_and_wait("hi", tier="batch", timeout=_WAIT_S)),
)


def limits(client: Client, url: str, *, goal_ms: float) -> Report:
    """Run all cases; those that need a queue without workers get their own, which is removed at the end."""
    answers = [_run(case, client) for case in CASES]
    with Client(url, f"{client.queue[:100]}-limits-{token_hex(4)}") as apart:
        try:
            answers += [_run(case, apart) for case in ON_A_QUEUE_OF_ITS_OWN]
        finally:
            _remove(apart)
    return _report(answers, goal_ms)


def _run(case: Case, client: Client) -> Answer:
    started_s = time.monotonic()
    try:
        case.act(client)
    except HeadraceError as error:
        return Answer(case, error.code, error.message, time.monotonic() - started_s)
    return Answer(case, "", "", time.monotonic() - started_s)


def _remove(client: Client) -> None:
    with suppress(HeadraceError):
        read: Any = client.redis.xrange
        ids = [fields[b"id"].decode() for tier in TIERS for _, fields in read(client.keys.stream(tier))]
        names = [name for request_id in ids for name in (client.keys.reply(request_id), client.keys.state(request_id))]
        client.redis.delete(client.keys.limits, client.keys.control, client.keys.admin, *map(client.keys.stream, TIERS), *names)


def _report(answers: Sequence[Answer], goal_ms: float) -> Report:
    rows: list[list[Cell]] = [[answer.case.name, answer.code or "no error", 1000 * answer.seconds, answer.message] for answer in answers]
    bars = Series("ms", [answer.case.name for answer in answers], [1000 * answer.seconds for answer in answers], "bars")
    panel = Panel("time to the error", "ms", "", [bars], marks={f"goal {goal_ms:g} ms": goal_ms}, x_scale="log")
    return Report(
        "limits",
        f"{len(answers)} requests beyond a limit",
        ("limit", "code", "ms", "message"),
        rows,
        [answer.check(goal_ms) for answer in answers],
        [panel],
    )
