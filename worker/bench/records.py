"""What a run measured, a record a request, and the figures drawn from it. Standard library only: drivers in other interpreters use it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class RequestRecord:
    """Times in seconds since the run began; ``token_times_s`` may be empty where an engine does not tell them."""

    id: int
    num_prompt_tokens: int
    arrival_s: float
    first_token_s: float = 0.0
    finished_s: float = 0.0
    num_output_tokens: int = 0
    token_times_s: list[float] = field(default_factory=list)

    def add_tokens(self, count: int, now_s: float) -> None:
        """``count`` more output tokens were seen at ``now_s``."""
        if count and not self.num_output_tokens:
            self.first_token_s = now_s
        self.num_output_tokens += count
        self.token_times_s += [now_s] * count
        self.finished_s = now_s

    def inter_token_s(self) -> list[float]:
        """Gaps between tokens, or their mean once a request where single times are unknown."""
        if len(self.token_times_s) > 1:
            return [after - before for before, after in zip(self.token_times_s, self.token_times_s[1:], strict=False)]
        if self.num_output_tokens > 1:
            return [(self.finished_s - self.first_token_s) / (self.num_output_tokens - 1)]
        return []


@dataclass(slots=True)
class Run:
    """One pass of a workload through one engine; ``extra`` holds what only some engines know (batch sizes, idle share)."""

    engine: str
    records: list[RequestRecord]
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def wall_s(self) -> float:
        return max(record.finished_s for record in self.records)

    @property
    def output_tokens(self) -> int:
        return sum(record.num_output_tokens for record in self.records)

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.wall_s

    def figures(self) -> dict[str, float]:
        """The run in numbers; times in milliseconds."""
        itl = [gap for record in self.records for gap in record.inter_token_s()]
        return {
            "output_tokens_per_s": self.output_tokens_per_s,
            "total_tokens_per_s": (self.output_tokens + sum(r.num_prompt_tokens for r in self.records)) / self.wall_s,
            "requests_per_s": len(self.records) / self.wall_s,
            "wall_s": self.wall_s,
            **_percentiles("ttft_ms", [1000 * (r.first_token_s - r.arrival_s) for r in self.records]),
            **_percentiles("itl_ms", [1000 * gap for gap in itl]),
            **_percentiles("e2e_ms", [1000 * (r.finished_s - r.arrival_s) for r in self.records]),
        }

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Run:
        return cls(data["engine"], [RequestRecord(**record) for record in data["records"]], dict(data["extra"]))


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which ``percent`` of the values lie, interpolated; 0 of none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _percentiles(name: str, values: Sequence[float]) -> dict[str, float]:
    return {f"{name}_p{percent}": percentile(values, percent) for percent in (50, 95, 99)}


def median_figures(runs: Sequence[Run]) -> dict[str, float]:
    """Each figure's median over runs of the same engine."""
    figures = [run.figures() for run in runs]
    return {name: statistics.median(figure[name] for figure in figures) for name in figures[0]}
