"""The Grafana dashboard, deploy/grafana/calstack.json, out of a list of panels."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["dashboard"]

RATE = "[$__rate_interval]"
JOB = '{job="$job"}'


def _rate(metric: str, by: str = "") -> str:
    total = f"rate({metric}{JOB}{RATE})"
    return f"sum by ({by}) ({total})" if by else f"sum({total})"


def _quantiles(metric: str, by: str = "") -> list[tuple[str, str]]:
    group = f"le, {by}" if by else "le"
    legend = f"{{{{{by}}}}} " if by else ""
    return [
        (f"histogram_quantile(0.{q}, sum by ({group}) (rate({metric}_bucket{JOB}{RATE})))", f"{legend}p{q}") for q in (50, 90, 99)
    ]  # fmt: skip


# section -> panels: title, unit, [(expression, legend)]
PANELS: dict[str, list[tuple[str, str, list[tuple[str, str]]]]] = {
    "Requests": [
        ("HTTP answers a second", "reqps", [(_rate("calrt_http_requests_total", "route, code"), "{{route}} {{code}}")]),
        ("Choices ended a second", "ops", [(_rate("calrt_choices_total", "reason"), "{{reason}}")]),
        (
            "In flight and waiting",
            "short",
            [
                (f"calrt_requests_in_flight{JOB}", "in flight"),
                (f"calrt_running_requests{JOB}", "running"),
                (f"calrt_queued_requests{JOB}", "waiting"),
            ],
        ),
        ("Prompt tokens waiting", "short", [(f"calrt_queued_tokens{JOB}", "tokens")]),
        ("Errors a second, by status", "ops", [(_rate("calrt_errors_total", "code"), "{{code}}")]),
        (
            "Refused a second",
            "ops",
            [(_rate("calrt_refused_total"), "queue full"), (_rate("calrt_key_refused_total"), "key's limit")],
        ),
    ],
    "Speed": [
        (
            "Tokens a second",
            "short",
            [
                (_rate("calrt_output_tokens_total"), "output"),
                (_rate("calrt_prompt_tokens_total"), "prompt"),
                (_rate("calrt_prompt_tokens_cached_total"), "prompt, from the prefix cache"),
            ],
        ),
        ("Time to first token", "ms", _quantiles("calrt_ttft_ms")),
        ("Time per output token", "ms", _quantiles("calrt_tpot_ms")),
        ("Time in the queue", "ms", _quantiles("calrt_queue_ms")),
        ("Time between two pieces of a stream", "s", _quantiles("vllm:inter_token_latency_seconds")),
        (
            "Prefill that streams waited for",
            "percentunit",
            [(_rate("calrt_prefill_interruption_seconds_total"), "share of time")],
        ),
    ],
    "Device": [
        ("Where the engine's time goes", "percentunit", [(_rate("calrt_step_seconds_total", "label"), "{{label}}")]),
        ("Launch, computing", "ms", _quantiles("calrt_infer_ms", "phase")),
        ("Launch, host time beside the device", "ms", _quantiles("calrt_framework_ms", "phase")),
        (
            "Launch, copies (p90)",
            "ms",
            [_quantiles("calrt_h2d_ms", "phase")[1], _quantiles("calrt_d2h_ms", "phase")[1]],
        ),
        ("Launches a second, by submodel", "ops", [(_rate("calrt_submodel_launches_total", "submodel"), "{{submodel}}")]),
        (
            "Padding",
            "percentunit",
            [
                (f"{_rate('calrt_padding_rows_total', 'phase')} / {_rate('calrt_launch_rows_total', 'phase')}", "rows, {{phase}}"),
                (_rate("calrt_padding_seconds_total"), "device time"),
            ],
        ),
        ("Memory by chip", "bytes", [(f"calrt_device_dram_used_bytes{JOB}", "chip {{chip}}")]),
        ("Device status (0 = ready, -1 = no engine)", "short", [(f"calrt_device_status{JOB}", "status")]),
        (
            "Resets, retries, failures a second",
            "ops",
            [
                (_rate("calrt_device_resets_total"), "resets"),
                (_rate("calrt_launch_retries_total"), "retries"),
                (_rate("calrt_failed_launches_total"), "failed launches"),
            ],
        ),
    ],
    "KV cache and speculation": [
        ("KV blocks", "short", [(f"calrt_kv_used_blocks{JOB}", "in use"), (f"calrt_kv_total_blocks{JOB}", "all")]),
        ("Lanes in use", "short", [(f"calrt_kv_used_batches{JOB}", "lanes")]),
        (
            "Prompt tokens found in the prefix cache",
            "percentunit",
            [(f"{_rate('calrt_prompt_tokens_cached_total')} / {_rate('calrt_prompt_tokens_total')}", "share")],
        ),
        ("Choices with a prefix hit a second", "ops", [(_rate("calrt_prefix_hits_total"), "hits")]),
        (
            "Waiting for blocks, and preemptions",
            "short",
            [(f"calrt_kv_allocation_wait_ms{JOB}", "longest wait, ms"), (_rate("calrt_preemptions_total"), "preemptions a second")],
        ),
        (
            "Speculation: accepted of proposed tokens",
            "percentunit",
            [(f"{_rate('calrt_spec_accepted_tokens_total')} / {_rate('calrt_spec_draft_tokens_total')}", "share")],
        ),
    ],
    "Processes": [
        ("Memory of the API process", "bytes", [(f"process_resident_memory_bytes{JOB}", "resident")]),
        ("CPU of the API process", "percentunit", [(f"rate(process_cpu_seconds_total{JOB}{RATE})", "cores")]),
        ("Open files", "short", [(f"process_open_fds{JOB}", "open")]),
    ],
}


def dashboard() -> str:
    """The dashboard as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    top = 0
    for section, described in PANELS.items():
        panels.append({"type": "row", "title": section, "gridPos": {"h": 1, "w": 24, "x": 0, "y": top}, "id": len(panels) + 1})
        top += 1
        for place, (title, unit, queries) in enumerate(described):
            position = {"h": 8, "w": 8, "x": place % 3 * 8, "y": top + place // 3 * 8}
            panels.append(_panel(len(panels) + 1, title, unit, queries, position))
        top += (len(described) + 2) // 3 * 8
    board = {
        "title": "calstack",
        "uid": "calstack",
        "tags": ["calstack"],
        "schemaVersion": 39,
        "editable": True,
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "10s",
        "templating": {"list": [_variable("datasource", "datasource", "prometheus"), _job()]},
        "panels": panels,
    }
    return json.dumps(board, indent=1) + "\n"


def _panel(id_: int, title: str, unit: str, queries: list[tuple[str, str]], position: dict[str, int]) -> dict[str, Any]:
    return {
        "id": id_,
        "type": "timeseries",
        "title": title,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "gridPos": position,
        "fieldConfig": {"defaults": {"unit": unit, "custom": {"lineWidth": 1, "fillOpacity": 8, "showPoints": "never"}}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}},
        "targets": [
            {"refId": chr(ord("A") + place), "expr": expression, "legendFormat": legend}
            for place, (expression, legend) in enumerate(queries)
        ],
    }


def _variable(name: str, kind: str, query: str) -> dict[str, Any]:
    return {"name": name, "type": kind, "query": query, "label": name, "hide": 0}


def _job() -> dict[str, Any]:
    variable = _variable("job", "query", "label_values(calrt_requests_in_flight, job)")
    return {**variable, "datasource": {"type": "prometheus", "uid": "${datasource}"}, "refresh": 2}
