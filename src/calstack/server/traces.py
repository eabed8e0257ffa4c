"""OpenTelemetry spans: one per request, made when it has ended, with a child per choice. Needs the extra `calstack[otel]`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from calstack import __version__
from calstack.errors import UsageError
from calstack.server.config import TraceConfig
from calstack.wire import Usage

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Span

__all__ = ["ChoiceTrace", "Traces", "open_traces"]

_EXPORT_S = 2.0
_OPERATIONS = {"/v1/chat/completions": "chat", "/chat/completions": "chat", "/v1/completions": "text_completion", "/v1/messages": "chat"}


@dataclasses.dataclass(frozen=True, slots=True)
class ChoiceTrace:
    """One choice that has ended: number, finish reason, output tokens, the engine's times, and when it ended (ns of the wall clock)."""

    index: int
    reason: str
    output_tokens: int
    usage: Usage | None
    ended_ns: int


class Traces:
    """Makes spans and hands them to a processor, which must not block.

    Args:
        config: name of the service and share of requests.
        processor: takes spans that have ended.
        model: name of the served model.
    """

    def __init__(self, config: TraceConfig, processor: SpanProcessor, model: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create({"service.name": config.service, "service.version": __version__})
        self._provider = TracerProvider(sampler=ParentBasedTraceIdRatio(config.ratio), resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("calstack", __version__)
        self._propagator, self._model = TraceContextTextMapPropagator(), model

    def record(
        self,
        *,
        headers: Iterable[tuple[bytes, bytes]],
        began_ns: int,
        ended_ns: int,
        fields: Mapping[str, Any],
        choices: Iterable[ChoiceTrace] = (),
    ) -> str:
        """Make the spans of a request that has ended; gives its trace's id in hex, "" when it is not sampled.

        Args:
            headers: of the request; `traceparent` and `tracestate` name the caller's span.
            began_ns, ended_ns: of the wall clock.
            fields: of the request's log line.
            choices: those that ended.
        """
        from opentelemetry.trace import SpanKind, StatusCode

        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers if name in {b"traceparent", b"tracestate"}}
        route, status = str(fields["route"]), int(fields["status"])
        operation = _OPERATIONS.get(route)
        name = f"{operation} {self._model}" if operation else f"{fields['method']} {route}"
        span = self._tracer.start_span(
            name, self._propagator.extract(carrier), SpanKind.SERVER, self._attributes(fields), start_time=began_ns
        )
        if not span.is_recording():
            return ""
        if status >= 500:
            span.set_status(StatusCode.ERROR)
            span.set_attribute("error.type", str(status))
        for choice in choices:
            self._choice(span, choice)
        span.end(ended_ns)
        return format(span.get_span_context().trace_id, "032x")

    def _attributes(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {
            "http.request.method": fields["method"],
            "http.route": fields["route"],
            "http.response.status_code": fields["status"],
            "calstack.request_id": fields["request_id"],
        }
        if "prompt_tokens" in fields:
            found |= {
                "gen_ai.operation.name": _OPERATIONS.get(str(fields["route"]), "generate_content"),
                "gen_ai.provider.name": "calstack",
                "gen_ai.request.model": self._model,
                "gen_ai.response.model": self._model,
                "gen_ai.response.finish_reasons": list(fields["finish"]),
                "gen_ai.usage.input_tokens": fields["prompt_tokens"],
                "gen_ai.usage.output_tokens": fields["output_tokens"],
            }
        return found

    def _choice(self, parent: Span, choice: ChoiceTrace) -> None:
        """A span from the choice's arrival in the engine to its end, with the times between as events."""
        from opentelemetry.trace import set_span_in_context

        usage = choice.usage
        if usage is None:
            return
        queue, prefill, decode = (int(ms * 1e6) for ms in (usage.queue_ms, usage.prefill_ms, usage.decode_ms))
        began = choice.ended_ns - queue - prefill - decode
        attributes: dict[str, Any] = {
            "calstack.choice": choice.index,
            "calstack.finish_reason": choice.reason,
            "calstack.cached_tokens": usage.cached_tokens,
            "gen_ai.usage.output_tokens": choice.output_tokens,
            "gen_ai.latency.time_in_queue": usage.queue_ms / 1e3,
            "gen_ai.latency.time_in_model_prefill": usage.prefill_ms / 1e3,
            "gen_ai.latency.time_in_model_decode": usage.decode_ms / 1e3,
        }
        span = self._tracer.start_span("choice", set_span_in_context(parent), attributes=attributes, start_time=began)
        span.add_event("started", timestamp=began + queue)
        span.add_event("first token", timestamp=began + queue + prefill)
        span.end(choice.ended_ns)

    def close(self) -> None:
        """Hand over what is left; may take some seconds when nobody takes it."""
        self._provider.shutdown()


def open_traces(config: TraceConfig, model: str) -> Traces | None:
    """What sends spans to the configured collector; None without one.

    Raises:
        UsageError: when the extra is not installed.
    """
    if not config.endpoint:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise UsageError("OpenTelemetry is not installed", where="trace.endpoint", remedy="pip install 'calstack[otel]'") from error
    exporter = OTLPSpanExporter(endpoint=config.endpoint, timeout=_EXPORT_S)
    return Traces(config, BatchSpanProcessor(exporter, schedule_delay_millis=config.interval_s * 1e3), model)
