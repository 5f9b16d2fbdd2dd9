from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import CollectorRegistry

import producer
from producer.keys import Tier
from worker.engine.scheduler import SchedulerStats
from worker.engine.step import StepStats
from worker.metrics import FAILURE_CODES, RequestStats, Series, WorkerMetrics

NOBODY: dict[Tier, int] = {"realtime": 0, "batch": 0}
VLLM_NAMES = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "request_success_total",
    "num_preemptions_total",
    "iteration_tokens_total_bucket",
    "time_to_first_token_seconds_bucket",
    "inter_token_latency_seconds_bucket",
    "e2e_request_latency_seconds_bucket",
    "request_queue_time_seconds_bucket",
    "request_prefill_time_seconds_bucket",
    "request_decode_time_seconds_bucket",
)


@pytest.fixture
def metrics() -> WorkerMetrics:
    return WorkerMetrics("gpu0", sources=["search", "chat"])


def value(metrics: WorkerMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value("headrace:" + name, {"worker": "gpu0", **labels})


def sample_names(metrics: WorkerMetrics) -> set[str]:
    return {sample.name for family in metrics.registry.collect() for sample in family.samples}


@pytest.mark.parametrize("name", VLLM_NAMES)
def test_dashboards_for_vllm_find_their_names_before_the_first_request(metrics: WorkerMetrics, name: str) -> None:
    assert "headrace:" + name in sample_names(metrics)


def test_every_series_but_the_info_names_its_worker_and_starts_at_zero(metrics: WorkerMetrics) -> None:
    samples = [sample for family in metrics.registry.collect() for sample in family.samples]
    assert samples
    for sample in samples:
        assert sample.labels["worker"] == "gpu0"
        assert sample.value == 0, sample.name


def test_text_exposition_is_parsed_back_with_the_values_that_went_in(metrics: WorkerMetrics) -> None:
    metrics.serving("SmolLM2", "cpu", "bfloat16")
    metrics.step(StepStats(seconds=0.04, idle_seconds=0.01, batch_size=3, num_tokens=40))
    families = {family.name: family for family in text_string_to_metric_families(generate_latest(metrics.registry).decode())}
    (info,) = families["headrace:worker_info"].samples
    assert (info.labels["model_name"], info.labels["device"], info.labels["dtype"], info.value) == ("SmolLM2", "cpu", "bfloat16", 1)
    buckets = {s.labels["le"]: s.value for s in families["headrace:batch_size"].samples if s.name.endswith("_bucket")}
    assert (buckets["2.0"], buckets["4.0"], buckets["+Inf"]) == (0, 1, 1)


def test_a_reload_replaces_the_model_that_the_worker_is_said_to_serve(metrics: WorkerMetrics) -> None:
    metrics.serving("old", "cpu", "float32")
    metrics.serving("new", "cpu", "float32")
    models = [s.labels["model_name"] for f in metrics.registry.collect() if f.name == "headrace:worker_info" for s in f.samples]
    assert models == ["new"]


def test_weighted_observations_give_what_prometheus_own_histogram_gives_one_by_one() -> None:
    bounds = (0.01, 0.1, 1.0)
    registry = CollectorRegistry()
    theirs = Histogram("itl", "", buckets=bounds, registry=registry)
    ours = Series(bounds)
    for seconds, count in ((0.005, 3), (0.01, 2), (0.010001, 1), (0.5, 7), (3.0, 2)):
        ours.observe(seconds, count)
        for _ in range(count):
            theirs.observe(seconds)
    buckets, total = ours.snapshot()
    assert [count for _, count in buckets] == [registry.get_sample_value("itl_bucket", {"le": le}) for le, _ in buckets]
    assert total == pytest.approx(registry.get_sample_value("itl_sum"))


def test_a_step_is_counted_with_its_parts_and_the_idle_time_before_it(metrics: WorkerMetrics) -> None:
    for _ in range(2):
        metrics.step(StepStats(0.03, 0.01, batch_size=12, num_tokens=100, phase_seconds={"model": 0.02, "sample": 0.005}))
    assert value(metrics, "engine_busy_seconds_total") == pytest.approx(0.06)
    assert value(metrics, "engine_idle_seconds_total") == pytest.approx(0.02)
    assert value(metrics, "step_time_seconds_count") == 2
    assert [value(metrics, "step_phase_seconds_total", phase=phase) for phase in ("model", "sample", "wait")] == pytest.approx(
        [0.04, 0.01, 0]
    )
    assert value(metrics, "batch_size_sum") == 24
    assert value(metrics, "iteration_tokens_total_sum") == 200


def test_scheduler_counts_are_added_up_across_a_reload_that_restarts_them(metrics: WorkerMetrics) -> None:
    first = SchedulerStats(running_batch=2, used_blocks=30, free_blocks=10, total_blocks=40, prefix_queries=100, prefix_hits=60)
    metrics.scheduler(first, NOBODY)
    metrics.scheduler(SchedulerStats(waiting_realtime=1, total_blocks=40, prefix_queries=150, prefix_hits=60, swap_preemptions=2), NOBODY)
    metrics.scheduler(SchedulerStats(total_blocks=80, prefix_queries=20, prefix_hits=5, recompute_preemptions=1), NOBODY)
    assert value(metrics, "prefix_cache_queries_total") == 170
    assert value(metrics, "prefix_cache_hits_total") == 65
    assert value(metrics, "num_preemptions_total", kind="swap") == 2
    assert value(metrics, "num_preemptions_total", kind="recompute") == 1


def test_scheduler_state_is_shown_by_tier_and_blocks_as_a_share(metrics: WorkerMetrics) -> None:
    stats = SchedulerStats(running_realtime=4, waiting_batch=9, used_blocks=30, cached_blocks=6, free_blocks=4, total_blocks=40)
    metrics.scheduler(stats, {"realtime": 3, "batch": 1})
    assert value(metrics, "num_requests_running", tier="realtime") == 4
    assert value(metrics, "num_requests_waiting", tier="batch") == 10
    assert value(metrics, "num_requests_waiting", tier="realtime") == 3
    assert value(metrics, "kv_cache_usage_perc") == 0.75
    assert value(metrics, "kv_cache_blocks", state="cached") == 6


def test_success_is_counted_by_finish_reason_and_failure_by_code(metrics: WorkerMetrics) -> None:
    metrics.request_finished(RequestStats(tier="realtime", finish_reason="length", e2e_seconds=2.0, queue_seconds=0.1))
    metrics.request_finished(RequestStats(tier="batch", error_code="DEADLINE_EXCEEDED"))
    assert value(metrics, "request_success_total", tier="realtime", finished_reason="length") == 1
    assert value(metrics, "request_failure_total", tier="batch", code="DEADLINE_EXCEEDED") == 1
    assert value(metrics, "e2e_request_latency_seconds_count", tier="realtime") == 1
    assert value(metrics, "request_decode_time_seconds_count", tier="realtime") == 0


def test_sources_and_codes_that_nobody_listed_make_no_series(metrics: WorkerMetrics) -> None:
    before = len(list(metrics.registry.collect())), len(generate_latest(metrics.registry).splitlines())
    for i in range(100):
        metrics.request_finished(RequestStats(tier="batch", source=f"user-{i}", error_code=f"CODE_{i}", generation_tokens=2))
    metrics.request_finished(RequestStats(tier="batch", source="search", finish_reason="stop", generation_tokens=5))
    assert (len(list(metrics.registry.collect())), len(generate_latest(metrics.registry).splitlines())) == before
    assert value(metrics, "source_requests_total", source="other") == 100
    assert value(metrics, "source_generation_tokens_total", source="other") == 200
    assert value(metrics, "source_generation_tokens_total", source="search") == 5
    assert value(metrics, "request_failure_total", tier="batch", code="other") == 100


def test_failures_are_exported_by_the_codes_that_a_frame_may_carry() -> None:
    page = Path(producer.__file__).with_name("PROTOCOL.md").read_text(encoding="utf-8")
    codes = re.findall(r"^\| `([A-Z_]+)` \| (?:yes|no) \| (?!.*never in a frame)", page, re.MULTILINE)
    assert set(FAILURE_CODES) == set(codes)


def test_stream_events_are_counted(metrics: WorkerMetrics) -> None:
    metrics.queue("batch", depth=70, pending=30, oldest_age_seconds=12.5)
    metrics.lease_renewed(30)
    metrics.lease_lost()
    metrics.resumed(41)
    metrics.redis_round_trip(0.0004)
    metrics.tokens("batch", prompt=100, generation=3)
    metrics.first_token("batch", 0.2)
    metrics.inter_token("batch", 0.04, 30)
    assert value(metrics, "queue_depth", tier="batch") == 70
    assert value(metrics, "queue_pending", tier="batch") == 30
    assert value(metrics, "queue_oldest_age_seconds", tier="batch") == 12.5
    assert value(metrics, "lease_renewals_total") == 30
    assert value(metrics, "lease_losses_total") == 1
    assert (value(metrics, "resumes_total"), value(metrics, "resume_tokens_saved_total")) == (1, 41)
    assert value(metrics, "redis_round_trip_seconds_count") == 1
    assert (value(metrics, "prompt_tokens_total", tier="batch"), value(metrics, "generation_tokens_total", tier="batch")) == (100, 3)
    assert value(metrics, "time_to_first_token_seconds_sum", tier="batch") == 0.2
    assert value(metrics, "inter_token_latency_seconds_count", tier="batch") == 30


def test_device_memory_is_read_when_it_is_asked_for(metrics: WorkerMetrics) -> None:
    taken = {"allocated": 2.0**30, "reserved": 2.0**31, "total": 2.0**36}
    metrics.watch_memory(lambda kind: taken[kind])
    assert value(metrics, "device_memory_bytes", kind="allocated") == 2**30
    taken["allocated"] = 5.0
    assert value(metrics, "device_memory_bytes", kind="allocated") == 5


def test_metrics_load_neither_torch_nor_redis() -> None:
    code = "import sys, worker.metrics, worker.health; print(sorted({'torch', 'redis', 'transformers'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
