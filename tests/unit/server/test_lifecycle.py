"""Trials G and the server's life: disconnects, overload, errors, crashes, loading, drain."""

from __future__ import annotations

import concurrent.futures
import json
import random
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from calstack.errors import ArtifactError
from calstack.server.config import LimitsConfig
from tests.support.live_server import LiveServer, live_server


def eventually(check: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.01)


def raw(server: LiveServer, path: str, body: dict[str, Any]) -> socket.socket:
    """A request on a bare socket, so that the test decides when it closes."""
    url = httpx.URL(server.url)
    sock = socket.create_connection((url.host, url.port or 80), timeout=10)
    data = json.dumps(body).encode()
    sock.sendall(
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data
    )
    return sock


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("prompt", ["<|hang|>x", "<|long|><|slow|>abc"])
def test_client_that_leaves_frees_its_lane(server: LiveServer, stream: bool, prompt: str) -> None:
    sock = raw(server, "/v1/completions", {"prompt": prompt, "max_tokens": 400, "stream": stream})
    eventually(lambda: server.context.supervisor.info is not None and len(server.context.journal) == 1)
    sock.close()
    eventually(server.idle, 2.0)
    server.assert_alive()


def test_queued_request_of_a_client_that_left_never_starts(tmp_path: Path) -> None:
    with live_server(tmp_path, lanes=1) as server:
        long = raw(server, "/v1/completions", {"prompt": "<|hang|>x", "max_tokens": 4})
        eventually(lambda: len(server.context.journal) == 1)
        queued = [raw(server, "/v1/completions", {"prompt": "<|slow|>ab", "max_tokens": 4}) for _ in range(5)]
        eventually(lambda: len(server.context.journal) == 6)
        for sock in queued[:3]:
            sock.close()
        eventually(lambda: len(server.context.journal) == 3)
        long.close()
        for sock in queued[3:]:
            assert sock.recv(15).startswith(b"HTTP/1.1 200")
            sock.close()
        eventually(server.idle)
        starts = [line for line in server.engine_log() if line["what"] == "start"]
        assert len(starts) == 3  # the long one and the two that stayed


def test_aborts_at_any_time_leave_nothing_behind(server: LiveServer) -> None:
    rng = random.Random(7)

    def one(number: int) -> None:
        sock = raw(server, "/v1/completions", {"prompt": "<|slow|>abcdefgh", "max_tokens": 6, "stream": number % 2 == 0})
        time.sleep(rng.random() * 0.15)
        sock.close()

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(100)))
    eventually(server.idle)
    server.assert_alive()


def test_burst_beyond_the_queue_is_answered_or_refused_with_retry_after(tmp_path: Path) -> None:
    with live_server(tmp_path, limits=LimitsConfig(max_queued_requests=16), lanes=4) as server:

        def one(_: int) -> tuple[int, str | None, float]:
            began = time.monotonic()
            response = httpx.post(f"{server.url}/v1/completions", json={"prompt": "<|slow|>hello", "max_tokens": 3}, timeout=30)
            return response.status_code, response.headers.get("retry-after"), time.monotonic() - began

        with concurrent.futures.ThreadPoolExecutor(64) as pool:
            results = list(pool.map(one, range(64)))
        codes = [code for code, _, _ in results]
        assert set(codes) == {200, 429}
        assert codes.count(200) >= 20
        assert all(retry is not None and int(retry) >= 1 for code, retry, _ in results if code == 429)
        assert server.context.admission.refused == codes.count(429)
        assert f"calrt_refused_total {float(codes.count(429))}" in server.http.get("/metrics").text
        server.assert_alive()


def test_refused_request_was_not_tokenised(tmp_path: Path) -> None:
    with live_server(tmp_path, limits=LimitsConfig(max_queued_requests=0), lanes=1) as server:
        hang = raw(server, "/v1/completions", {"prompt": "<|hang|>x", "max_tokens": 4})
        eventually(lambda: len(server.context.journal) == 1)
        began = time.monotonic()
        response = server.complete("word " * 200_000)
        assert response.status_code == 429
        assert response.json()["error"]["type"] == "rate_limit_error"
        assert time.monotonic() - began < 2
        hang.close()


