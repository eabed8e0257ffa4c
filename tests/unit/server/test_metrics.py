"""What a scraper reads before anything has happened."""

import pytest

from calstack.server.admission import Admission
from calstack.server.metrics import Metrics
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
