"""What a worker exports to Prometheus.

Names have vLLM's suffixes under ``headrace:``, so that its dashboards can be reused. Label values are bounded:
``worker`` is this process's own name; ``tier``, ``code``, ``finished_reason``, ``kind`` and ``state`` are closed sets;
``source``, which callers choose, is counted under its own name only if the operator lists it.

A request counts in the tier in which it is served, which a route may have chosen; metrics of the queue are by stream.

Every series is made and bound, at zero, when `WorkerMetrics` is made: an update is an addition under a lock, with no lookup
of labels, and a rate is right from the first event on.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from producer import __version__
from producer.errors import BY_CODE, CLIENTS_OWN
from producer.keys import TIERS, Tier
from producer.wire import FinishReason
from worker.engine.scheduler import SchedulerStats
from worker.engine.step import StepStats
from worker.engine.step_clock import PHASES

PREFIX = "headrace:"
OTHER = "other"  # the label of sources that are not listed, and of unknown codes
FAILURE_CODES = tuple(code for code, cls in BY_CODE.items() if cls not in CLIENTS_OWN)
FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length")
BLOCK_STATES = ("free", "cached", "used")

MemoryKind = Literal["allocated", "reserved", "total"]
MEMORY_KINDS: tuple[MemoryKind, ...] = ("allocated", "reserved", "total")
PreemptionKind = Literal["recompute", "swap"]
PREEMPTION_KINDS: tuple[PreemptionKind, ...] = ("recompute", "swap")

FIRST_TOKEN_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 2, 3, 5, 10, 20, 60, 120, 300, 600)
BETWEEN_TOKENS_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 5)
REQUEST_SECONDS = (0.01, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600)
STEP_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5, 10)
ROUND_TRIP_SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 80, 100, 128, 192, 256)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Series:
    """One labelled line of a `Distribution`."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._lock = Lock()

    def observe(self, value: float, count: int = 1) -> None:
        """Add ``count`` observations of ``value``."""
        bucket = bisect_left(self._bounds, value)
        with self._lock:
            self._counts[bucket] += count
            self._sum += value * count

    def snapshot(self) -> tuple[list[tuple[str, float]], float]:
        """The cumulative counts as (upper bound, count), ``+Inf`` last, and the sum."""
        with self._lock:
            counts, total = list(self._counts), self._sum
        buckets, seen = [], 0
        for bound, count in zip((*self._bounds, math.inf), counts, strict=True):
            seen += count
            buckets.append(("+Inf" if bound == math.inf else repr(float(bound)), float(seen)))
        return buckets, total


class Distribution(Collector):
    """A Prometheus histogram whose observations carry a weight.

    A decode step gives every request of the batch its next token at the same moment. That is one observation with the batch
    size as its weight, which ``prometheus_client.Histogram`` could only take one by one.
    """

    def __init__(self, name: str, documentation: str, labels: Sequence[str], bounds: Sequence[float]) -> None:
        self._name, self._documentation, self._labels, self._bounds = name, documentation, labels, bounds
        self._series: dict[tuple[str, ...], Series] = {}

    def labels(self, *values: str) -> Series:
        """The series of these label values, made when first asked for."""
        assert len(values) == len(self._labels)
        return self._series.setdefault(values, Series(self._bounds))

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._documentation, labels=self._labels)
        for values, series in list(self._series.items()):
            buckets, total = series.snapshot()
            family.add_metric(values, buckets, total)
        yield family


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStats:
    """One request's figures at its end; the time of a phase that it never reached is None.

    Attributes:
        finish_reason: of a success; None for a failure, which has ``error_code``, its wire code.
        e2e_seconds: from enqueueing to the last token.
        queue_seconds: from enqueueing to its first step.
        prefill_seconds: from its first step to its first token.
        decode_seconds: from its first token to its last.
    """

    tier: Tier
    source: str = ""
    finish_reason: FinishReason | None = None
    error_code: str | None = None
    generation_tokens: int = 0
    e2e_seconds: float | None = None
    queue_seconds: float | None = None
    prefill_seconds: float | None = None
    decode_seconds: float | None = None


