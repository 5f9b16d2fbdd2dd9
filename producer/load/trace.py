"""Record the lengths and times of a live queue's requests, without their text, and replay them.

A trace is a file of JSON lines in the form of the Mooncake traces (Qin et al., 2024): ``timestamp`` in milliseconds since
the first, ``input_length`` and ``output_length`` in tokens; ours also name the ``tier``. ``headrace bench`` reads them too.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from producer.aio import AsyncClient
from producer.errors import InvalidRequest
from producer.keys import Keys, Tier, check_tier
from producer.load.callers import Callers, LoadCall, Shape, answered, phase_figures
from producer.load.report import Panel, Report, Series, all_answered, distribution

_FIELDS = ("enqueued_ms", "prompt_tokens", "completion_tokens", "tier", "finished_ms")
_SCAN_COUNT = 1000
_FIGURES = ("requests", "requests_per_s", "output_tokens_per_s", "ttft_ms_p50", "ttft_ms_p95", "itl_ms_p50", "itl_ms_p95", "e2e_ms_p95")


@dataclass(frozen=True, slots=True, order=True)
class TraceRequest:
    """One request of a trace."""

    time_ms: int
    prompt_tokens: int
    output_tokens: int
    tier: Tier = "realtime"

    def to_json(self) -> str:
        said = {"timestamp": self.time_ms, "input_length": self.prompt_tokens, "output_length": self.output_tokens, "tier": self.tier}
        return json.dumps(said)

    @classmethod
    def from_json(cls, line: str) -> TraceRequest:
        """Raises ValueError, KeyError or TypeError if a line is not a request."""
        said = json.loads(line)
        time_ms, prompt_tokens, output_tokens = (int(said[name]) for name in ("timestamp", "input_length", "output_length"))
        return cls(time_ms, prompt_tokens, output_tokens, check_tier(said.get("tier", "realtime")))


@dataclass(frozen=True, slots=True)
class Recording:
    """Attributes: num_left_out: requests that came in time but have no lengths, being unfinished or not answered in full."""

    requests: Sequence[TraceRequest]
    num_left_out: int

    def write(self, path: Path) -> None:
        path.write_text("".join(request.to_json() + "\n" for request in self.requests))


def record(client: redis.Redis, keys: Keys, seconds: float, on_start: Callable[[], None]) -> Recording:
    """The requests that come in the next ``seconds`` and are answered in full by then, from their state hashes."""
    start_ms = _now_ms(client)
    on_start()
    time.sleep(seconds)
    found = {name: state for name, state in _states(client, keys) if int(state["enqueued_ms"] or 0) >= start_ms}
    states = list(found.values())
    whole = [state for state in states if state["prompt_tokens"] and state["completion_tokens"]]
    first_ms = min((int(state["enqueued_ms"]) for state in whole), default=0)
    requests = sorted(
        TraceRequest(
            int(state["enqueued_ms"]) - first_ms,
            int(state["prompt_tokens"]),
            int(state["completion_tokens"]),
            check_tier(state["tier"]),
        )
        for state in whole
    )
    return Recording(requests, len(states) - len(whole))


def _states(client: redis.Redis, keys: Keys) -> Iterator[tuple[bytes, dict[str, str]]]:
    """The states of all requests, by key; one may come twice, because SCAN may return it twice."""
    names: list[bytes] = []
    for name in client.scan_iter(match=keys.state("*"), count=_SCAN_COUNT):
        names.append(name)
        if len(names) == _SCAN_COUNT:
            yield from _read(client, names)
            names = []
    yield from _read(client, names)


def _read(client: redis.Redis, names: Sequence[bytes]) -> Iterator[tuple[bytes, dict[str, str]]]:
    with client.pipeline(transaction=False) as pipeline:
        for name in names:
            pipeline.hmget(name, _FIELDS)
        for name, values in zip(names, pipeline.execute(), strict=True):
            yield name, {field: (value or b"").decode() for field, value in zip(_FIELDS, values, strict=True)}


def _now_ms(client: redis.Redis) -> int:
    reply: Any = client.time()
    return int(reply[0]) * 1000 + int(reply[1]) // 1000


def read(path: Path) -> list[TraceRequest]:
    """Read a trace.

    Raises:
        InvalidRequest: the file is empty or not a trace.
    """
    try:
        requests = [TraceRequest.from_json(line) for line in path.read_text().splitlines() if line.strip()]
    except (ValueError, KeyError, TypeError):
        raise InvalidRequest(f"{path} is no trace: its lines have timestamp, input_length and output_length") from None
    if not requests:
        raise InvalidRequest(f"{path} holds no request")
    return requests


async def replay(client: AsyncClient, requests: Sequence[TraceRequest], *, speed: float, timeout_s: float) -> Report:
    """Submit requests of the recorded lengths at the recorded times, ``speed`` times as fast, and stream the answers."""
    callers = Callers(client, timeout_s=timeout_s)
    start_s = callers.now_s()
    calls = await callers.open_loop(_arrivals(requests, speed))
    seconds = callers.now_s() - start_s
    figures = phase_figures(calls, start_s, seconds)
    return Report(
        "replay",
        f"{len(requests)} recorded requests at {speed:g} times their speed",
        ("requests", "req/s", "tokens/s", "TTFT p50 ms", "p95", "ITL p50 ms", "p95", "E2E p95 ms"),
        [[figures[name] for name in _FIGURES]],
        [all_answered(calls)],
        _panels(calls),
    )


def _arrivals(requests: Iterable[TraceRequest], speed: float) -> Iterator[tuple[float, Shape]]:
    ordered = sorted(requests)
    for item in ordered:
        at_s = (item.time_ms - ordered[0].time_ms) / 1000 / speed
        yield at_s, Shape(max(1, item.prompt_tokens), max(1, item.output_tokens), item.tier)


def _panels(calls: Sequence[LoadCall]) -> list[Panel]:
    records = answered(calls)
    submitted = sorted(call.record.arrival_s for call in calls)
    done = sorted(record.finished_s for record in records)
    under_way = [
        Series(label, times, list(range(1, len(times) + 1)), "step") for label, times in (("submitted", submitted), ("answered", done))
    ]
    ttft = distribution("TTFT", [record.first_token_s - record.arrival_s for record in records])
    e2e = distribution("E2E", [record.finished_s - record.arrival_s for record in records])
    return [Panel("requests", "seconds", "requests so far", under_way), Panel("latency", "seconds", "share of requests", [ttft, e2e])]
