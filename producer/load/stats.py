"""Measurements of requests, and figures computed from them. Standard library only: benchmarks run it in other interpreters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class RequestRecord:
    """Times in seconds since the run began; ``token_times_s`` is empty if the tokens were not seen one by one."""

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
        """Gaps between tokens; none if the times of single tokens are unknown."""
        return [after - before for before, after in zip(self.token_times_s, self.token_times_s[1:], strict=False)]


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which ``percent`` of the values lie, interpolated; 0 if there are none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def percentiles(name: str, values: Sequence[float]) -> dict[str, float]:
    """``<name>_p50``, ``_p95`` and ``_p99``."""
    return {f"{name}_p{percent}": percentile(values, percent) for percent in (50, 95, 99)}


def latency_figures(records: Sequence[RequestRecord]) -> dict[str, float]:
    """Percentiles, in milliseconds, of the time to the first token, between tokens, and to the last."""
    return {
        **percentiles("ttft_ms", [1000 * (record.first_token_s - record.arrival_s) for record in records]),
        **percentiles("itl_ms", [1000 * gap for record in records for gap in record.inter_token_s()]),
        **percentiles("e2e_ms", [1000 * (record.finished_s - record.arrival_s) for record in records]),
    }
