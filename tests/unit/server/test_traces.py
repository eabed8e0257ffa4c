"""Spans as a collector gets them over OTLP/HTTP."""

from __future__ import annotations

import http.server
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from calstack.errors import UsageError
from calstack.server.config import TraceConfig
from calstack.server.traces import ChoiceTrace, Traces, open_traces
from calstack.wire import Usage
from tests.support.live_server import LiveServer, live_server

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
SKIPPED = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00"


class Collector:
    """What a collector was sent."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                message = ExportTraceServiceRequest.FromString(body)
                outer.spans += [span for r in message.resource_spans for s in r.scope_spans for span in s.spans]
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}/v1/traces"
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()

    def until(self, name: str, request_id: str) -> Any:
        """The span of this name and request."""
        end = time.monotonic() + 10
        while True:
            for span in self.spans:
                if span.name == name and attributes(span).get("calstack.request_id") == request_id:
                    return span
            assert time.monotonic() < end, [span.name for span in self.spans]
            time.sleep(0.02)


def attributes(span: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    found = Collector()
    yield found
    found.close()


@pytest.fixture(scope="module")
def traced(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    config = TraceConfig(endpoint=collector.endpoint, interval_s=0.05)
    with live_server(tmp_path_factory.mktemp("traced"), trace=config) as server:
        yield server


def post(server: LiveServer, path: str, request_id: str, *, traceparent: str = "", **body: Any) -> Any:
    headers = {"x-request-id": request_id} | ({"traceparent": traceparent} if traceparent else {})
    return server.http.post(path, json=body, headers=headers)


@pytest.mark.parametrize("stream", [False, True])
def test_chat_request_is_a_span_with_a_child_per_choice(traced: LiveServer, collector: Collector, stream: bool) -> None:
    id_ = f"chat-{stream}"
    messages = [{"role": "user", "content": "hello"}]
    post(traced, "/v1/chat/completions", id_, traceparent=PARENT, messages=messages, n=2, stream=stream)
    span = collector.until("chat tiny", id_)
    found = attributes(span)
    assert found["http.route"] == "/v1/chat/completions"
    assert found["http.response.status_code"] == 200
    assert found["gen_ai.usage.input_tokens"] > 0
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == tuple(PARENT.split("-")[1:3])
    children = [one for one in collector.spans if one.parent_span_id == span.span_id]
    assert sorted(attributes(one)["calstack.choice"] for one in children) == [0, 1]
    assert found["gen_ai.usage.output_tokens"] == sum(attributes(one)["gen_ai.usage.output_tokens"] for one in children)
    for child in children:
        times = [child.start_time_unix_nano, *(event.time_unix_nano for event in child.events), child.end_time_unix_nano]
        assert times == sorted(times)
        assert child.end_time_unix_nano <= span.end_time_unix_nano


def test_refused_and_failed_requests_are_spans_too(traced: LiveServer, collector: Collector) -> None:
    post(traced, "/v1/completions", "bad", prompt=3)
    post(traced, "/v1/completions", "broken", prompt="x<|error|>")
    bad, broken = collector.until("text_completion tiny", "bad"), collector.until("text_completion tiny", "broken")
    assert (attributes(bad)["http.response.status_code"], bad.status.code) == (400, 0)
    assert (attributes(broken)["error.type"], broken.status.code) == ("500", 2)


def test_no_text_is_in_a_span(traced: LiveServer, collector: Collector) -> None:
    post(traced, "/v1/completions", "secret", prompt="xylophone")
    assert "xylophone" not in str(collector.until("text_completion tiny", "secret"))


def test_caller_that_does_not_sample_is_followed(traced: LiveServer, collector: Collector) -> None:
    post(traced, "/v1/completions", "skipped", traceparent=SKIPPED, prompt="hello")
    post(traced, "/v1/completions", "kept", traceparent="not a traceparent", prompt="hello")
    collector.until("text_completion tiny", "kept")
    assert not any(attributes(span).get("calstack.request_id") == "skipped" for span in collector.spans)


def test_spans_left_at_the_end_are_sent(collector: Collector, tmp_path: Path) -> None:
    with live_server(tmp_path, trace=TraceConfig(endpoint=collector.endpoint, interval_s=3600)) as server:
        post(server, "/v1/completions", "last", prompt="hello")
    collector.until("text_completion tiny", "last")


def test_collector_that_is_not_there_holds_nobody_up(tmp_path: Path) -> None:
    with live_server(tmp_path, trace=TraceConfig(endpoint="http://127.0.0.1:9/v1/traces", interval_s=0.05)) as server:
        assert server.complete("hello").status_code == 200
        server.assert_alive()


def test_only_a_share_is_traced() -> None:
    exporter = InMemorySpanExporter()
    traces = Traces(TraceConfig(ratio=0.0), SimpleSpanProcessor(exporter), "m")
    fields = {"route": "/x", "method": "GET", "status": 200, "request_id": "r"}
    usage = Usage(prompt_tokens=1, output_tokens=1, cached_tokens=0, queue_ms=1, prefill_ms=1, decode_ms=1)
    assert traces.record(headers=(), began_ns=1, ended_ns=2, fields=fields, choices=[ChoiceTrace(0, "stop", 1, usage, 2)]) == ""
    assert not exporter.get_finished_spans()
    traces.close()


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_traces(TraceConfig(), "m") is None
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(UsageError, match=r"calstack\[otel\]"):
        open_traces(TraceConfig(endpoint="http://x"), "m")
