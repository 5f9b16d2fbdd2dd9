"""Figures of a comparison: two tables for people, everything for machines."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table

from worker.bench.compare import Results
from worker.bench.records import Run, median_figures, throughput_ratio
from worker.bench.workloads import Scenario

_UNKNOWN = "-"
_USE_COLUMNS = (
    ("output tok/s", "output_tokens_per_s", "{:.0f}"),
    ("all tok/s", "total_tokens_per_s", "{:.0f}"),
    ("req/s", "requests_per_s", "{:.2f}"),
    ("ratio", "ratio", "{:.2f}"),
    ("batch", "batch_size_mean", "{:.1f}"),
    ("KV use", "kv_usage_mean", "{:.1%}"),
    ("peak", "kv_usage_peak", "{:.1%}"),
    ("KV waste", "kv_waste_mean", "{:.1%}"),
    ("idle", "idle_share", "{:.1%}"),
)
_LATENCY_COLUMNS = tuple(
    (f"{name} p50" if percent == 50 else f"p{percent}", f"{name.lower()}_ms_p{percent}", "{:.0f}")
    for name in ("TTFT", "ITL", "E2E")
    for percent in (50, 95, 99)
)


def tables(title: str, results: Results) -> Group:
    """Medians over the rounds, one row per engine and scenario."""
    rows = [(scenario.label, name, figures) for scenario, runs in results.items() for name, figures in _figures(runs).items()]
    use = _table(_USE_COLUMNS, rows)
    use.title = title
    told = [f"; kernels of {engine}: {names}" for engine, names in _kernels(results).items()]
    use.caption = f"medians over the rounds; ratio: output tok/s against {rows[0][1]}, round by round; {_UNKNOWN}: not reported" + "".join(
        told
    )
    latency = _table(_LATENCY_COLUMNS, rows)
    latency.caption = (
        "milliseconds; TTFT, E2E: from arrival to the first token (of queue: until its worker had it) and to the last; "
        f"ITL: single gaps between tokens, {_UNKNOWN} if callers see whole answers"
    )
    return Group(use, latency)


def served_by_reference(results: Results) -> list[str]:
    """The engines whose attention runs on the torch reference."""
    return [engine for engine, names in _kernels(results).items() if "torch" in names.split()]


def to_json(results: Results) -> list[dict[str, Any]]:
    """Each scenario with every run's figures and their medians."""
    return [{**_scenario(scenario), "engines": _engines(runs)} for scenario, runs in results.items()]


def _kernels(results: Results) -> dict[str, str]:
    """What computed the steps of each engine that reports it."""
    return {engine: of_engine[-1].kernels for runs in results.values() for engine, of_engine in runs.items() if of_engine[-1].kernels}


def _figures(runs: Mapping[str, Sequence[Run]]) -> dict[str, dict[str, float]]:
    """Each engine's medians, and its throughput beside the first engine's."""
    baseline = next(iter(runs.values()))
    return {name: {**median_figures(of_engine), "ratio": throughput_ratio(of_engine, baseline)} for name, of_engine in runs.items()}


def _table(columns: Sequence[tuple[str, str, str]], rows: Sequence[tuple[str, str, Mapping[str, float]]]) -> Table:
    out = Table(title_justify="left", caption_justify="left")
    labelled = len({label for label, _, _ in rows}) > 1
    for heading in ("requests", "engine") if labelled else ("engine",):
        out.add_column(heading, no_wrap=True)
    for heading, _, _ in columns:
        out.add_column(heading, justify="right")
    for label, name, figures in rows:
        cells = [form.format(figures[key]) if key in figures else _UNKNOWN for _, key, form in columns]
        out.add_row(*([label] if labelled else []), name, *cells)
    return out


def _scenario(scenario: Scenario) -> dict[str, Any]:
    lengths = [request.max_tokens for request in scenario.requests]
    return {
        "output_cap": scenario.output_cap,
        "rate": scenario.rate,
        "requests": len(lengths),
        "output_tokens": sum(lengths),
        "output_tokens_stdev": statistics.pstdev(lengths),
    }


def _engines(runs: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    return {
        name: {"kernels": runs[name][-1].kernels, "median": figures, "rounds": [run.figures() for run in runs[name]]}
        for name, figures in _figures(runs).items()
    }