class _Factory:
    """Makes metrics in one registry, each with its children bound and ``worker`` as the first label."""

    def __init__(self, registry: CollectorRegistry, worker: str) -> None:
        self._registry, self._worker = registry, worker

    def counter(self, name: str, documentation: str) -> Counter:
        return Counter(PREFIX + name, documentation, ["worker"], registry=self._registry).labels(self._worker)

    def counters(self, name: str, documentation: str, label: str, values: Iterable[str]) -> dict[str, Counter]:
        family = Counter(PREFIX + name, documentation, ["worker", label], registry=self._registry)
        return {value: family.labels(self._worker, value) for value in values}

    def counters_by_tier(self, name: str, documentation: str, label: str, values: Collection[str]) -> dict[tuple[str, str], Counter]:
        family = Counter(PREFIX + name, documentation, ["worker", "tier", label], registry=self._registry)
        return {(tier, value): family.labels(self._worker, tier, value) for tier in TIERS for value in values}

    def gauge(self, name: str, documentation: str) -> Gauge:
        return Gauge(PREFIX + name, documentation, ["worker"], registry=self._registry).labels(self._worker)

    def gauges(self, name: str, documentation: str, label: str, values: Iterable[str]) -> dict[str, Gauge]:
        family = Gauge(PREFIX + name, documentation, ["worker", label], registry=self._registry)
        return {value: family.labels(self._worker, value) for value in values}

    def distribution(self, name: str, documentation: str, bounds: Sequence[float]) -> Series:
        return self._register(name, documentation, ["worker"], bounds).labels(self._worker)

    def distributions(self, name: str, documentation: str, bounds: Sequence[float]) -> dict[str, Series]:
        family = self._register(name, documentation, ["worker", "tier"], bounds)
        return {tier: family.labels(self._worker, tier) for tier in TIERS}

    def _register(self, name: str, documentation: str, labels: Sequence[str], bounds: Sequence[float]) -> Distribution:
        family = Distribution(PREFIX + name, documentation, labels, bounds)
        self._registry.register(family)
        return family


