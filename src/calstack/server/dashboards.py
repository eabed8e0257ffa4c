"""The names that dashboards for llama-server and vLLM read, where their meaning exists here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from calstack.server.admission import Admission
from calstack.wire import EngineStats, LaunchTimes, Usage

__all__ = ["Dashboards"]

_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
_TPOT = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_LONG = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)
_COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_POWERS = tuple(float(1 << n) for n in (0, *range(3, 15)))
_LABELS = ("model_name", "engine")
# names that older dashboards still read -> what they are called now
_ALIASES = {"time_per_output_token_seconds": "inter_token_latency_seconds"}


class Dashboards:
    """Metrics named `llamacpp:*` and `vllm:*`.

    Args:
        registry: where they are put.
        model: name of the served model.
        admission, stats: as of Metrics.
    """

    def __init__(
        self, registry: CollectorRegistry, model: str, admission: Admission, stats: Callable[[], EngineStats | None]
    ) -> None:  # fmt: skip
        self._labels = (model, "0")
        parents: dict[str, Histogram] = {}
        self.labels = dict(zip(_LABELS, self._labels, strict=True))

        def llama(name: str, text: str) -> Counter:
            return Counter(f"llamacpp:{name}", text, registry=registry)

        def vllm(name: str, text: str) -> Counter:
            return Counter(f"vllm:{name}", text, _LABELS, registry=registry).labels(*self._labels)

        def histogram(name: str, text: str, buckets: Iterable[float]) -> Histogram:
            parents[name] = Histogram(f"vllm:{name}", text, _LABELS, buckets=tuple(buckets), registry=registry)
            return parents[name].labels(*self._labels)

        self._prompt, self._cached = (
            llama("prompt_tokens", "Prompt tokens processed"),
            llama("prompt_tokens_cached", "Prompt tokens reused"),
        )
        self._prompt_s, self._predicted_s = (
            llama("prompt_seconds", "Prompt processing time"),
            llama("tokens_predicted_seconds", "Decode time"),
        )
        self._predicted, self._decodes = llama("tokens_predicted", "Generation tokens"), llama("n_decode", "Decode launches")
        self._v_prompt, self._v_output = vllm("prompt_tokens", "Prompt tokens"), vllm("generation_tokens", "Generation tokens")
        self._queries, self._hits = (
            vllm("prefix_cache_queries", "Prompt tokens looked up"),
            vllm("prefix_cache_hits", "Prompt tokens found"),
        )
        self._success = Counter("vllm:request_success", "Choices ended", (*_LABELS, "finished_reason"), registry=registry)
        for reason in ("stop", "length", "abort", "error"):
            self._success.labels(*self._labels, reason)
        self._ttft = histogram("time_to_first_token_seconds", "From arrival to the first token", _TTFT)
        self._tpot = histogram("request_time_per_output_token_seconds", "Mean time per output token after the first", _TPOT)
        self._queue = histogram("request_queue_time_seconds", "Time in the queue", _LONG)
        self._prefill = histogram("request_prefill_time_seconds", "Time of the prompt", _LONG)
        self._decode = histogram("request_decode_time_seconds", "Time of the output", _LONG)
        self._e2e = histogram("e2e_request_latency_seconds", "From arrival to the end", _LONG)
        self._n_prompt = histogram("request_prompt_tokens", "Prompt tokens of a choice", _COUNTS)
        self._n_output = histogram("request_generation_tokens", "Output tokens of a choice", _COUNTS)
        self._itl = histogram("inter_token_latency_seconds", "Time between two pieces of a choice", _TPOT)
        self._inference = histogram("request_inference_time_seconds", "Time of prompt and output", _LONG)
        self._n_most = histogram("request_max_num_generation_tokens", "Output tokens of a request's longest choice", _COUNTS)
        self._n_asked = histogram("request_params_n", "Choices asked for", (1, 2, 5, 10, 20))
        self._most_asked = histogram("request_params_max_tokens", "Output tokens allowed", _COUNTS)
        self._iteration = histogram("iteration_tokens_total", "Tokens of a launch", _POWERS)
        self._totals = _Totals()
        registry.register(_Gauges(self._labels, admission, stats, self._totals))
        for old, new in _ALIASES.items():
            registry.register(_Alias(f"vllm:{old}", parents[new]))

    def launches(self, launches: Iterable[LaunchTimes]) -> None:
        """Count decode launches."""
        for one in launches:
            self._iteration.observe(one.useful_rows)
            if one.phase == "decode":
                self._decodes.inc()
                self._totals.launches += 1
                self._totals.rows += one.useful_rows

    def first_token(self, seconds: float) -> None:
        """Observe the time to a choice's first token."""
        self._ttft.observe(seconds)

    def asked(self, *, choices: int, max_tokens: int) -> None:
        """Observe what a request asks for."""
        self._n_asked.observe(choices)
        self._most_asked.observe(max_tokens)

    def next_texts(self, gaps: Iterable[float]) -> None:
        """Observe times in seconds between two pieces of a choice."""
        for seconds in gaps:
            self._itl.observe(seconds)

    def request_ended(self, longest: int) -> None:
        """Observe the output tokens of a request's longest choice."""
        self._n_most.observe(longest)

    def ended(self, reason: str, *, prompt: int, output: int, usage: Usage | None, seconds: float) -> None:
        """Count an ended choice that took `seconds` from arrival."""
        finished = {"stop": "stop", "length": "length", "cancelled": "abort"}.get(reason, "error")
        self._success.labels(*self._labels, finished).inc()
        self._e2e.observe(seconds)
        self._v_prompt.inc(prompt)
        self._v_output.inc(output)
        self._queries.inc(prompt)
        self._n_prompt.observe(prompt)
        self._n_output.observe(output)
        self._totals.longest = max(self._totals.longest, prompt + output)
        self._predicted.inc(output)
        if usage is not None:
            self._timed(usage, prompt, output)

    def _timed(self, usage: Usage, prompt: int, output: int) -> None:
        fresh = max(0, prompt - usage.cached_tokens)
        self._prompt.inc(fresh)
        self._cached.inc(usage.cached_tokens)
        self._hits.inc(usage.cached_tokens)
        prefill, decode = usage.prefill_ms / 1e3, usage.decode_ms / 1e3
        self._prompt_s.inc(prefill)
        self._predicted_s.inc(decode)
        self._totals.add(fresh, prefill, max(0, output - 1), decode)
        self._queue.observe(usage.queue_ms / 1e3)
        self._prefill.observe(prefill)
        self._decode.observe(decode)
        self._inference.observe(prefill + decode)
        if output > 1:
            self._tpot.observe(decode / (output - 1))


