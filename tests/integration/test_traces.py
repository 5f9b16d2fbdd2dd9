"""Traces from a caller's span to the worker's, with the SDK's exporter in memory, and once over HTTP to a real receiver."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import redis
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from producer import AsyncClient, Client
from producer.errors import HeadraceError, QueueFull
from producer.keys import Keys
from tests.fakes import FAIL, expected_text
from tests.servers import Server
from tests.workers import PATIENCE_S, eventually, worker_thread
from worker.config import WorkerConfig
from worker.embedded import embedded_queue
from worker.tracing import MAX_FIELD_BYTES, RequestTracer, exporting_to

TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"


class Spans:
    """What was exported so far."""

    def __init__(self, exporter: InMemorySpanExporter) -> None:
        self._exporter = exporter

    def named(self, name: str, count: int = 1) -> list[ReadableSpan]:
        """Those of a name, once there are ``count``."""

        def found() -> list[ReadableSpan] | None:
            spans = [span for span in self._exporter.get_finished_spans() if span.name == name]
            return spans if len(spans) >= count else None

        return list(eventually(found, f"{count} spans {name}"))

    def one(self, name: str) -> ReadableSpan:
        [span] = self.named(name)
        return span

    def text(self) -> str:
        return "".join(span.to_json() for span in self._exporter.get_finished_spans())


@pytest.fixture
def provider() -> Iterator[TracerProvider]:
    provider = TracerProvider()
    yield provider
    provider.shutdown()


@pytest.fixture
def spans(provider: TracerProvider) -> Spans:
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Spans(exporter)


@pytest.fixture
def tracing_process(provider: TracerProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process's tracer provider, for one test; the API would let it be set once."""
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)


@pytest.fixture
def tracing_worker(server: Server, queue: str, provider: TracerProvider) -> Iterator[None]:
    with worker_thread(server.url, queue, on_end=RequestTracer(provider, queue).record):
        yield


@pytest.fixture
def client(server: Server, queue: str) -> Iterator[Client]:
    with Client(server.url, queue=queue) as client:
        yield client


def ids(span: ReadableSpan) -> tuple[int, int]:
    return span.context.trace_id, span.context.span_id


def parent_of(span: ReadableSpan) -> tuple[int, int] | None:
    return (span.parent.trace_id, span.parent.span_id) if span.parent is not None else None


def carried(raw: redis.Redis, queue: str, **fields: str | bytes) -> None:
    """Put a bare request that carries ``fields``."""
    raw.xadd(Keys(queue).stream("realtime"), {"id": "x1", "json": '{"prompt":"Hi","max_tokens":2}', **fields})


@pytest.mark.usefixtures("tracing_process", "tracing_worker")
def test_one_trace_from_the_callers_wait_to_the_workers_parts(client: Client, queue: str, spans: Spans) -> None:
    result = client.submit_and_wait("a very private prompt", max_tokens=7, temperature=0.5, source="search", timeout=30)
    waiting, put, run = spans.one(f"submit_and_wait {queue}"), spans.one(f"submit {queue}"), spans.one("llm_request")
    parts = [spans.one(name) for name in ("queue", "prefill", "decode")]
    kinds = [span.kind.name for span in (waiting, put, run, *parts)]
    assert kinds == ["CLIENT", "PRODUCER", "CONSUMER", "INTERNAL", "INTERNAL", "INTERNAL"]
    assert [parent_of(span) for span in (waiting, put, run)] == [None, ids(waiting), ids(put)]
    assert {parent_of(part) for part in parts} == {ids(run)}
    assert put.attributes is not None
    assert put.attributes["messaging.message.id"] == result.id
    assert parts[0].start_time == run.start_time
    assert [part.end_time for part in parts[:2]] == [part.start_time for part in parts[1:]]
    times = [run.start_time, *(part.end_time for part in parts), run.end_time]
    assert times == sorted(times, key=lambda time: time or 0)
    assert "private" not in spans.text()
    assert expected_text("a very private prompt", 7) not in spans.text()


@pytest.mark.usefixtures("tracing_worker")
def test_attributes_say_what_was_asked_what_it_took_and_how_it_ended(client: Client, queue: str, spans: Spans) -> None:
    result = client.submit_and_wait("hello", max_tokens=7, temperature=0.5, top_p=0.9, source="search", timeout=30)
    run = spans.one("llm_request")
    said = dict(run.attributes or {})
    latencies = {name: said.pop(name) for name in list(said) if name.startswith("gen_ai.latency.")}
    assert said == {
        "messaging.system": "headrace",
        "messaging.destination.name": queue,
        "messaging.consumer.group.name": "workers",
        "messaging.message.id": result.id,
        "gen_ai.provider.name": "headrace",
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.id": result.id,
        "gen_ai.request.max_tokens": 7,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.n": 1,
        "gen_ai.request.choice.count": 1,
        "gen_ai.request.stream": False,
        "gen_ai.usage.prompt_tokens": 5,
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.completion_tokens": 7,
        "gen_ai.usage.output_tokens": 7,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.id": result.id,
        "gen_ai.response.model": "fake",
        "gen_ai.response.finish_reasons": ("length",),
        "headrace.tier": "realtime",
        "headrace.source": "search",
        "headrace.attempt": 1,
        "headrace.outcome": "written",
    }
    names = ("time_in_queue", "time_to_first_token", "time_in_model_prefill", "time_in_model_decode", "time_in_model_inference", "e2e")
    assert set(latencies) == {f"gen_ai.latency.{name}" for name in names}
    assert latencies["gen_ai.latency.time_to_first_token"] * 1000 == pytest.approx(result.timings.ttft_ms, abs=0.01)
    assert run.status.is_unset


