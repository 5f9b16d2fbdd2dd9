"""Spans of a client's calls, in processes that trace with OpenTelemetry; in others nothing is done or loaded.

Of a request, a span holds only its id and how it ended.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from producer import __version__
from producer.errors import HeadraceError

if TYPE_CHECKING:
    from opentelemetry.context import Context

SpanKind = Literal["CLIENT", "PRODUCER"]


@dataclass(frozen=True, slots=True)
class Traced:
    """A span that has begun, or none.

    Attributes:
        context: for spans within this one; None if nothing is traced.
        fields: carry the context on a request's entry: ``traceparent`` and perhaps ``tracestate`` (W3C Trace Context).
    """

    context: Context | None = None
    fields: Mapping[str, str] = field(default_factory=dict)


NOT_TRACED = Traced()


@contextmanager
def span(
    kind: SpanKind, operation: str, queue: str, attributes: Mapping[str, str | int], *, within: Traced = NOT_TRACED
) -> Iterator[Traced]:
    """A span that lasts as long as the ``with``; an exception, with its code, becomes its status.

    It is not made the current span: the calls are generators, and their driver may do other things meanwhile.
    """
    if "opentelemetry.trace" not in sys.modules:  # a process that has set a tracer provider has loaded it
        yield NOT_TRACED
        return
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    told = {"messaging.system": "headrace", "messaging.destination.name": queue, "messaging.operation.name": operation, **attributes}
    tracer = trace.get_tracer("headrace", __version__)
    begun = tracer.start_span(f"{operation} {queue}", within.context, trace.SpanKind[kind], told)
    context = trace.set_span_in_context(begun, within.context)
    fields: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(fields, context)
    try:
        yield Traced(context, fields)
    except BaseException as error:
        code = error.code if isinstance(error, HeadraceError) else type(error).__name__
        begun.set_attribute("error.type", code)
        begun.set_status(trace.StatusCode.ERROR, code)
        raise
    finally:
        begun.end()
