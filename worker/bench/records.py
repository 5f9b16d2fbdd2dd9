"""A run's measurements, one record per request and per step, and the figures computed from them. Standard library only: drivers in
other interpreters use it.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from producer.load.stats import RequestRecord, latency_figures


@dataclass(slots=True)
class StepRecord:
    """One step of an engine; None for what the engine does not report.

    Attributes:
        end_s: when it ended, since the run began.
        seconds: how long it took.
        batch_size: requests in it.
        idle_s: how long the device did nothing before it although there was work.
        kv_usage: share of the KV cache's blocks that requests hold after it, 0..1.
        kv_waste: share of the token slots of these blocks that hold nothing, 0..1.
        phase_s: where the host's time went, by the names of `worker.engine.step_clock`.
        num_tokens: computed in it: more than ``batch_size`` if it held a part of a prompt.
    """

    end_s: float
    seconds: float
    batch_size: int
    idle_s: float | None = None
    kv_usage: float | None = None
    kv_waste: float | None = None
    phase_s: dict[str, float] | None = None
    num_tokens: int | None = None


@dataclass(slots=True)
class Run:
    """One pass of requests through one engine.

    Attributes:
        steps: empty if the engine does not report them.
        kernels: what computed its steps, as `worker.engine_api.kernel_names` says; empty if the engine does not report it.
    """

    engine: str
    records: list[RequestRecord]
    steps: list[StepRecord] = field(default_factory=list)
    kernels: str = ""

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
        """The run in numbers, times in milliseconds, without what the engine does not report."""
        return {
            "output_tokens_per_s": self.output_tokens_per_s,
            "total_tokens_per_s": (self.output_tokens + sum(r.num_prompt_tokens for r in self.records)) / self.wall_s,
            "requests_per_s": len(self.records) / self.wall_s,
            "wall_s": self.wall_s,
            **self._latencies(),
            **step_figures(self.steps),
        }

    def _latencies(self) -> dict[str, float]:
        figures = latency_figures(self.records)
        if any(record.inter_token_s() for record in self.records):
            return figures
        return {name: value for name, value in figures.items() if not name.startswith("itl")}  # nobody saw the gaps

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Run:
        records = [RequestRecord(**record) for record in data["records"]]
        return cls(data["engine"], records, [StepRecord(**step) for step in data["steps"]], data["kernels"])


def step_figures(steps: Sequence[StepRecord]) -> dict[str, float]:
    """Means weighted by the steps' lengths, peaks, the share of the time in which the device idled although there was work, the share of
    steps that held a part of a prompt, and each phase's share of the steps.
    """
    figures = _mean_and_peak("batch_size", [(step.seconds, step.batch_size) for step in steps])
    figures |= _mean_and_peak("kv_usage", [(step.seconds, step.kv_usage) for step in steps if step.kv_usage is not None])
    figures |= _mean_and_peak("kv_waste", [(step.seconds, step.kv_waste) for step in steps if step.kv_waste is not None])
    idle_s = [step.idle_s for step in steps if step.idle_s is not None]
    if idle_s:
        figures["idle_share"] = sum(idle_s) / (sum(idle_s) + sum(step.seconds for step in steps))
    with_chunk = [step.num_tokens > step.batch_size for step in steps if step.num_tokens is not None]
    if with_chunk:
        figures["mixed_share"] = sum(with_chunk) / len(with_chunk)
    return figures | _phase_shares([step.phase_s for step in steps if step.phase_s is not None])


def _phase_shares(phases_s: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """``<phase>_share`` of the time that all phases took together."""
    sums_s = Counter[str]()
    for phase_s in phases_s:
        sums_s.update(phase_s)
    return {f"{phase}_share": seconds / sums_s.total() for phase, seconds in sums_s.items()}


def _mean_and_peak(name: str, samples: Sequence[tuple[float, float]]) -> dict[str, float]:
    """``<name>_mean`` and ``<name>_peak`` of (seconds, value); nothing without samples."""
    if not samples:
        return {}
    total_s = sum(seconds for seconds, _ in samples)
    return {f"{name}_mean": sum(seconds * value for seconds, value in samples) / total_s, f"{name}_peak": max(v for _, v in samples)}


def median_figures(runs: Sequence[Run]) -> dict[str, float]:
    """Each figure's median over runs of the same engine."""
    figures = [run.figures() for run in runs]
    return {name: statistics.median(figure[name] for figure in figures) for name in figures[0]}


def throughput_ratio(runs: Sequence[Run], baseline: Sequence[Run]) -> float:
    """Median, over the rounds that both finished, of one engine's output tokens/s against another's in the same round."""
    return statistics.median(a.output_tokens_per_s / b.output_tokens_per_s for a, b in zip(runs, baseline, strict=False))