def test_waiting_prompt_tokens_are_bounded(tmp_path: Path) -> None:
    with live_server(tmp_path, limits=LimitsConfig(max_queued_tokens=300), lanes=1) as server:
        hang = raw(server, "/v1/completions", {"prompt": "<|hang|>x", "max_tokens": 4})
        eventually(lambda: len(server.context.journal) == 1)
        waiting = raw(server, "/v1/completions", {"prompt": "z" * 250, "max_tokens": 4})
        eventually(lambda: len(server.context.journal) == 2)
        assert server.complete("z" * 250).status_code == 429
        assert server.context.admission.in_flight == 2
        hang.close()
        waiting.close()
        eventually(server.idle)


def test_error_before_the_first_token_is_a_plain_status_in_a_stream(server: LiveServer) -> None:
    response = server.complete("x<|error|>", stream=True)
    assert response.status_code == 500
    assert "the fake device broke" in response.json()["error"]["message"]
    server.assert_alive()


def test_error_in_a_stream_is_an_event_that_the_client_raises(server: LiveServer) -> None:
    stream = server.openai.completions.create(model="tiny", prompt="<|slow|><|error|>abc", max_tokens=10, stream=True)
    with pytest.raises(openai.APIError, match="the fake device broke"):
        list(stream)
    assert server.complete("<|error|>abc").status_code == 500
    assert 'calrt_errors_total{code="500"}' in server.http.get("/metrics").text
    server.assert_alive()


@pytest.mark.parametrize("stream", [True, False])
def test_request_survives_a_crash_of_the_engine_with_the_tokens_it_would_have_had(tmp_path: Path, stream: bool) -> None:
    with live_server(tmp_path) as server:
        body = {"prompt": "<|crash|>abcdef", "max_tokens": 10}
        if stream:
            text = "".join(event["choices"][0]["text"] for event in server.events("/v1/completions", **body))
        else:
            text = server.post("/v1/completions", **body).json()["choices"][0]["text"]
        assert text == "abcdef"
        submits = [line for line in server.engine_log() if line["what"] == "submit"]
        assert [line["output"] for line in submits] == [0, 2]
        assert server.http.get("/health").json()["restarts"] == 1
        server.assert_alive()


def test_request_that_crashes_the_engine_every_time_fails_alone(tmp_path: Path) -> None:
    with live_server(tmp_path, crash_always=True) as server:
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            neighbour = pool.submit(server.complete, "<|slow|>" + "innocent " * 20, max_tokens=500)
            culprit = pool.submit(server.complete, "<|crash|>abcdefgh")
            assert culprit.result().status_code == 503
            assert "died" in culprit.result().json()["error"]["message"]
            assert neighbour.result().status_code in {200, 503}
        submits = [line["alone"] for line in server.engine_log() if line["what"] == "submit"]
        assert submits.count(True) >= 1
        eventually(lambda: server.http.get("/health").status_code == 200)
        server.assert_alive()


def test_health_is_503_while_loading_and_requests_are_told_to_wait(tmp_path: Path) -> None:
    with live_server(tmp_path, ready_after_s=0.7, wait=False) as server:
        response = server.http.get("/health")
        assert response.status_code == 503
        error = response.json()["error"]
        assert (error["message"].split(" (")[0], error["type"], error["code"]) == ("Loading model", "unavailable_error", 503)
        refused = server.chat("x")
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert server.http.get("/metrics").status_code == 200
        eventually(lambda: server.http.get("/health").status_code == 200)
        server.assert_alive()


def test_engine_that_cannot_load_ends_the_server_with_its_words(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="parameters are missing"), live_server(tmp_path, fail_start="parameters are missing"):
        pass


