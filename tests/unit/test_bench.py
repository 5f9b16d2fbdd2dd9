import io
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

from producer.errors import ContextLengthExceeded, InvalidRequest
from producer.load.plots import draw
from producer.load.stats import RequestRecord, percentile
from tests.tiny_engine import tiny_engine
from tests.tiny_models import VOCAB_SIZE
from worker.bench import cli, plots, report, workloads
from worker.bench.compare import EngineSpec, Results
from worker.bench.drivers import headrace, loop
from worker.bench.drivers.loop import drive
from worker.bench.records import Run, StepRecord, throughput_ratio
from worker.bench.workloads import BenchRequest, Scenario


@pytest.mark.parametrize(
    ("name", "count", "prompt_tokens", "output_tokens"),
    [("mixed", 128, 33575, 12253), ("decode", 128, 5322, 15136), ("prefill", 64, 73556, 882)],
)
def test_shipped_sets_have_their_stated_sizes(name: str, count: int, prompt_tokens: int, output_tokens: int) -> None:
    requests = workloads.load(name)
    assert len(requests) == count
    assert sum(len(request.prompt_token_ids) for request in requests) == prompt_tokens
    assert sum(request.max_tokens for request in requests) == output_tokens


def test_generated_sets_are_functions_of_the_seed() -> None:
    assert workloads.load("anyscale", count=20, seed=1) == workloads.load("anyscale", count=20, seed=1)
    assert workloads.load("anyscale", count=20, seed=1) != workloads.load("anyscale", count=20, seed=2)


@pytest.mark.parametrize("name", ["anyscale", "shared-prefix"])
@pytest.mark.parametrize("vocab_size", [50, 320, 32_000])
def test_generated_text_is_within_the_models_vocabulary(name: str, vocab_size: int) -> None:
    requests = workloads.load(name, count=20, vocab_size=vocab_size)
    assert all(0 <= token_id < vocab_size for request in requests for token_id in request.prompt_token_ids)
    assert len(set(requests[0].prompt_token_ids)) > 20


def test_shipped_text_of_another_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match=r"token ids up to .* and the model only 320"):
        workloads.load("mixed", count=3, vocab_size=320)


def test_every_cap_meets_every_rate_with_the_same_prompts() -> None:
    requests = workloads.load("anyscale", count=100)
    swept = workloads.scenarios(requests, [32, 64], [1.0, 10.0])
    assert [scenario.label for scenario in swept] == ["outputs ≤ 32, 1/s", "outputs ≤ 32, 10/s", "outputs ≤ 64, 1/s", "outputs ≤ 64, 10/s"]
    assert [max(request.max_tokens for request in scenario.requests) for scenario in swept] == [32, 32, 64, 64]
    for scenario in swept:
        assert [request.prompt_token_ids for request in scenario.requests] == [request.prompt_token_ids for request in requests]
    slow, fast = swept[0].requests[-1].arrival_s, swept[1].requests[-1].arrival_s
    assert slow == pytest.approx(10 * fast)


def test_without_sweeps_requests_stay_as_they_are() -> None:
    requests = workloads.load("mixed", count=3)
    (scenario,) = workloads.scenarios(requests, [], [])
    assert (scenario.label, list(scenario.requests)) == ("", requests)


def test_shared_prefix_is_shared() -> None:
    first, second = workloads.load("shared-prefix", count=2)
    assert first.prompt_token_ids[:1000] == second.prompt_token_ids[:1000]
    assert first.prompt_token_ids != second.prompt_token_ids


def test_poisson_arrivals_have_the_rate() -> None:
    requests = workloads.poisson(workloads.load("anyscale"), rate=10.0)
    assert requests[0].arrival_s == 0.0
    assert 80 < requests[-1].arrival_s < 125


@pytest.mark.parametrize(
    ("file", "content"),
    [
        (
            "azure.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.680590,374,44\n2023-11-16 18:15:48.180590,39,7\n",
        ),
        (
            "burst.csv",
            "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,GPT-4,374,44,418,API log\n6.5,GPT-4,39,7,46,API log\n",
        ),
        (
            "mooncake.jsonl",
            '{"timestamp": 1000, "input_length": 374, "output_length": 44}\n{"timestamp": 2500, "input_length": 39, "output_length": 7}\n',
        ),
    ],
)
def test_published_traces_are_read(tmp_path: Path, file: str, content: str) -> None:
    path = tmp_path / file
    path.write_text(content)
    requests = workloads.load(f"trace:{path}")
    assert [(len(r.prompt_token_ids), r.max_tokens, r.arrival_s) for r in requests] == [(374, 44, 0.0), (39, 7, 1.5)]


