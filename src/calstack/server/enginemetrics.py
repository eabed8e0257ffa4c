"""Metrics out of the engine's last snapshot, read at the scrape."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from calstack.wire import EngineStats

__all__ = ["engine_metrics"]

# name and text -> the engine's counter, and what it is divided by; a counter that the engine does not give stands at 0
_COUNTERS = {
    ("preemptions", "Requests that gave their blocks to another and started over"): ("preemptions", 1),
    ("device_resets", "Resets of the device"): ("resets", 1),
    ("launch_retries", "Launches tried again after an error that may pass"): ("retries", 1),
    ("failed_launches", "Launches that failed for good"): ("failed_launches", 1),
    ("padding_seconds", "Device time spent on rows that belonged to no request"): ("padding_ns", 1e9),
    ("prefill_interruptions", "Prefill launches that streams waited for"): ("prefill_interruptions", 1),
    ("prefill_interruption_seconds", "Device time of prefill launches that streams waited for"): ("prefill_interruption_ns", 1e9),
    ("spec_drafts", "Drafts proposed by speculation"): ("spec_drafts", 1),
    ("spec_draft_tokens", "Tokens proposed by speculation"): ("spec_draft_tokens", 1),
    ("spec_accepted_tokens", "Proposed tokens that were accepted"): ("spec_accepted_tokens", 1),
}
_VLLM = {
    ("num_preemptions", "Requests preempted"): "preemptions",
    ("spec_decode_num_drafts", "Drafts proposed"): "spec_drafts",
    ("spec_decode_num_draft_tokens", "Tokens proposed"): "spec_draft_tokens",
    ("spec_decode_num_accepted_tokens", "Proposed tokens accepted"): "spec_accepted_tokens",
}
_LLAMA = {
    ("spec_decode_num_drafts", "Drafts proposed"): "spec_drafts",
    ("spec_decode_num_draft_tokens", "Tokens proposed"): "spec_draft_tokens",
    ("spec_decode_num_accepted_tokens", "Proposed tokens accepted"): "spec_accepted_tokens",
}


def engine_metrics(stats: EngineStats | None, labels: dict[str, str]) -> Iterator[Metric]:
    """All of them; at zero before the first snapshot. `labels`: of the names that vLLM's dashboards read."""
    counters = stats.counters if stats else {}
    yield GaugeMetricFamily("calrt_kv_used_batches", "Lanes that hold a request", value=stats.lanes_used if stats else 0)
    yield GaugeMetricFamily("calrt_kv_allocation_wait_ms", "Longest wait for KV blocks now, ms", value=stats.kv_wait_ms if stats else 0)
    yield GaugeMetricFamily("calrt_running_requests", "Choices that hold a lane", value=stats.running if stats else 0)
    yield GaugeMetricFamily("calrt_kv_used_blocks", "KV blocks in use", value=stats.kv_blocks_used if stats else 0)
    yield GaugeMetricFamily("calrt_kv_total_blocks", "KV blocks", value=stats.kv_blocks_total if stats else 0)
    yield _labelled(GaugeMetricFamily, "calrt_device_dram_used_bytes", "Device memory in use, bytes", "chip", _chips(stats))
    yield _labelled(
        CounterMetricFamily, "calrt_step_seconds", "The engine's wall time by what it was spent on", "label", stats.times_s if stats else {}
    )
    for (name, text), (counter, divisor) in _COUNTERS.items():
        yield CounterMetricFamily(f"calrt_{name}", text, value=counters.get(counter, 0) / divisor)
    for (name, text), counter in _LLAMA.items():
        yield CounterMetricFamily(f"llamacpp:{name}", text, value=counters.get(counter, 0))
    for (name, text), counter in _VLLM.items():
        family = CounterMetricFamily(f"vllm:{name}", text, labels=list(labels))
        family.add_metric(list(labels.values()), counters.get(counter, 0))
        yield family
    yield _labelled(CounterMetricFamily, "calrt_engine_events", "The engine core's counters", "event", counters)


def _chips(stats: EngineStats | None) -> dict[str, int]:
    return {str(chip): value for chip, value in enumerate((stats.dram_used_bytes if stats else ()) or (0,))}


def _labelled(
    kind: type[GaugeMetricFamily | CounterMetricFamily], name: str, text: str, label: str, values: dict[str, int] | dict[str, float]
) -> Metric:
    family = kind(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
