"""What a scraper reads before anything has happened."""

import pytest

from calstack.server.admission import Admission
from calstack.server.metrics import Metrics
from calstack.wire import LaunchTimes
from tests.support.live_server import LiveServer


@pytest.mark.parametrize("name", ["infer", "h2d", "d2h", "framework"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_launch_histograms_stand_at_zero_before_the_first_launch(name: str, phase: str) -> None:
    admission = Admission(lanes=1, max_requests=1, max_tokens=1)
    text = Metrics(admission, lambda: None, lambda: -1).text().decode()
    assert f'calrt_{name}_ms_count{{phase="{phase}"}} 0.0' in text


def test_health_names_device_calbin_and_memory(server: LiveServer) -> None:
    server.http.get("/metrics")
    health = server.http.get("/health").json()
    assert health == {
        "status": "ok", "device": "fake", "device_status": 0, "calbin": "tiny", "submodels": ["decode"], "memory_used_bytes": 4096,
        "memory_total_bytes": 1 << 20, "restarts": 0,
    }  # fmt: skip


@pytest.mark.parametrize("count", [1, 127, 128, 300])
def test_every_launch_and_gap_is_in_the_next_scrape(count: int) -> None:
    metrics = Metrics(Admission(lanes=1, max_requests=1, max_tokens=1), lambda: None, lambda: -1)
    one = LaunchTimes(phase="decode", submodel="d", rows=4, useful_rows=3, infer_ms=2.0, h2d_ms=0.1, d2h_ms=0.1, framework_ms=0.2)
    for _ in range(count):
        metrics.launches([one])
        metrics.next_text(0.02)
    lines = metrics.text().decode().splitlines()
    assert f'calrt_infer_ms_count{{phase="decode"}} {count}.0' in lines
    assert f'calrt_launch_rows_total{{phase="decode"}} {4 * count}.0' in lines
    assert any(line.startswith("vllm:inter_token_latency_seconds_count") and line.endswith(f" {count}.0") for line in lines)
