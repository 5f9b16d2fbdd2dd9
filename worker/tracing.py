"""A trace of each request, made at its end from times that are recorded anyway: no step waits for it.

Times are Redis's, as everywhere in a request's life. Attribute names are those of OpenTelemetry's conventions for
generative AI, and vLLM's own in addition. They hold no user text.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from producer import __version__
from producer.errors import HeadraceError
from producer.keys import GROUP
from producer.wire import Result
from worker.config import WorkerConfig
from worker.registry import ActiveRequest, Start
from worker.stream.ledger import Outcome

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

FLUSH_S = 3.0  # how long an ending worker tries to send its last traces
MAX_FIELD_BYTES = 512  # of traceparent, and of tracestate; longer ones are ignored
_OPERATIONS = {"generate": "text_completion", "score": "text_completion", "embed": "embeddings"}


@contextmanager
def exporting_to(url: str, config: WorkerConfig) -> Iterator[RequestTracer]:
    """Send traces to ``url`` as OTLP over HTTP, in batches and from a thread of their own; the end of the ``with`` waits up to
    `FLUSH_S` for the last ones.

    Raises:
        ValueError: the URL is not an HTTP one, or ``headrace[otel]`` is not installed.
    """
    if urlsplit(url).scheme not in ("http", "https"):
        raise ValueError("otlp_traces_endpoint must be a URL of HTTP, such as http://collector:4318/v1/traces")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ValueError(f"headrace[otel] is not installed ({error.name} is missing), and otlp_traces_endpoint needs it") from None
    service = os.environ.get("OTEL_SERVICE_NAME", "headrace-worker")
    resource = Resource.create({"service.name": service, "service.instance.id": config.name})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
    try:
        yield RequestTracer(provider, config.queue)
    finally:
        ending = threading.Thread(target=provider.shutdown, daemon=True)
        ending.start()
        ending.join(FLUSH_S)


class RequestTracer:
    """Makes the spans of one worker's requests."""

    def __init__(self, provider: TracerProvider, queue: str) -> None:
        self._tracer = provider.get_tracer("headrace", __version__)
        self._queue = queue
        logging.getLogger("opentelemetry.trace.span").setLevel(logging.ERROR)  # it would log malformed text of the caller's

    def record(self, active: ActiveRequest, became: Outcome) -> None:
        """A span from enqueueing to now, and within it one for each phase that the request reached."""
        from opentelemetry import trace

        start = active.start
        if start is None:  # ended before it was begun
            return
        now_s = time.monotonic()
        parent = _carried_context(active.delivery.fields)
        attributes = self._attributes(active, now_s) | {"headrace.outcome": became}
        span = self._tracer.start_span("llm_request", parent, trace.SpanKind.CONSUMER, attributes, start_time=start.enqueued_ms * 1_000_000)
        within = trace.set_span_in_context(span)
        for name, (from_ns, to_ns) in _parts(active, start).items():
            self._tracer.start_span(name, within, start_time=from_ns).end(to_ns)
        if isinstance(active.outcome, HeadraceError):
            span.set_status(trace.StatusCode.ERROR, active.outcome.code)
        span.end(start.redis_ns(now_s))

    def _attributes(self, active: ActiveRequest, now_s: float) -> dict[str, Any]:
        said = {
            "messaging.system": "headrace",
            "messaging.destination.name": self._queue,
            "messaging.consumer.group.name": GROUP,
            "messaging.message.id": active.id,
            "gen_ai.provider.name": "headrace",
            "gen_ai.request.id": active.id,
            "headrace.tier": active.tier,
            "headrace.source": active.source,
            "headrace.attempt": active.delivery.attempt,
            **_asked(active),
            **_latencies(active, now_s),
            **_ending(active),
        }
        return {name: value for name, value in said.items() if value is not None}


def _carried_context(entry: Mapping[bytes, bytes]) -> Any:
    """The trace context in the request's entry; empty if there is none, or a malformed one."""
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    found = {name: entry.get(name.encode(), b"") for name in ("traceparent", "tracestate")}
    usable = {name: value.decode() for name, value in found.items() if value.isascii() and 0 < len(value) <= MAX_FIELD_BYTES}
    return TraceContextTextMapPropagator().extract(usable, Context())


def _queue_end_ns(active: ActiveRequest, start: Start) -> int:
    """The first step or, if there was none, when the request was begun, which is when its end was decided."""
    if active.resumed and active.delivery.started_ms is not None:
        return active.delivery.started_ms * 1_000_000
    return start.redis_ns(start.begun_s if active.first_step_s is None else active.first_step_s)


def _parts(active: ActiveRequest, start: Start) -> dict[str, tuple[int, int]]:
    parts = {"queue": (start.enqueued_ms * 1_000_000, _queue_end_ns(active, start))}
    if active.first_step_s is not None and active.first_token_s is not None and active.last_token_s is not None:
        first_ns = start.redis_ns(active.first_token_s)
        parts["prefill"] = (start.redis_ns(active.first_step_s), first_ns)
        parts["decode"] = (first_ns, start.redis_ns(active.last_token_s))
    return parts


def _asked(active: ActiveRequest) -> dict[str, Any]:
    """What was asked for, and how much of it was done; nothing if it did not reach the engine."""
    outputs = active.outputs
    if outputs is None:
        return {}
    request, params = outputs.requests[0], outputs.requests[0].params
    num_prompt_tokens = outputs.collector.num_prompt_tokens
    return {
        "gen_ai.operation.name": _OPERATIONS[request.kind],
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.n": params.n,
        "gen_ai.request.choice.count": params.n,
        "gen_ai.request.stream": active.streamed,
        "gen_ai.usage.prompt_tokens": num_prompt_tokens,
        "gen_ai.usage.input_tokens": num_prompt_tokens,
        "gen_ai.usage.completion_tokens": outputs.num_tokens,
        "gen_ai.usage.output_tokens": outputs.num_tokens,
    }


def _latencies(active: ActiveRequest, now_s: float) -> dict[str, Any]:
    """In seconds, under vLLM's names."""
    start, step_s, first_s, last_s = active.start, active.first_step_s, active.first_token_s, active.last_token_s
    assert start is not None, "it was begun"
    said = {"e2e": start.since_enqueued_ms(now_s) / 1000}
    if active.queue_ms is not None:
        said["time_in_queue"] = active.queue_ms / 1000
    if active.ttft_ms is not None:
        said["time_to_first_token"] = active.ttft_ms / 1000
    if step_s is not None and first_s is not None and last_s is not None:
        said["time_in_model_prefill"] = first_s - step_s
        said["time_in_model_decode"] = last_s - first_s
        said["time_in_model_inference"] = last_s - step_s
    return {f"gen_ai.latency.{name}": value for name, value in said.items()}


def _ending(active: ActiveRequest) -> dict[str, Any]:
    outcome = active.outcome
    if isinstance(outcome, HeadraceError):
        return {"error.type": outcome.code}
    if not isinstance(outcome, Result):
        return {}
    return {
        "gen_ai.response.id": outcome.id,
        "gen_ai.response.model": outcome.model,
        "gen_ai.response.finish_reasons": [choice.finish_reason for choice in outcome.choices or (outcome,)],
        "gen_ai.usage.cache_read.input_tokens": outcome.usage.cached_tokens,
    }
