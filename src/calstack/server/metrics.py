"""Prometheus metrics on a registry of our own. Gauges are read when scraped; nothing polls."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from calstack.server.admission import Admission
from calstack.server.dashboards import Dashboards
from calstack.server.enginemetrics import engine_metrics
from calstack.wire import EngineStats, LaunchTimes, Usage

__all__ = ["CONTENT_TYPE", "Metrics"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_MS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0, 2500.0, 10000.0)
_LONG_MS = (1.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1280.0, 2560.0, 5120.0, 10240.0, 40960.0, 163840.0)
_PHASES = ("prefill", "decode")
_FOLD = 128  # observations kept before they are folded in


class Metrics:
    """All metrics of the server.

    Args:
        admission: counts of what waits.
        stats: the engine's last snapshot; None before the first.
        device_status: index in DeviceStatus, -1 while no engine is ready.
        model: name of the served model.
        key_refused: requests refused because of their key's limits.
    """

    def __init__(
        self,
        admission: Admission,
        stats: Callable[[], EngineStats | None],
        device_status: Callable[[], int],
        model: str = "",
        key_refused: Callable[[], int] = lambda: 0,
    ) -> None:
        self.registry = CollectorRegistry()
        self.started = time.time()

        def launch(name: str, text: str) -> Histogram:
            found = Histogram(f"calrt_{name}_ms", text, ["phase"], buckets=_MS, registry=self.registry)
            for phase in _PHASES:  # at zero from the start: a scraper sees every series before the first request
                found.labels(phase)
            return found

        self._infer = launch("infer", "Time a launch computed, ms")
        self._h2d = launch("h2d", "Time a launch's inputs were copied to the device, ms")
        self._d2h = launch("d2h", "Time a launch's outputs were copied back, ms")
        self._framework = launch("framework", "Host time around a launch while the device had nothing to do, ms")
        self._rows = Counter("calrt_launch_rows", "Rows computed", ["phase"], registry=self.registry)
        self._padding = Counter("calrt_padding_rows", "Rows computed that belonged to no request", ["phase"], registry=self.registry)
        self._buckets = Counter("calrt_submodel_launches", "Launches by submodel", ["submodel"], registry=self.registry)
        self._errors = Counter("calrt_errors", "Errors answered, by HTTP status", ["code"], registry=self.registry)
        self._requests = Counter("calrt_http_requests", "HTTP requests by route and status", ["route", "code"], registry=self.registry)
        self._ended = Counter("calrt_choices", "Choices ended, by finish reason", ["reason"], registry=self.registry)
        self._prompt = Counter("calrt_prompt_tokens", "Prompt tokens of ended choices", registry=self.registry)
        self._cached = Counter("calrt_prompt_tokens_cached", "Prompt tokens found in the prefix cache", registry=self.registry)
        self._output = Counter("calrt_output_tokens", "Tokens given to clients", registry=self.registry)
        self._ttft = Histogram("calrt_ttft_ms", "From arrival to the first token, ms", buckets=_LONG_MS, registry=self.registry)
        self.first_tokens, self.first_token_s = 0, 0.0
        self._queue = Histogram("calrt_queue_ms", "Time a choice waited for a lane, ms", buckets=_LONG_MS, registry=self.registry)
        self._tpot = Histogram("calrt_tpot_ms", "Time per output token after the first, ms", buckets=_MS, registry=self.registry)
        self._hits = Counter("calrt_prefix_hits", "Choices whose prompt began in the prefix cache", registry=self.registry)
        self._launches: list[LaunchTimes] = []
        self._gaps: list[float] = []
        self._dashboards = Dashboards(self.registry, model, admission, stats)
        self.registry.register(_Now(admission, stats, device_status, key_refused, self._dashboards.labels))
        ProcessCollector(registry=self.registry)

    def launches(self, launches: Sequence[LaunchTimes]) -> None:
        """Observe completed launches.

        They wait until there are some, for one by one each would find the caches cold that a launch has passed through.
        """
        self._launches += launches
        if len(self._launches) >= _FOLD:
            self._fold()

    def _fold(self) -> None:
        self._dashboards.next_texts(self._gaps)
        self._gaps.clear()
        self._dashboards.launches(self._launches)
        for one in self._launches:
            self._infer.labels(one.phase).observe(one.infer_ms)
            self._h2d.labels(one.phase).observe(one.h2d_ms)
            self._d2h.labels(one.phase).observe(one.d2h_ms)
            self._framework.labels(one.phase).observe(one.framework_ms)
            self._rows.labels(one.phase).inc(one.rows)
            self._padding.labels(one.phase).inc(max(0, one.rows - one.useful_rows))
            self._buckets.labels(one.submodel).inc()
        self._launches.clear()

    def answered(self, route: str, status: int) -> None:
        """Count an HTTP answer."""
        self._requests.labels(route, str(status)).inc()
        if status >= 400:
            self.failed(status)

    def failed(self, status: int) -> None:
        """Count an error, also one inside a stream."""
        self._errors.labels(str(status)).inc()

    def first_token(self, seconds: float) -> None:
        """Observe the time to a choice's first token."""
        self.first_tokens += 1
        self.first_token_s += seconds
        self._ttft.observe(seconds * 1e3)
        self._dashboards.first_token(seconds)

    def asked(self, *, choices: int, max_tokens: int) -> None:
        """Observe what a request asks for."""
        self._dashboards.asked(choices=choices, max_tokens=max_tokens)

    def next_text(self, seconds: float) -> None:
        """Observe the time between two pieces of a choice, as `launches`."""
        self._gaps.append(seconds)
        if len(self._gaps) >= _FOLD:
            self._fold()

    def request_ended(self, longest: int) -> None:
        """Observe the output tokens of a request's longest choice."""
        self._dashboards.request_ended(longest)

    def ended(self, reason: str, *, prompt: int, output: int, usage: Usage | None, seconds: float) -> None:
        """Count an ended choice that took `seconds` from arrival."""
        self._dashboards.ended(reason, prompt=prompt, output=output, usage=usage, seconds=seconds)
        self._ended.labels(reason).inc()
        self._prompt.inc(prompt)
        self._output.inc(output)
        if usage is not None:
            self._cached.inc(usage.cached_tokens)
            self._hits.inc(usage.cached_tokens > 0)
            self._queue.observe(usage.queue_ms)
        if usage is not None and output > 1:
            self._tpot.observe(usage.decode_ms / (output - 1))

    def text(self) -> bytes:
        """The exposition, format 0.0.4."""
        self._fold()
        return generate_latest(self.registry)


class _Now(Collector):
    """Gauges and engine counters, read at the scrape."""

    def __init__(
        self,
        admission: Admission,
        stats: Callable[[], EngineStats | None],
        device_status: Callable[[], int],
        key_refused: Callable[[], int],
        labels: dict[str, str],
    ) -> None:
        self._admission, self._stats, self._device_status, self._key_refused = admission, stats, device_status, key_refused
        self._labels = labels

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        admission = self._admission
        yield GaugeMetricFamily("calrt_requests_in_flight", "Accepted choices that have not ended", value=admission.in_flight)
        yield GaugeMetricFamily("calrt_queued_requests", "Accepted choices beyond those that can run", value=admission.waiting)
        yield GaugeMetricFamily("calrt_queued_tokens", "Prompt tokens of choices without a first token", value=admission.waiting_tokens)
        yield CounterMetricFamily("calrt_refused", "Choices refused because the queue was full", value=admission.refused)
        yield CounterMetricFamily("calrt_key_refused", "Requests refused because their API key had its limit", value=self._key_refused())
        yield GaugeMetricFamily("calrt_device_status", "Index of the device's status; -1 without an engine", value=self._device_status())
        yield from engine_metrics(self._stats(), self._labels)
