"""Every metric that a dashboard reads is exported, and counts what it says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.live_server import LiveServer

BOARD = Path(__file__).parents[3] / "deploy" / "grafana" / "calstack.json"
NAME = re.compile(r"\b((?:calrt_|vllm:|llamacpp:|process_)\w+)")
# what llama-server's and vLLM's own dashboards read, as far as it means something here
LLAMA = re.findall(
    r"\w+",
    """
    prompt_tokens_total prompt_tokens_cached_total prompt_seconds_total tokens_predicted_total tokens_predicted_seconds_total
    n_decode_total n_tokens_max spec_decode_num_draft_tokens_total spec_decode_num_accepted_tokens_total spec_decode_num_drafts_total
    prompt_tokens_seconds predicted_tokens_seconds requests_processing requests_deferred n_busy_slots_per_decode
    """,
)
VLLM = re.findall(
    r"\w+",
    """
    num_requests_running num_requests_waiting kv_cache_usage_perc gpu_cache_usage_perc cache_config_info num_preemptions_total
    prompt_tokens_total generation_tokens_total request_success_total prefix_cache_queries_total prefix_cache_hits_total
    spec_decode_num_drafts_total spec_decode_num_draft_tokens_total spec_decode_num_accepted_tokens_total admission_rejections_total
    time_to_first_token_seconds_bucket inter_token_latency_seconds_bucket time_per_output_token_seconds_bucket
    request_time_per_output_token_seconds_bucket e2e_request_latency_seconds_bucket request_queue_time_seconds_bucket
    request_prefill_time_seconds_bucket request_decode_time_seconds_bucket request_inference_time_seconds_bucket
    request_prompt_tokens_bucket request_generation_tokens_bucket request_max_num_generation_tokens_bucket request_params_n_bucket
    request_params_max_tokens_bucket iteration_tokens_total_bucket
    """,
)


def samples(server: LiveServer) -> dict[str, float]:
    """Sum over labels by sample name."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(server.http.get("/metrics").text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def expressions() -> list[str]:
    board: dict[str, Any] = json.loads(BOARD.read_text())
    return [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]


def test_every_metric_of_the_grafana_dashboard_is_exported(server: LiveServer) -> None:
    server.complete("hello")
    server.complete("x<|error|>")
    exported = samples(server)
    named = {name for expression in expressions() for name in NAME.findall(expression)}
    assert len(named) > 30
    assert named - set(exported) == set()


def test_every_quantile_of_the_grafana_dashboard_reads_buckets_of_a_histogram() -> None:
    for expression in expressions():
        assert ("histogram_quantile" in expression) == ("_bucket" in expression), expression


def test_panels_of_the_grafana_dashboard_do_not_overlap() -> None:
    places = [panel["gridPos"] for panel in json.loads(BOARD.read_text())["panels"]]
    cells = [(x, y) for p in places for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


@pytest.mark.parametrize("name", [*(f"llamacpp:{name}" for name in LLAMA), *(f"vllm:{name}" for name in VLLM)])
def test_name_that_other_dashboards_read_is_there_from_the_start(server: LiveServer, name: str) -> None:
    assert name in samples(server)


def test_what_a_request_asks_for_and_gets_is_observed(server: LiveServer) -> None:
    before = samples(server)
    usage = server.complete("<|slow|>hello", n=2, max_tokens=50).json()["usage"]
    after = samples(server)

    def more(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    assert more("vllm:request_params_n_sum") == 2
    assert more("vllm:request_params_n_count") == 1
    assert more("vllm:request_params_max_tokens_sum") == 50
    assert more("vllm:request_max_num_generation_tokens_sum") == usage["completion_tokens"] / 2
    assert (
        more("vllm:inter_token_latency_seconds_count") == more("vllm:time_per_output_token_seconds_count") == usage["completion_tokens"] - 4
    )  # the ends
    assert more("vllm:request_inference_time_seconds_count") == 2
    assert more("vllm:iteration_tokens_total_count") == more("calrt_submodel_launches_total")


def test_refusals_are_counted_by_cause(server: LiveServer) -> None:
    found = samples(server)
    assert found["calrt_refused_total"] == found["vllm:admission_rejections_total"]
    assert found["calrt_key_refused_total"] == 0