def test_drain_finishes_running_streams_and_refuses_new_work(tmp_path: Path) -> None:
    with live_server(tmp_path, lanes=2) as server, concurrent.futures.ThreadPoolExecutor(8) as pool:
        running = [pool.submit(server.events, "/v1/completions", prompt="<|slow|>" + "a" * 30, max_tokens=30) for _ in range(4)]
        eventually(lambda: len(server.context.journal) == 4)
        server.press_stop()
        eventually(lambda: server.context.draining)
        refused = server.complete("x")
        assert refused.status_code == 503
        assert "retry-after" in refused.headers
        assert server.http.get("/health").status_code == 503
        for future in running:
            assert "".join(event["choices"][0]["text"] for event in future.result(10)) == "a" * 30
        server.thread.join(5)
        assert not server.thread.is_alive()


def test_work_beyond_the_grace_time_ends_with_a_readable_error(tmp_path: Path) -> None:
    with live_server(tmp_path, grace_s=0.3) as server, concurrent.futures.ThreadPoolExecutor(2) as pool:
        whole = pool.submit(server.complete, "<|hang|>x")
        stream = pool.submit(server.complete, "<|slow|><|long|>ab", max_tokens=400, stream=True)
        eventually(lambda: len(server.context.journal) == 2)
        time.sleep(0.1)
        server.press_stop()
        assert whole.result(5).status_code == 503
        lines = [line for line in stream.result(5).text.split("\n\n") if line]
        assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == 503
        assert lines[-1] == "data: [DONE]"


def test_second_press_does_not_wait(tmp_path: Path) -> None:
    with live_server(tmp_path, grace_s=60) as server, concurrent.futures.ThreadPoolExecutor(1) as pool:
        hanging = pool.submit(server.complete, "<|hang|>x")
        eventually(lambda: len(server.context.journal) == 1)
        began = time.monotonic()
        server.press_stop()
        server.press_stop()
        assert hanging.result(5).status_code == 503
        server.thread.join(5)
        assert time.monotonic() - began < 3


def test_metrics_name_what_dashboards_read(server: LiveServer) -> None:
    server.chat("count me")
    text = server.http.get("/metrics").text
    for name in ("calrt_infer_ms", "calrt_h2d_ms", "calrt_d2h_ms", "calrt_framework_ms"):
        assert f"# TYPE {name} histogram" in text
        assert f'{name}_count{{phase="decode"}}' in text
    for name in ("calrt_kv_used_batches", "calrt_kv_allocation_wait_ms", "calrt_device_dram_used_bytes", "calrt_device_status"):
        assert f"# TYPE {name} gauge" in text
    assert "# TYPE calrt_errors_total counter" in text
    assert 'calrt_http_requests_total{code="200",route="/v1/chat/completions"}' in text
    assert "calrt_ttft_ms_count" in text
    assert "_created" not in text


def test_metrics_and_health_answer_while_the_engine_is_busy(server: LiveServer) -> None:
    sock = raw(server, "/v1/completions", {"prompt": "<|hang|>x", "max_tokens": 4})
    began = time.monotonic()
    assert server.http.get("/health").status_code == 200
    assert server.http.get("/metrics").status_code == 200
    assert time.monotonic() - began < 5
    sock.close()
    eventually(server.idle)


def test_client_that_leaves_before_its_prompt_is_tokenised_never_starts(server: LiveServer) -> None:
    for _ in range(20):
        sock = raw(server, "/v1/completions", {"prompt": "<|hang|>x" + "y" * 300, "max_tokens": 4})
        sock.close()
    server.assert_idle_soon()
    server.assert_alive()


def test_neighbour_keeps_its_text_among_refused_and_broken_requests(server: LiveServer) -> None:
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        good = [pool.submit(server.events, "/v1/completions", prompt=f"<|slow|>neighbour {n} says", max_tokens=60) for n in range(3)]
        for _ in range(20):
            assert server.complete("x<|error|>").status_code == 500
            assert server.http.post("/v1/completions", content=b"\xff{").status_code == 400
        texts = ["".join(event["choices"][0]["text"] for event in future.result()) for future in good]
    assert texts == [f"neighbour {n} says" for n in range(3)]
