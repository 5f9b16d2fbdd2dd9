"""What load tests compute, record, draw and write down."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from producer.errors import InvalidRequest
from producer.load import page, trace
from producer.load.callers import LoadCall, phase_figures, prompt
from producer.load.limits import CASES, Answer, Case
from producer.load.ramp import Goals, Step, capacity, hint
from producer.load.report import Check, Panel, Report, Series, all_answered, distribution, text_of
from producer.load.restart import longest_gap, rate
from producer.load.stats import RequestRecord, latency_figures
from producer.load.trace import TraceRequest
from worker.bench import workloads

GOALS = Goals(ttft_ms=1000.0, itl_ms=100.0)


def step(callers: int, ttft_ms: float, itl_ms: float = 10.0, failed: int = 0) -> Step:
    figures = {"ttft_ms_p95": ttft_ms, "itl_ms_p95": itl_ms, "failed": failed, "requests_per_s": callers / 2, "output_tokens_per_s": 50.0}
    return Step(callers, figures)


def call(code: str = "", arrival_s: float = 0.0, token_times_s: tuple[float, ...] = ()) -> LoadCall:
    record = RequestRecord(0, 10, arrival_s)
    for time_s in token_times_s:
        record.add_tokens(1, time_s)
    return LoadCall("x", record, code)


def report(test: str = "ramp", *, ok: bool = True, panels: tuple[Panel, ...] = ()) -> Report:
    return Report(test, "a <test> & more", ("name", "n"), [["a<b", 1.0]], [Check("it holds", ok, "1 of 1")], panels, "capacity: 4")


def test_capacity_is_the_last_step_before_the_goals_are_missed() -> None:
    steps = [step(1, 100), step(2, 900), step(4, 1100), step(8, 900)]
    assert capacity(steps, GOALS) is steps[1]
    assert hint(steps[1], steps, GOALS).startswith("capacity: 2 callers at once (1.00 requests/s and 50 tokens/s) keep TTFT")


@pytest.mark.parametrize("missed", [step(1, 1001), step(1, 10, itl_ms=101), step(1, 10, failed=1)])
def test_there_is_no_capacity_where_the_first_step_misses_a_goal(missed: Step) -> None:
    assert capacity([missed, step(2, 1)], GOALS) is None
    assert hint(None, [missed], GOALS).startswith("capacity: none, not even 1 callers")


def test_capacity_says_where_it_was_not_reached() -> None:
    steps = [step(1, 100), step(2, 200)]
    assert "the most that was tried" in hint(capacity(steps, GOALS), steps, GOALS)


def test_throughput_counts_what_falls_within_the_phase() -> None:
    calls = [call(token_times_s=(1.0, 2.0, 3.0)), call(token_times_s=(2.5, 5.5)), call(code="CANCELLED", token_times_s=(1.5,))]
    figures = phase_figures(calls, 1.0, 4.0)
    assert (figures["requests"], figures["failed"]) == (3, 1)
    assert figures["output_tokens_per_s"] == 5 / 4
    assert figures["requests_per_s"] == 2 / 4.5


def test_latencies_are_told_from_the_submission() -> None:
    figures = latency_figures([call(arrival_s=1.0, token_times_s=(1.5, 1.75, 2.0)).record])
    assert (figures["ttft_ms_p50"], figures["itl_ms_p50"], figures["e2e_ms_p95"]) == (500.0, 250.0, 1000.0)


def test_unanswered_calls_are_told_by_code() -> None:
    assert all_answered([call(), call("WAIT_TIMEOUT")]) == Check("every request is answered", False, "1 of 2 (1 WAIT_TIMEOUT)")
    assert all_answered([call()]).ok
    assert not all_answered([]).ok


def test_longest_gap_is_looked_for_after_the_restart() -> None:
    assert longest_gap([0.0, 5.0, 5.5, 8.0, 8.1], after_s=5.2) == (5.5, 8.0)
    assert longest_gap([5.0, 7.0], after_s=6.0) == (5.0, 7.0)  # it began before
    assert longest_gap([1.0, 2.0], after_s=3.0) is None


def test_rate_adds_up_to_the_number_of_events() -> None:
    series = rate([0.0, 0.05, 0.31, 1.2])
    assert sum(series.y) * (float(series.x[1]) - float(series.x[0])) == pytest.approx(4)
    assert rate([]).y == [0.0, 0.0]


def test_distribution_goes_from_none_to_all() -> None:
    assert distribution("a", [3.0, 1.0]) == Series("a", [1.0, 1.0, 3.0], [0.0, 0.5, 1.0], "step")
    assert distribution("a", []) == Series("a", [], [], "step")


def test_prompts_have_their_length_and_share_no_beginning() -> None:
    rng = random.Random(0)
    prompts = [prompt(rng, 50) for _ in range(20)]
    assert {len(text.split()) for text in prompts} == {50}
    assert len({text.split()[0] for text in prompts}) == 20
    assert [len(prompt(rng, count).split()) for count in (1, 2)] == [1, 2]


def test_an_answer_passes_that_is_the_expected_error_and_readable_and_fast() -> None:
    case = Case("empty prompt", "INVALID_REQUEST", "prompt", lambda client: client)
    good = Answer(case, "INVALID_REQUEST", "prompt must be a non-empty string", 0.1)
    assert good.check(200).ok
    assert not good.check(50).ok
    assert not Answer(case, "", "", 0.1).check(200).ok
    assert not Answer(case, "INTERNAL", "prompt must be a non-empty string", 0.1).check(200).ok
    assert not Answer(case, "INVALID_REQUEST", "something is wrong somewhere", 0.1).check(200).ok


def test_cases_have_names_of_their_own() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


# -- traces


def test_a_trace_reads_back_as_it_was_written(tmp_path: Path) -> None:
    requests = [TraceRequest(0, 10, 5), TraceRequest(1500, 2000, 1, "batch")]
    trace.Recording(requests, 0).write(tmp_path / "trace.jsonl")
    assert trace.read(tmp_path / "trace.jsonl") == requests


def test_a_trace_is_a_workload_of_the_benchmark_too(tmp_path: Path) -> None:
    trace.Recording([TraceRequest(0, 10, 5), TraceRequest(1500, 20, 1)], 0).write(tmp_path / "trace.jsonl")
    requests = workloads.load(f"trace:{tmp_path / 'trace.jsonl'}")
    assert [(len(r.prompt_token_ids), r.max_tokens, r.arrival_s) for r in requests] == [(10, 5, 0.0), (20, 1, 1.5)]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"timestamp": 0}', "nonsense", '{"timestamp":0,"input_length":1,"output_length":1,"tier":"x"}']
)
def test_other_files_are_no_traces(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(InvalidRequest):
        trace.read(path)


def test_arrivals_are_those_of_the_trace_at_another_speed() -> None:
    arrivals = list(trace._arrivals([TraceRequest(9000, 3, 1), TraceRequest(1000, 10, 5, "batch")], speed=4.0))
    assert [at_s for at_s, _ in arrivals] == [0.0, 2.0]
    assert [(shape.prompt_tokens, shape.output_tokens, shape.tier) for _, shape in arrivals] == [(10, 5, "batch"), (3, 1, "realtime")]


# -- the report


def test_page_holds_all_tests_of_the_folder_and_nothing_from_elsewhere(tmp_path: Path) -> None:
    panel = Panel(
        "latency", "callers", "ms", [Series("p50", [1, 2, 4], [1.0, 2.0, 3.0])], goals={"goal": 2.0}, x_scale="steps", y_scale="log"
    )
    page.write(report("ramp", panels=(panel,)), tmp_path)
    text = page.write(report("limits", ok=False), tmp_path).read_text()
    assert re.findall(r"<h2>(\w+)</h2>", text) == ["limits", "ramp"]
    assert text.count('src="data:image/png;base64,') == 1
    assert not re.search(r'(src|href)="(?!data:)|@import|url\(|<script', text)
    assert 'class="pass">it holds: 1 of 1' in text
    assert 'class="fail">it holds: 1 of 1' in text
    assert "a &lt;test&gt; &amp; more" in text
    assert "a&lt;b" in text
    assert json.loads((tmp_path / "limits.json").read_text())["ok"] is False


@pytest.mark.parametrize("foreign", [b'{"a": 1}', b"[1]", b"{", b"\xff\xfe", b""], ids=str)
def test_page_passes_over_what_is_no_report(tmp_path: Path, foreign: bytes) -> None:
    (tmp_path / "foreign.json").write_bytes(foreign)
    assert re.findall(r"<h2>(\w+)</h2>", page.write(report("ramp"), tmp_path).read_text()) == ["ramp"]
    assert (tmp_path / "foreign.json").read_bytes() == foreign


@pytest.mark.parametrize("style", ["line", "step", "dots", "bars"])
def test_every_style_is_drawn(tmp_path: Path, style: str) -> None:
    series = Series("a", ["one", "two"] if style == "bars" else [1.0, 2.0], [1.0, 20.0], style)  # type: ignore[arg-type]  # a parameter
    panel = Panel("title", "x", "y", [series], marks={"here": 1.5}, x_scale="log" if style == "bars" else "linear")
    page.write(report(panels=(panel, panel)), tmp_path)
    assert (tmp_path / "ramp.png").read_bytes().startswith(b"\x89PNG")


def test_numbers_are_written_for_people() -> None:
    assert [text_of(cell) for cell in ("a", 3.0, 1234.5, 12.345, 0.01234)] == ["a", "3", "1,234", "12.3", "0.0123"]
