"""What a run measured, a record a request, and the figures drawn from it. Standard library only: drivers in other interpreters use it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from producer.load.stats import RequestRecord, latency_figures


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
        return {
            "output_tokens_per_s": self.output_tokens_per_s,
            "total_tokens_per_s": (self.output_tokens + sum(r.num_prompt_tokens for r in self.records)) / self.wall_s,
            "requests_per_s": len(self.records) / self.wall_s,
            "wall_s": self.wall_s,
            **latency_figures(self.records),
        }

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Run:
        return cls(data["engine"], [RequestRecord(**record) for record in data["records"]], dict(data["extra"]))


def median_figures(runs: Sequence[Run]) -> dict[str, float]:
    """Each figure's median over runs of the same engine."""
    figures = [run.figures() for run in runs]
    return {name: statistics.median(figure[name] for figure in figures) for name in figures[0]}