class WorkerMetrics:
    """One worker's metrics, in a registry of their own; every method may be called from any thread.

    Args:
        worker: the worker's name, label ``worker`` of every series.
        sources: the request sources counted by name; all others are counted as ``other``.
    """

    def __init__(self, worker: str, sources: Collection[str] = ()) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # untyped in prometheus_client; no `_created` series beside each
        self.registry = CollectorRegistry()
        make = _Factory(self.registry, worker)
        self._worker = worker
        self._make_engine(make)
        self._make_requests(make, sources)
        self._make_stream(make)
        self._counted = SchedulerStats()

    def _make_engine(self, make: _Factory) -> None:
        info_labels = ["worker", "model_name", "device", "dtype", "version"]
        self._info = Gauge(PREFIX + "worker_info", "What this worker serves; always 1.", info_labels, registry=self.registry)
        self._running = make.gauges("num_requests_running", "Requests in the batch, by the tier in which they are served.", "tier", TIERS)
        self._waiting = make.gauges(
            "num_requests_waiting", "Requests that the worker holds outside the batch; those not begun, by stream.", "tier", TIERS
        )
        self._kv_usage = make.gauge("kv_cache_usage_perc", "Share of KV cache blocks in use by requests; 1 means all.")
        self._blocks = make.gauges("kv_cache_blocks", "KV cache blocks by state.", "state", BLOCK_STATES)
        self._memory = make.gauges("device_memory_bytes", "Memory of the device, by kind.", "kind", MEMORY_KINDS)
        self._prefix_queries = make.counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._prefix_hits = make.counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._preemptions = make.counters("num_preemptions", "Requests preempted from the batch.", "kind", PREEMPTION_KINDS)
        self._busy = make.counter("engine_busy_seconds", "Time the engine spent in steps.")
        self._stalled = make.gauge("engine_stalled_seconds", "Time since the engine last showed progress; 0 while it has no work.")
        self._idle = make.counter("engine_idle_seconds", "Time in which the device did nothing while requests waited for it.")
        self._phases = make.counters("step_phase_seconds", "Time the engine's thread spent on a part of its steps.", "phase", PHASES)
        self._step_time = make.distribution("step_time_seconds", "Length of a step.", STEP_SECONDS)
        self._batch_size = make.distribution("batch_size", "Requests in a step.", BATCH_SIZES)
        self._step_tokens = make.distribution("iteration_tokens_total", "Tokens computed in a step.", STEP_TOKENS)

    def _make_requests(self, make: _Factory, sources: Collection[str]) -> None:
        self._prompt_tokens = make.counters("prompt_tokens", "Prompt tokens of the requests begun.", "tier", TIERS)
        self._generation_tokens = make.counters("generation_tokens", "Tokens generated.", "tier", TIERS)
        self._success = make.counters_by_tier("request_success", "Requests that succeeded.", "finished_reason", FINISH_REASONS)
        self._failure = make.counters_by_tier("request_failure", "Requests answered with an error.", "code", [*FAILURE_CODES, OTHER])
        named = [*dict.fromkeys([*sources, OTHER])]
        self._source_requests = make.counters("source_requests", "Requests ended, by source.", "source", named)
        self._source_tokens = make.counters("source_generation_tokens", "Tokens generated, by source.", "source", named)
        self._ttft = make.distributions("time_to_first_token_seconds", "From enqueueing to the first token.", FIRST_TOKEN_SECONDS)
        self._itl = make.distributions("inter_token_latency_seconds", "From one token to the next.", BETWEEN_TOKENS_SECONDS)
        self._e2e = make.distributions("e2e_request_latency_seconds", "From enqueueing to the last token.", REQUEST_SECONDS)
        self._queue_time = make.distributions("request_queue_time_seconds", "From enqueueing to the first step.", REQUEST_SECONDS)
        self._prefill_time = make.distributions("request_prefill_time_seconds", "From first step to first token.", REQUEST_SECONDS)
        self._decode_time = make.distributions("request_decode_time_seconds", "From first token to last.", REQUEST_SECONDS)

    def _make_stream(self, make: _Factory) -> None:
        self._redis_up = make.gauge("redis_up", "1 while Redis serves the worker, 0 while it is waited out.")
        self._queue_depth = make.gauges("queue_depth", "Requests on the tier's stream that no worker has taken.", "tier", TIERS)
        self._queue_pending = make.gauges("queue_pending", "Requests on the tier's stream that some worker holds.", "tier", TIERS)
        self._oldest = make.gauges(
            "queue_oldest_age_seconds", "Age of the oldest request on the tier's stream that no worker has taken.", "tier", TIERS
        )
        self._renewals = make.counter("lease_renewals", "Leases renewed, one per request.")
        self._losses = make.counter("lease_losses", "Leases found to belong to another worker.")
        self._resumes = make.counter("resumes", "Requests continued from the tokens of an earlier attempt.")
        self._saved = make.counter("resume_tokens_saved", "Tokens of earlier attempts that were not generated again.")
        self._round_trip = make.distribution(
            "redis_round_trip_seconds",
            "Round trips of the ledger's scripts: begin, publish, finish, renew, hand back, reap.",
            ROUND_TRIP_SECONDS,
        )

    def serving(self, model: str, device: str, dtype: str) -> None:
        """Set what the worker serves; called again after a reload."""
        self._info.clear()
        self._info.labels(self._worker, model, device, dtype, __version__).set(1)

    def scheduler(self, stats: SchedulerStats, ahead: Mapping[Tier, int]) -> None:
        """Show the scheduler's state and, by tier, how many requests wait ahead of it; add what it has counted since the last call.

        A new scheduler's counts start at zero.
        """
        self._running["realtime"].set(stats.running_realtime)
        self._running["batch"].set(stats.running_batch)
        self._waiting["realtime"].set(stats.waiting_realtime + ahead["realtime"])
        self._waiting["batch"].set(stats.waiting_batch + ahead["batch"])
        self._kv_usage.set(stats.kv_usage)
        for state, blocks in zip(BLOCK_STATES, (stats.free_blocks, stats.cached_blocks, stats.used_blocks), strict=True):
            self._blocks[state].set(blocks)
        before, self._counted = self._counted, stats
        _count(self._prefix_queries, before.prefix_queries, stats.prefix_queries)
        _count(self._prefix_hits, before.prefix_hits, stats.prefix_hits)
        _count(self._preemptions["recompute"], before.recompute_preemptions, stats.recompute_preemptions)
        _count(self._preemptions["swap"], before.swap_preemptions, stats.swap_preemptions)

    def step(self, step: StepStats) -> None:
        """Count one step, and the time before it in which the device did nothing although requests waited."""
        self._busy.inc(step.seconds)
        self._idle.inc(step.idle_seconds)
        self._step_time.observe(step.seconds)
        self._batch_size.observe(step.batch_size)
        self._step_tokens.observe(step.num_tokens)
        for phase, seconds in step.phase_seconds.items():
            self._phases[phase].inc(seconds)

    def tokens(self, tier: Tier, *, prompt: int = 0, generation: int = 0) -> None:
        """Count tokens of one tier; a prompt once, when its request begins."""
        self._prompt_tokens[tier].inc(prompt)
        self._generation_tokens[tier].inc(generation)

    def first_token(self, tier: Tier, seconds: float) -> None:
        """``seconds`` since the request was enqueued."""
        self._ttft[tier].observe(seconds)

    def inter_token(self, tier: Tier, seconds: float, count: int = 1) -> None:
        """``count`` requests got their next token ``seconds`` after the one before."""
        self._itl[tier].observe(seconds, count)

    def request_finished(self, request: RequestStats) -> None:
        """Count one request that got its final reply."""
        tier = request.tier
        if request.finish_reason is not None:
            self._success[tier, request.finish_reason].inc()
        else:
            self._failure[tier, request.error_code if request.error_code in FAILURE_CODES else OTHER].inc()
        source = request.source if request.source in self._source_requests else OTHER
        self._source_requests[source].inc()
        self._source_tokens[source].inc(request.generation_tokens)
        for family, seconds in (
            (self._e2e, request.e2e_seconds),
            (self._queue_time, request.queue_seconds),
            (self._prefill_time, request.prefill_seconds),
            (self._decode_time, request.decode_seconds),
        ):
            if seconds is not None:
                family[tier].observe(seconds)

    def redis(self, *, up: bool) -> None:
        """Show whether Redis serves the worker; if not, the queue's figures are unknown and shown as NaN."""
        if not up:
            for tier in TIERS:
                self.queue(tier, depth=math.nan, pending=math.nan, oldest_age_seconds=math.nan)
        self._redis_up.set(up)  # last: a reader that sees it down sees no stale figures

    def queue(self, tier: Tier, *, depth: float, pending: float, oldest_age_seconds: float) -> None:
        """Show a tier's stream as the worker last saw it; every worker of the queue shows the same."""
        self._queue_depth[tier].set(depth)
        self._queue_pending[tier].set(pending)
        self._oldest[tier].set(oldest_age_seconds)

    def watch_stall(self, read: Callable[[], float]) -> None:
        """Call ``read`` at every scrape, in the scraper's thread, for how long the engine has stalled, in seconds."""
        self._stalled.set_function(read)

    def watch_memory(self, read: Callable[[MemoryKind], float]) -> None:
        """Call ``read`` at every scrape, in the scraper's thread, for the device's memory, in bytes."""
        for kind in MEMORY_KINDS:
            self._memory[kind].set_function(partial(read, kind))

    def lease_renewed(self, count: int) -> None:
        self._renewals.inc(count)

    def lease_lost(self, count: int = 1) -> None:
        self._losses.inc(count)

    def resumed(self, tokens_saved: int) -> None:
        """Count a request that continues from ``tokens_saved`` tokens of an earlier attempt."""
        self._resumes.inc()
        self._saved.inc(tokens_saved)

    def redis_round_trip(self, seconds: float) -> None:
        self._round_trip.observe(seconds)


def _count(counter: Counter, before: int, now: int) -> None:
    counter.inc(now - before if now >= before else now)
