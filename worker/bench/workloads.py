"""The requests of a benchmark: shipped sets, generated ones, and traces that others published."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

SHIPPED = ("mixed", "decode", "prefill")
_FOLDER = Path(__file__).parent / "workloads"
_FIRST_TEXT_TOKEN = 1000  # below are special tokens and single bytes
_LAST_TEXT_TOKEN = 40_000
_SHIPPED_VOCAB_SIZE = 49_152  # of the demo model, of whose tokens the shipped sets are made


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request: greedy, EOS ignored, so that every engine generates exactly ``max_tokens`` tokens."""

    id: int
    prompt_token_ids: list[int]
    max_tokens: int
    arrival_s: float = 0.0


@dataclass(frozen=True, eq=False)
class Scenario:
    """A workload as it is sent.

    Attributes:
        output_cap: most output tokens of a request; None leaves them as they are.
        rate: Poisson arrivals per second; None leaves them as they are, which is all at once except for traces.
    """

    output_cap: int | None
    rate: float | None
    requests: Sequence[BenchRequest]

    @property
    def cap_label(self) -> str:
        return "" if self.output_cap is None else f"outputs ≤ {self.output_cap}"

    @property
    def rate_label(self) -> str:
        return "" if self.rate is None else f"{self.rate:g}/s"

    @property
    def label(self) -> str:
        return ", ".join(filter(None, (self.cap_label, self.rate_label)))

    @property
    def output_tokens(self) -> int:
        return sum(request.max_tokens for request in self.requests)


def load(name: str, *, count: int | None = None, seed: int = 0, vocab_size: int = _SHIPPED_VOCAB_SIZE) -> list[BenchRequest]:
    """The requests of workload ``name``, the first ``count`` of them.

    Args:
        name: one of `SHIPPED`, ``anyscale``, ``shared-prefix``, or ``trace:FILE``.
        seed: of the generated sets.
        vocab_size: of the model that will run them.

    Raises:
        ValueError: there is no such workload, it holds no requests, or the model lacks some of its tokens.
    """
    requests = list(islice(_source(name, TokenSource(seed, vocab_size)), count))
    if not requests:
        raise ValueError(f"workload {name} holds no requests")
    largest = max(max(request.prompt_token_ids) for request in requests)
    if largest >= vocab_size:
        raise ValueError(f"it has token ids up to {largest}, and the model only {vocab_size}: take a generated set or a trace")
    return requests