class _Totals:
    """Sums since the last scrape, and launches since start."""

    def __init__(self) -> None:
        self.launches = self.rows = self.longest = 0
        self._sums = [0.0] * 4

    def add(self, prompt: int, prefill_s: float, output: int, decode_s: float) -> None:
        for place, value in enumerate((prompt, prefill_s, output, decode_s)):
            self._sums[place] += value

    def rates(self) -> tuple[float, float]:
        """Prompt and output tokens a second since the last call; 0 when idle."""
        (prompt, prefill_s, output, decode_s), self._sums = self._sums, [0.0] * 4
        return prompt / prefill_s if prefill_s else 0.0, output / decode_s if decode_s else 0.0


class _Gauges(Collector):
    def __init__(self, labels: tuple[str, str], admission: Admission, stats: Callable[[], EngineStats | None], totals: _Totals) -> None:
        self._labels, self._admission, self._stats, self._totals = labels, admission, stats, totals

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        stats, waiting = self._stats(), self._admission.waiting
        running = self._admission.in_flight - waiting
        prompt, output = self._totals.rates()
        busy = self._totals.rows / self._totals.launches if self._totals.launches else 0.0
        yield GaugeMetricFamily("llamacpp:requests_processing", "Choices that run", value=running)
        yield GaugeMetricFamily("llamacpp:requests_deferred", "Choices that wait", value=waiting)
        yield GaugeMetricFamily("llamacpp:prompt_tokens_seconds", "Prompt tokens a second since the last scrape", value=prompt)
        yield GaugeMetricFamily("llamacpp:predicted_tokens_seconds", "Output tokens a second since the last scrape", value=output)
        yield GaugeMetricFamily("llamacpp:n_busy_slots_per_decode", "Mean rows of a decode launch", value=busy)
        yield GaugeMetricFamily("llamacpp:n_tokens_max", "Most tokens of a choice, prompt and output", value=self._totals.longest)
        used = stats.kv_blocks_used / stats.kv_blocks_total if stats and stats.kv_blocks_total else 0.0
        for name, text, value in (
            ("num_requests_running", "Choices that run", running),
            ("num_requests_waiting", "Choices that wait", waiting),
            ("kv_cache_usage_perc", "Part of the KV blocks in use, 0 to 1", used),
            ("gpu_cache_usage_perc", "The same under its older name", used),
        ):
            family = GaugeMetricFamily(f"vllm:{name}", text, labels=_LABELS)
            family.add_metric(self._labels, value)
            yield family
        refused = CounterMetricFamily("vllm:admission_rejections", "Choices refused because the queue was full", labels=_LABELS)
        refused.add_metric(self._labels, self._admission.refused)
        yield refused
        blocks = GaugeMetricFamily("vllm:cache_config_info", "The KV cache", labels=[*_LABELS, "num_gpu_blocks"])
        blocks.add_metric([*self._labels, str(stats.kv_blocks_total if stats else 0)], 1)
        yield blocks


class _Alias(Collector):
    """A metric once more under another name."""

    def __init__(self, name: str, source: Histogram) -> None:
        self._name, self._source = name, source

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        for family in self._source.collect():
            other = Metric(self._name, family.documentation, family.type)
            other.samples = [sample._replace(name=self._name + sample.name.removeprefix(family.name)) for sample in family.samples]
            yield other
