import json
from pathlib import Path

import pytest

from producer.load.stats import RequestRecord, percentile
from worker.bench import report, workloads
from worker.bench.drivers.loop import drive
from worker.bench.records import Run


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


def test_outputs_can_be_capped() -> None:
    assert max(request.max_tokens for request in workloads.load("anyscale", output_cap=32)) == 32


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


def finished(identity: int, first_s: float, last_s: float, tokens: int) -> RequestRecord:
    return RequestRecord(identity, 10, 0.0, first_s, last_s, tokens)


def test_figures_are_those_of_the_records() -> None:
    run = Run("x", [finished(0, 1.0, 3.0, 3), finished(1, 2.0, 4.0, 5)])
    figures = run.figures()
    assert figures["output_tokens_per_s"] == 2.0
    assert figures["ttft_ms_p50"] == 1500.0
    assert figures["e2e_ms_p50"] == 3500.0
    assert figures["itl_ms_p50"] == 750.0


def test_percentile_interpolates() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([], 99) == 0.0


def test_ratio_is_taken_round_by_round_and_plot_is_drawn(tmp_path: Path) -> None:
    runs = {"a": [Run("a", [finished(0, 1.0, 2.0, 4)])], "b": [Run("b", [finished(0, 1.0, 4.0, 4)])]}
    assert report.throughput_ratio(runs["b"], runs["a"]) == 0.5
    report.plot(tmp_path / "plot.png", "two engines", runs)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