@pytest.mark.usefixtures("tracing_process", "tracing_worker")
def test_error_code_is_the_status_on_both_sides(client: Client, queue: str, spans: Spans) -> None:
    with pytest.raises(HeadraceError):
        client.submit_and_wait(FAIL, max_tokens=3, timeout=30)
    for span in (spans.one("llm_request"), spans.one(f"submit_and_wait {queue}")):
        assert (span.status.status_code.name, (span.attributes or {})["error.type"]) == ("ERROR", "BATCH_FAILED")
    assert spans.one(f"submit {queue}").status.is_unset


@pytest.mark.usefixtures("tracing_process")
def test_full_queue_is_the_error_of_putting(server: Server, queue: str, spans: Spans) -> None:
    with Client(server.url, queue=queue, max_queue_depth=1) as client:
        client.submit("first")
        with pytest.raises(QueueFull):
            client.submit("second")
    assert [span.status.description for span in spans.named(f"submit {queue}", 2)] == [None, "QUEUE_FULL"]


@pytest.mark.usefixtures("tracing_process", "tracing_worker")
async def test_asyncio_client_traces_alike(server: Server, queue: str, spans: Spans) -> None:
    async with AsyncClient(server.url, queue=queue) as client:
        await client.submit_and_wait("hello", max_tokens=2, timeout=30)
    assert parent_of(spans.one("llm_request")) == ids(spans.one(f"submit {queue}"))


@pytest.mark.usefixtures("tracing_process", "tracing_worker")
def test_many_requests_put_together_belong_to_one_span(client: Client, queue: str, spans: Spans) -> None:
    for handle in client.submit_many(["a", "b", "c"]):
        handle.result(timeout=30)
    put = spans.one(f"submit {queue}")
    assert (put.attributes or {})["messaging.batch.message_count"] == 3
    assert {parent_of(run) for run in spans.named("llm_request", 3)} == {ids(put)}


@pytest.mark.usefixtures("tracing_process", "tracing_worker")
def test_the_callers_current_span_is_the_parent(client: Client, queue: str, spans: Spans, provider: TracerProvider) -> None:
    with provider.get_tracer("app").start_as_current_span("app"):
        client.submit("hello", max_tokens=2).result(timeout=30)
    assert parent_of(spans.one(f"submit {queue}")) == ids(spans.one("app"))


@pytest.mark.usefixtures("tracing_worker")
def test_a_trace_of_another_language_is_continued(raw: redis.Redis, queue: str, spans: Spans) -> None:
    carried(raw, queue, traceparent=PARENT, tracestate="vendor=opaque")
    run = spans.one("llm_request")
    assert parent_of(run) == (int(TRACE_ID, 16), int(SPAN_ID, 16))
    assert run.context.trace_state.get("vendor") == "opaque"


@pytest.mark.usefixtures("tracing_worker")
@pytest.mark.parametrize(
    "traceparent",
    [
        b"",
        b"secret",
        b"\xff\xfe",
        PARENT.upper().encode(),
        f"ff-{TRACE_ID}-{SPAN_ID}-01".encode(),
        f"00-{'0' * 32}-{SPAN_ID}-01".encode(),
        f"{PARENT}-more".encode(),
        b"0" * (MAX_FIELD_BYTES + 1),
    ],
)
def test_malformed_trace_is_ignored(
    raw: redis.Redis, queue: str, spans: Spans, caplog: pytest.LogCaptureFixture, traceparent: bytes
) -> None:
    carried(raw, queue, traceparent=traceparent, tracestate="a=b")
    assert parent_of(spans.one("llm_request")) is None
    assert not caplog.records


@pytest.mark.usefixtures("tracing_worker")
@pytest.mark.parametrize("tracestate", [b"secret", b"a=1,a=2", b"\xff", b"a=" + b"b" * MAX_FIELD_BYTES])
def test_malformed_tracestate_leaves_the_trace(
    raw: redis.Redis, queue: str, spans: Spans, caplog: pytest.LogCaptureFixture, tracestate: bytes
) -> None:
    carried(raw, queue, traceparent=PARENT, tracestate=tracestate)
    assert parent_of(spans.one("llm_request")) == (int(TRACE_ID, 16), int(SPAN_ID, 16))
    assert not caplog.records