class TokenSource:
    """Draws text and lengths; a function of the seed.

    Args:
        vocab_size: ids are drawn below it and, if there is room, outside of the usual range of special tokens and single bytes.
    """

    def __init__(self, seed: int, vocab_size: int) -> None:
        self.rng = random.Random(seed)
        self._last = min(_LAST_TEXT_TOKEN, vocab_size - 1)
        self._first = min(_FIRST_TEXT_TOKEN, self._last // 2)

    def text(self, length: int) -> list[int]:
        """Token ids of a text."""
        return [self.rng.randint(self._first, self._last) for _ in range(length)]


def scenarios(requests: Sequence[BenchRequest], output_caps: Sequence[int], rates: Sequence[float], seed: int = 0) -> list[Scenario]:
    """The same requests at each cap with each rate; no caps or no rates leave them as they are."""
    caps: Sequence[int | None] = output_caps or [None]
    speeds: Sequence[float | None] = rates or [None]
    return [Scenario(cap, rate, _sent(requests, cap, rate, seed)) for cap in caps for rate in speeds]


def _sent(requests: Sequence[BenchRequest], output_cap: int | None, rate: float | None, seed: int) -> Sequence[BenchRequest]:
    if output_cap is not None:
        requests = [replace(request, max_tokens=min(request.max_tokens, output_cap)) for request in requests]
    return requests if rate is None else poisson(requests, rate, seed)


def poisson(requests: Iterable[BenchRequest], rate: float, seed: int = 0) -> list[BenchRequest]:
    """Give the requests Poisson arrivals at ``rate`` per second, the first at 0."""
    rng = random.Random(seed)
    now_s, out = 0.0, []
    for request in requests:
        out.append(replace(request, arrival_s=now_s))
        now_s += rng.expovariate(rate)
    return out


def _source(name: str, tokens: TokenSource) -> Iterator[BenchRequest]:
    if name in SHIPPED:
        return _shipped(_FOLDER / f"{name}.jsonl")
    if name == "anyscale":
        return _anyscale(tokens)
    if name == "shared-prefix":
        return _shared_prefix(tokens)
    if name.startswith("trace:"):
        return _trace(Path(name.removeprefix("trace:")), tokens)
    raise ValueError(f"unknown workload {name}: give one of {', '.join(SHIPPED)}, anyscale, shared-prefix, trace:FILE")


def _shipped(path: Path) -> Iterator[BenchRequest]:
    with path.open() as lines:
        for line in lines:
            row = json.loads(line)
            yield BenchRequest(row["id"], row["prompt_ids"], row["max_tokens"])


def _anyscale(tokens: TokenSource) -> Iterator[BenchRequest]:
    """1,000 requests of 512 prompt tokens, outputs exponential of mean 128, capped at 1,536 (Anyscale, 2023)."""
    for i in range(1000):
        yield BenchRequest(i, tokens.text(512), max(1, min(1536, round(tokens.rng.expovariate(1 / 128)))))


def _shared_prefix(tokens: TokenSource) -> Iterator[BenchRequest]:
    """64 requests with a common 1,000-token system prompt and 32 tokens of their own, 64 output tokens each."""
    system = tokens.text(1000)
    for i in range(64):
        yield BenchRequest(i, system + tokens.text(32), 64)


def _trace(path: Path, tokens: TokenSource) -> Iterator[BenchRequest]:
    """A published trace: lengths and times as recorded, prompt tokens drawn at random."""
    lengths = _sharegpt(path) if path.suffix == ".json" else _mooncake(path) if path.suffix == ".jsonl" else _csv_trace(path)
    first_s: float | None = None
    for i, (time_s, prompt, output) in enumerate(lengths):
        first_s = time_s if first_s is None else first_s
        yield BenchRequest(i, tokens.text(max(1, prompt)), max(1, output), time_s - first_s)


def _csv_trace(path: Path) -> Iterator[tuple[float, int, int]]:
    with path.open(newline="") as file:
        rows = csv.DictReader(file)
        read = _csv_reader(rows.fieldnames or ())
        for row in rows:
            yield read(row)


def _csv_reader(columns: Iterable[str]) -> Callable[[Mapping[str, str]], tuple[float, int, int]]:
    names = set(columns)
    if {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} <= names:  # Azure LLM inference traces
        return lambda row: (_seconds(row["TIMESTAMP"]), int(row["ContextTokens"]), int(row["GeneratedTokens"]))
    if {"Timestamp", "Request tokens", "Response tokens"} <= names:  # BurstGPT
        return lambda row: (_seconds(row["Timestamp"]), int(row["Request tokens"]), int(row["Response tokens"]))
    raise ValueError(f"the trace has neither the columns of Azure's traces nor BurstGPT's: {', '.join(sorted(names))}")


def _seconds(timestamp: str) -> float:
    try:
        return float(timestamp)
    except ValueError:
        return datetime.fromisoformat(timestamp).timestamp()


def _mooncake(path: Path) -> Iterator[tuple[float, int, int]]:
    with path.open() as lines:
        for line in lines:
            row: dict[str, Any] = json.loads(line)
            yield row["timestamp"] / 1000, row["input_length"], row["output_length"]


def _sharegpt(path: Path) -> Iterator[tuple[float, int, int]]:
    """First turn and its answer; lengths by the rule of thumb of four characters per token, all at time 0."""
    for conversation in json.loads(path.read_text()):
        turns = [turn["value"] for turn in conversation["conversations"][:2]]
        if len(turns) == 2:
            yield 0.0, len(turns[0]) // 4, len(turns[1]) // 4
