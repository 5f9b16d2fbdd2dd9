"""What a comparison shows: a table, and plots of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from worker.bench.records import Run, median_figures

_COLUMNS = (
    ("output tok/s", "output_tokens_per_s", "{:.0f}"),
    ("req/s", "requests_per_s", "{:.2f}"),
    ("TTFT p50", "ttft_ms_p50", "{:.0f}"),
    ("p95", "ttft_ms_p95", "{:.0f}"),
    ("ITL p50", "itl_ms_p50", "{:.0f}"),
    ("p95", "itl_ms_p95", "{:.0f}"),
    ("p99", "itl_ms_p99", "{:.0f}"),
    ("E2E p50", "e2e_ms_p50", "{:.0f}"),
    ("p95", "e2e_ms_p95", "{:.0f}"),
)


def table(title: str, runs: Mapping[str, Sequence[Run]]) -> Table:
    """Medians over each engine's runs; the last column is throughput relative to the first engine's, round by round."""
    out = Table(
        title=title, caption="medians over the rounds; times in ms; ratio = median over rounds of output tok/s against the first engine"
    )
    out.add_column("engine")
    for heading, _, _ in _COLUMNS:
        out.add_column(heading, justify="right")
    out.add_column("ratio", justify="right")
    for name, of_engine in runs.items():
        figures = median_figures(of_engine)
        ratio = throughput_ratio(of_engine, next(iter(runs.values())))
        out.add_row(name, *(form.format(figures[key]) for _, key, form in _COLUMNS), f"{ratio:.2f}")
    return out


def throughput_ratio(runs: Sequence[Run], baseline: Sequence[Run]) -> float:
    """Median over rounds of one engine's output tokens/s against another's in the same round."""
    ratios = sorted(a.output_tokens_per_s / b.output_tokens_per_s for a, b in zip(runs, baseline, strict=True))
    middle = len(ratios) // 2
    return ratios[middle] if len(ratios) % 2 else (ratios[middle - 1] + ratios[middle]) / 2


def to_json(runs: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    """Every run's figures and their medians, for machines."""
    return {name: {"median": median_figures(of_engine), "rounds": [run.figures() for run in of_engine]} for name, of_engine in runs.items()}


def plot(path: Path, title: str, runs: Mapping[str, Sequence[Run]]) -> None:
    """Draw throughput, latency distribution and batch size over time into one picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.5), layout="constrained")
    throughput, latency, batch = figure.subplots(1, 3)
    figure.suptitle(title)
    _plot_throughput(throughput, runs)
    _plot_latency(latency, runs)
    _plot_batch_size(batch, runs)
    figure.savefig(path, dpi=110)


def _plot_throughput(axes: Any, runs: Mapping[str, Sequence[Run]]) -> None:
    medians = [median_figures(of_engine)["output_tokens_per_s"] for of_engine in runs.values()]
    bars = axes.bar(list(runs), medians)
    axes.bar_label(bars, fmt="%.0f")
    for place, of_engine in enumerate(runs.values()):
        axes.plot([place] * len(of_engine), [run.output_tokens_per_s for run in of_engine], "k.", markersize=4)
    axes.set(title="throughput (dots: single rounds)", ylabel="output tokens/s")
    axes.tick_params(axis="x", rotation=20)


def _plot_latency(axes: Any, runs: Mapping[str, Sequence[Run]]) -> None:
    for name, of_engine in runs.items():
        seconds = sorted(record.finished_s - record.arrival_s for record in of_engine[-1].records)
        axes.step(seconds, [(i + 1) / len(seconds) for i in range(len(seconds))], where="post", label=name)
    axes.set(title="latency, arrival to last token", xlabel="seconds", ylabel="share of requests answered", ylim=(0, 1))
    axes.legend()


def _plot_batch_size(axes: Any, runs: Mapping[str, Sequence[Run]]) -> None:
    for name, of_engine in runs.items():
        times, sizes = _running(of_engine[-1])
        axes.step(times, sizes, where="post", label=name)
    axes.set(title="requests between first and last token", xlabel="seconds", ylabel="requests")
    axes.legend()


def _running(run: Run) -> tuple[list[float], list[int]]:
    events = sorted([(record.first_token_s, 1) for record in run.records] + [(record.finished_s, -1) for record in run.records])
    times, sizes, size = [0.0], [0], 0
    for time_s, change in events:
        size += change
        times.append(time_s)
        sizes.append(size)
    return times, sizes