def test_sharegpt_lengths_come_from_its_text(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([{"conversations": [{"from": "human", "value": "a" * 40}, {"from": "gpt", "value": "b" * 80}]}]))
    (request,) = workloads.load(f"trace:{path}")
    assert (len(request.prompt_token_ids), request.max_tokens) == (10, 20)


def test_a_trace_of_unknown_columns_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="columns"):
        workloads.load(f"trace:{path}")


def test_drive_records_each_token_once() -> None:
    left = {}
    requests = workloads.load("decode", count=5)

    def step() -> list[tuple[int, int]]:
        for request_id in list(left):
            left[request_id] -= 1
        done = [request_id for request_id, tokens in left.items() if tokens < 0]
        for request_id in done:
            del left[request_id]
        return [(request_id, 1) for request_id in left]

    records = drive(requests, lambda request: left.__setitem__(request.id, request.max_tokens), step, lambda: bool(left))
    assert [record.num_output_tokens for record in records] == [request.max_tokens for request in requests]
    assert all(record.first_token_s <= record.finished_s for record in records)


def test_a_static_batch_is_what_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one batch runs others arrive; the next one begins at its end and does not wait for those to come."""
    now_s = 100.0
    requests = [BenchRequest(i, [1], 4, arrival_s) for i, arrival_s in enumerate((0.0, 0.0, 0.0, 1.5, 1.6, 9.0))]
    batches: list[tuple[float, list[int]]] = []

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    def generate(batch: Sequence[BenchRequest]) -> None:
        batches.append((now_s - 100.0, [request.id for request in batch]))
        sleep(2.0)

    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: now_s, sleep=sleep))
    records = loop.in_batches(requests, 2, generate)
    assert batches == [(0.0, [0, 1]), (2.0, [2, 3]), (4.0, [4]), (9.0, [5])]
    assert [record.finished_s for record in records] == [2.0, 2.0, 4.0, 4.0, 6.0, 11.0]
    assert all(record.num_output_tokens == 4 for record in records)


def finished(identity: int, first_s: float, last_s: float, tokens: int) -> RequestRecord:
    return RequestRecord(identity, 10, 0.0, first_s, last_s, tokens)


def streamed(identity: int, *token_times_s: float) -> RequestRecord:
    return RequestRecord(identity, 10, 0.0, token_times_s[0], token_times_s[-1], len(token_times_s), list(token_times_s))


def test_figures_are_those_of_the_records() -> None:
    run = Run("x", [streamed(0, 1.0, 1.5, 3.0), streamed(1, 2.0, 2.5, 3.0, 3.5, 4.0)])
    figures = run.figures()
    assert figures["output_tokens_per_s"] == 2.0
    assert figures["ttft_ms_p50"] == 1500.0
    assert figures["e2e_ms_p50"] == 3500.0
    assert (figures["itl_ms_p50"], figures["itl_ms_p99"]) == (500.0, pytest.approx(1450.0)), "of the single gaps"


def test_step_figures_are_weighted_by_time() -> None:
    steps = [
        StepRecord(1.0, 1.0, 4, 0.0, 0.5, 0.2, {"model": 0.9, "sample": 0.1}, 36),
        StepRecord(5.0, 3.0, 8, 1.0, 0.9, 0.0, {"model": 2.3, "sample": 0.7}, 8),
    ]
    assert (
        Run("x", [finished(0, 1.0, 5.0, 3)], steps).figures().items()
        >= {
            "batch_size_mean": 7.0,
            "batch_size_peak": 8,
            "kv_usage_mean": pytest.approx(0.8),
            "kv_usage_peak": 0.9,
            "kv_waste_mean": pytest.approx(0.05),
            "kv_waste_peak": 0.2,
            "idle_share": 0.2,
            "mixed_share": 0.5,
            "model_share": pytest.approx(0.8),
            "sample_share": pytest.approx(0.2),
        }.items()
    )


def test_what_an_engine_does_not_tell_is_left_out() -> None:
    whole_answers = Run("x", [finished(0, 3.0, 3.0, 5)], [StepRecord(1.0, 1.0, 4)])
    assert not {"kv_usage_mean", "kv_waste_mean", "idle_share", "model_share", "mixed_share", "itl_ms_p50"} & whole_answers.figures().keys()
    assert "itl_ms_p50" not in Run("x", [finished(0, 1.0, 3.0, 5)]).figures(), "a mean over a request is no gap"
    assert "batch_size_mean" not in Run("x", [finished(0, 1.0, 3.0, 5)]).figures()


def test_a_run_survives_the_way_from_its_driver() -> None:
    run = Run("x", [finished(0, 1.0, 3.0, 5)], [StepRecord(1.0, 1.0, 4, 0.0, 0.5, 0.2)], "triton fused")
    assert Run.from_json(json.loads(json.dumps(run.to_json()))) == run


def test_percentile_interpolates() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([], 99) == 0.0


def test_ratio_is_taken_round_by_round() -> None:
    ours, theirs = ([Run("x", [finished(0, 1.0, last_s, 4)]) for last_s in seconds] for seconds in ((2.0, 4.0, 8.0), (4.0, 4.0, 4.0)))
    assert throughput_ratio(ours, theirs) == 1.0
    assert throughput_ratio(ours[:1], theirs[:1]) == 2.0
    assert throughput_ratio(ours[:1], theirs) == 2.0, "of a round that one did not come to nothing is said"


def test_the_batch_is_empty_while_nothing_runs() -> None:
    steps = [StepRecord(1.0, 1.0, 4), StepRecord(2.0, 0.9, 2), StepRecord(9.0, 1.0, 1)]
    course = plots.batch_sizes(Run("x", [finished(0, 1.0, 9.0, 5)], steps))
    assert course == [(0.0, 4), (pytest.approx(1.1), 2), (2.0, 0), (8.0, 1), (9.0, 0)]


def test_without_steps_the_batch_is_who_is_between_first_token_and_last() -> None:
    records = [finished(0, 1.0, 3.0, 5), finished(1, 2.0, 4.0, 5), finished(2, 9.0, 9.0, 5)]
    assert plots.batch_sizes(Run("x", records)) == [(1.0, 1), (2.0, 2), (3.0, 1), (4.0, 0)]


def results(caps: Sequence[int], rates: Sequence[float]) -> Results:
    """Of two engines, one that tells its steps and one that gives whole answers; two rounds."""
    told = Run("told", [finished(0, 1.0, 2.0, 4)], [StepRecord(2.0, 2.0, 1, 0.0, 0.5, 0.1)])
    runs = {"told": [told] * 2, "whole": [Run("whole", [finished(0, 4.0, 4.0, 4)])] * 2}
    return dict.fromkeys(workloads.scenarios(workloads.load("mixed", count=1), caps, rates), runs)


SWEEPS = [((), ()), ((8, 16, 32), ()), ((), (1.0, 2.0)), ((8, 16), (1.0, 2.0))]


@pytest.mark.parametrize(("caps", "rates"), SWEEPS)
def test_every_scenario_and_engine_has_its_row_within_130_columns(caps: Sequence[int], rates: Sequence[float]) -> None:
    found = results(caps, rates)
    console = Console(width=130, record=True, file=io.StringIO())
    console.print(report.tables("title", found))
    lines = [line for line in console.export_text().splitlines() if line.startswith("│")]
    for scenario in found:
        for engine in ("told", "whole"):
            rows = [line for line in lines if f" {engine} " in line and scenario.label in line]
            assert len(rows) == 2, "one row of throughput, one of latencies"
    assert not [line for line in lines if "…" in line]
    entries = report.to_json(found)
    assert [(entry["output_cap"], entry["rate"]) for entry in entries] == [(scenario.output_cap, scenario.rate) for scenario in found]
    assert entries[0]["engines"]["whole"]["median"]["ratio"] == 0.5
    assert len(entries[0]["engines"]["told"]["rounds"]) == 2


@pytest.mark.parametrize(("caps", "rates"), SWEEPS)
def test_sweeps_are_drawn(tmp_path: Path, caps: Sequence[int], rates: Sequence[float]) -> None:
    found = results(caps, rates)
    throughput, latency, batch = plots.panels(found)
    lines = [series for series in throughput.series if series.style == "line"]
    assert len(lines) == (2 * max(1, len(rates)) if caps else 2 if rates else 0)
    assert [list(series.x) for series in lines] == [list(caps or rates)] * len(lines)
    assert len(latency.series) == 2 * max(1, len(rates))
    assert [series.label for series in batch.series] == ["told"]
    draw("title", [throughput, latency, batch], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def shown(found: Results) -> str:
    console = Console(width=130, record=True, file=io.StringIO())
    console.print(report.tables("title", found))
    return " ".join(console.export_text().split())


def test_the_kernels_that_served_are_shown_and_a_slow_one_is_told() -> None:
    (runs,) = results((), ()).values()
    served = {
        name: [replace(run, kernels=kernels) for run in runs[name]] for name, kernels in (("told", "triton fused"), ("whole", "torch"))
    }
    found = dict.fromkeys(results((), ()), served)
    assert "kernels of told: triton fused; kernels of whole: torch" in shown(found)
    assert report.served_by_reference(found) == ["whole"]
    assert report.to_json(found)[0]["engines"]["told"]["kernels"] == "triton fused"
    assert "kernels" not in shown(results((), ()))


@pytest.mark.parametrize(("caps", "rates"), SWEEPS)
def test_what_was_measured_before_an_early_end_is_shown_and_drawn(tmp_path: Path, caps: Sequence[int], rates: Sequence[float]) -> None:
    """In its second round the first engine has run the first scenario; in the first round the second one has not run the last."""
    found = {scenario: dict(runs) for scenario, runs in results(caps, rates).items()}
    first, *_, last = [*found, *found]
    found[first]["whole"] = found[first]["whole"][:1]
    found[last] = {"told": found[last]["told"][:1]}
    assert "told" in shown(found)
    draw("title", plots.panels(found), tmp_path / "plot.png")
    assert "whole" not in report.to_json(found)[-1]["engines"]


def test_the_engine_driver_tells_steps_and_kv_cache() -> None:
    requests = [BenchRequest(i, [1 + i] * 20, max_tokens) for i, max_tokens in enumerate((4, 9))]
    run = headrace.run(tiny_engine(num_blocks=8), requests)
    assert [record.num_output_tokens for record in run.records] == [4, 9]
    assert all(len(record.token_times_s) == record.num_output_tokens for record in run.records)
    assert [step.batch_size for step in run.steps] == [2] * 4 + [1] * 5
    assert max(step.kv_usage or 0.0 for step in run.steps) == 0.5
    assert {"idle_share", "kv_waste_mean", "model_share", "mixed_share"} <= run.figures().keys()


def test_a_request_that_fails_ends_the_run() -> None:
    with pytest.raises(ContextLengthExceeded):
        headrace.run(tiny_engine(num_blocks=1), [BenchRequest(0, [1] * 20, 4)])


def test_text_of_another_vocabulary_ends_the_run() -> None:
    with pytest.raises(InvalidRequest):
        headrace.run(tiny_engine(), [BenchRequest(0, [1, VOCAB_SIZE], 4)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engine", "vllm"], "--vllm-python"),
        (["--workload", "trace:nowhere.csv"], "nowhere.csv"),
        (["--workload", "other"], "unknown workload"),
        (["--rate", "0"], "--rate"),
        (["--model", "/nowhere"], "no such folder"),
    ],
)
def test_what_cannot_be_run_is_said_so(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(cli.bench, arguments)
    assert done.exit_code
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("engines", "compare_all", "vllm_python", "names"),
    [
        ((), False, None, ["headrace"]),
        ((), False, "python", ["headrace", "vllm"]),
        (("vllm",), False, "python", ["vllm"]),
        (("static", "queue"), False, None, ["static", "queue"]),
        (("static",), True, "python", ["static", *(name for name in cli.COMPARED if name != "static"), "vllm"]),
    ],
)
def test_engines_are_those_asked_for_in_their_order(
    engines: tuple[str, ...], compare_all: bool, vllm_python: str | None, names: list[str]
) -> None:
    assert cli._names(engines, compare_all, vllm_python) == names


@pytest.mark.parametrize(("workload", "cached"), [("mixed", False), ("shared-prefix", True)])
def test_prefix_caches_are_on_for_the_prefixes_that_are_shared(monkeypatch: pytest.MonkeyPatch, workload: str, cached: bool) -> None:
    specs: list[EngineSpec] = []

    def compare(given: Sequence[EngineSpec], *_: object, **__: object) -> Iterator[tuple[Scenario, Run]]:
        specs.extend(given)
        yield from ((scenario, run) for scenario, engines in results((), ()).items() for runs in engines.values() for run in runs)

    monkeypatch.setattr(cli, "compare", compare)
    done = CliRunner().invoke(cli.bench, ["--workload", workload, "--compare", "--vllm-python", sys.executable])
    assert done.exit_code == 0, done.stderr
    assert {spec.name: spec.settings["enable_prefix_caching"] for spec in specs} == dict.fromkeys(cli.ENGINES, cached)
    assert ("prefix caches on" in done.stdout) == cached


def test_the_cache_is_two_gibibytes_on_a_cpu_and_a_tenth_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli._default_kv_memory() == 2 << 30
    monkeypatch.setattr("worker.engine.model_loader.choose_device", lambda _: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 << 30))
    assert cli._default_kv_memory() == 8 << 30


def test_each_engine_gets_the_dtype_that_it_computes_fast_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.engine.model_loader.computes_bfloat16", lambda _: False)
    options = cli.bench.make_context("bench", []).params | {"enable_prefix_caching": False}
    given = {name: cli._spec(name, options, None, []).settings["dtype"] for name in ("headrace", "queue", "naive")}
    assert given == {"headrace": "auto", "queue": "auto", "naive": "float32"}
    assert cli._device_dtype("bfloat16") == "bfloat16"