@pytest.mark.usefixtures("tracing_worker")
def test_what_the_caller_does_not_sample_is_not_exported(raw: redis.Redis, client: Client, queue: str, spans: Spans) -> None:
    carried(raw, queue, traceparent=f"00-{TRACE_ID}-{SPAN_ID}-00")
    sampled = client.submit("hello", max_tokens=2)
    eventually(lambda: client.get("x1").status() == "done", "it ran")
    sampled.result(timeout=30)
    assert (spans.one("llm_request").attributes or {})["gen_ai.request.id"] == sampled.id


@pytest.mark.parametrize("hidden", ["", "import sys; sys.modules['opentelemetry'] = None; "], ids=["no provider set", "not installed"])
def test_process_that_does_not_trace_carries_nothing(server: Server, queue: str, raw: redis.Redis, hidden: str) -> None:
    code = f"{hidden}from producer import Client; Client({server.url!r}, queue={queue!r}).submit('hello')"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    [[_, entry]] = raw.xrange(Keys(queue).stream("realtime"))
    assert {b"traceparent", b"tracestate"}.isdisjoint(entry)


@pytest.mark.parametrize("url", ["collector:4317", "grpc://collector:4317", ""])
def test_endpoint_that_is_no_url_of_http_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="otlp_traces_endpoint must be"), exporting_to(url, WorkerConfig()):
        pass


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    url = "http://127.0.0.1:1/v1/traces"
    with pytest.raises(ValueError, match=r"headrace\[otel\] is not installed"), exporting_to(url, WorkerConfig()):
        pass


class Receiver:
    """An OTLP receiver on a port of its own: spans by service. It answers while ``may_answer`` is set; ``asked`` is, once it was."""

    def __init__(self) -> None:
        self.received: list[tuple[str, Any]] = []
        self.asked, self.may_answer = threading.Event(), threading.Event()
        self.may_answer.set()

    @contextmanager
    def serving(self) -> Iterator[str]:
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
                receiver.asked.set()
                receiver.may_answer.wait()
                receiver.received.extend(_spans_by_service(request))
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.end_headers()
                self.wfile.write(ExportTraceServiceResponse().SerializeToString())

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the signature is http.server's
                pass

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            try:
                yield f"http://127.0.0.1:{server.server_port}/v1/traces"
            finally:
                server.shutdown()
                thread.join()


def _spans_by_service(request: ExportTraceServiceRequest) -> Iterator[tuple[str, Any]]:
    for resource in request.resource_spans:
        names = {item.key: item.value.string_value for item in resource.resource.attributes}
        for scope in resource.scope_spans:
            yield from ((names["service.name"], span) for span in scope.spans)


def test_collector_that_does_not_answer_holds_up_neither_requests_nor_the_end(
    server: Server, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")  # milliseconds until the first span is sent
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "100000")  # seconds: longer than a test may take
    monkeypatch.setattr("worker.tracing.FLUSH_S", 0.1)
    receiver = Receiver()
    receiver.may_answer.clear()
    with receiver.serving() as url:
        with (
            exporting_to(url, WorkerConfig(queue=queue)) as tracer,
            worker_thread(server.url, queue, on_end=tracer.record),
            Client(server.url, queue=queue) as client,
        ):
            client.submit_and_wait("first", max_tokens=2, timeout=30)
            assert receiver.asked.wait(PATIENCE_S)
            assert client.submit_and_wait("second", max_tokens=2, timeout=30).text == expected_text("second", 2)
        assert receiver.received == []
        receiver.may_answer.set()
        eventually(lambda: sum(span.name == "llm_request" for _, span in receiver.received) == 2, "nothing is lost")


@pytest.mark.slow
@pytest.mark.usefixtures("tracing_process")
def test_trace_of_a_real_worker_process_arrives_over_http(provider: TracerProvider) -> None:
    receiver = Receiver()
    with receiver.serving() as url:
        provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(endpoint=url)))
        with embedded_queue("--log-level", "warning", "--otlp-traces-endpoint", url) as queue, queue.client() as client:
            result = client.submit_and_wait("The capital of France is", max_tokens=8, temperature=0, timeout=120)
    by_name = {span.name: (service, span) for service, span in receiver.received}
    _, waiting = by_name["submit_and_wait default"]
    _, put = by_name["submit default"]
    service, run = by_name["llm_request"]
    assert (service, run.kind, run.parent_span_id) == ("headrace-worker", run.SPAN_KIND_CONSUMER, put.span_id)
    assert {span.trace_id for _, span in by_name.values()} == {waiting.trace_id}
    assert {span.name for _, span in by_name.values() if span.parent_span_id == run.span_id} == {"queue", "prefill", "decode"}
    said = {item.key: item.value for item in run.attributes}
    assert said["gen_ai.usage.output_tokens"].int_value == result.usage.completion_tokens
    assert said["gen_ai.response.model"].string_value == result.model
