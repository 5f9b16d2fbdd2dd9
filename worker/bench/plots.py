"""Plots of a comparison. Each engine has the same colour in all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from producer.load.report import Panel, Series, distribution
from worker.bench.compare import Results
from worker.bench.records import Run, median_figures
from worker.bench.workloads import Scenario

_GREY = 7  # of the colours, one that no engine has


def panels(results: Results) -> list[Panel]:
    """Throughput of all scenarios; latencies at every rate, and the batch size at the last one, with the last output cap."""
    last = list(results)[-1]
    at_last_cap = {scenario: runs for scenario, runs in results.items() if scenario.output_cap == last.output_cap}
    return [_throughput(results), _latency(at_last_cap), _batch_size(last, results[last])]


def _throughput(results: Results) -> Panel:
    title, ylabel = "throughput (dots: single rounds)", "output tokens/s"
    if len({scenario.output_cap for scenario in results}) > 1:
        lines = _lines(results, lambda scenario: scenario.output_cap or 0, lambda scenario: scenario.rate_label)
        return Panel(title, "most output tokens of a request", ylabel, lines, x_scale="steps")
    if len(results) > 1:
        return Panel(title, "arrivals a second", ylabel, _lines(results, lambda scenario: scenario.rate or 0, lambda _: ""))
    (runs,) = results.values()
    return Panel(title, ylabel, "", list(_bars(runs)))


def _lines(results: Results, x_of: Callable[[Scenario], float], name_of: Callable[[Scenario], str]) -> list[Series]:
    """For each engine a line through the scenarios of each name."""
    lines = []
    for dash, name in enumerate(dict.fromkeys(map(name_of, results))):
        column = {x_of(scenario): runs for scenario, runs in results.items() if name_of(scenario) == name}
        for color, engine in enumerate(next(iter(column.values()))):
            runs_at = {x: runs[engine] for x, runs in column.items() if engine in runs}  # an engine that ended early has not run everywhere
            medians = [_median_tokens_per_s(runs) for runs in runs_at.values()]
            lines.append(Series(_join(engine, name), list(runs_at), medians, "line", color, dash))
            rounds = [(x, run.output_tokens_per_s) for x, runs in runs_at.items() for run in runs]
            lines.append(Series("", [x for x, _ in rounds], [y for _, y in rounds], "dots", color))
    return lines


def _bars(runs: Mapping[str, Sequence[Run]]) -> Iterator[Series]:
    for color, (engine, of_engine) in enumerate(runs.items()):
        yield Series("", [engine], [_median_tokens_per_s(of_engine)], "bars", color)
    rounds = [(run.output_tokens_per_s, engine) for engine, of_engine in runs.items() for run in of_engine]
    yield Series("", [x for x, _ in rounds], [list(runs).index(engine) for _, engine in rounds], "dots", _GREY)


def _median_tokens_per_s(runs: Sequence[Run]) -> float:
    return median_figures(runs)["output_tokens_per_s"]


def _latency(results: Results) -> Panel:
    lines = []
    for dash, (scenario, runs) in enumerate(results.items()):
        for color, (engine, of_engine) in enumerate(runs.items()):
            seconds = [record.finished_s - record.arrival_s for run in of_engine for record in run.records]
            lines.append(replace(distribution(_join(engine, scenario.rate_label), seconds), color=color, dash=dash))
    title = _join("latency, arrival to last token", next(iter(results)).cap_label)
    return Panel(title, "seconds", "share of requests answered", lines)


def _batch_size(scenario: Scenario, runs: Mapping[str, Sequence[Run]]) -> Panel:
    """In each engine's last round; engines that give whole answers do not show theirs."""
    courses = [(engine, color, batch_sizes(of_engine[-1])) for color, (engine, of_engine) in enumerate(runs.items())]
    lines = [Series(engine, [x for x, _ in course], [y for _, y in course], "step", color) for engine, color, course in courses if course]
    return Panel(_join("batch size", scenario.label), "seconds", "requests", lines)


def batch_sizes(run: Run) -> list[tuple[float, int]]:
    """(second, requests from then on): from its steps or, without these, from the requests between their first and last tokens."""
    if run.steps:
        return _of_steps(run)
    changes = sorted(change for r in run.records if r.first_token_s < r.finished_s for change in ((r.first_token_s, 1), (r.finished_s, -1)))
    sizes, size = [], 0
    for time_s, change in changes:
        size += change
        sizes.append((time_s, size))
    return sizes


def _of_steps(run: Run) -> list[tuple[float, int]]:
    """From its steps; a gap longer than the previous step counts as idle."""
    course: list[tuple[float, int]] = []
    for step, following in zip(run.steps, [*run.steps[1:], None], strict=True):
        course.append((step.end_s - step.seconds, step.batch_size))
        if following is None or following.end_s - following.seconds - step.end_s > step.seconds:
            course.append((step.end_s, 0))
    return course


def _join(*parts: str) -> str:
    return ", ".join(filter(None, parts))
