"""What the log says of requests, and what it does not."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from calstack.server.config import LogConfig
from calstack.server.log import JsonFormatter
from tests.support.live_server import LiveServer, live_server

SECRET = "xylophone"


class Lines:
    def __init__(self) -> None:
        self.stream = io.StringIO()

    def of(self, request_id: str) -> dict[str, Any]:
        found = [json.loads(line) for line in self.stream.getvalue().splitlines()]
        return next(line for line in found if line.get("request_id") == request_id)


@pytest.fixture
def lines() -> Iterator[Lines]:
    """All that this package logs, at the finest level, as the server would write it."""
    found, logger = Lines(), logging.getLogger("calstack")
    handler = logging.StreamHandler(found.stream)
    handler.setFormatter(JsonFormatter())
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel("DEBUG")
    yield found
    logger.setLevel(level)
    logger.removeHandler(handler)


def post(server: LiveServer, path: str, request_id: str, **body: Any) -> int:
    return server.http.post(path, json=body, headers={"x-request-id": request_id}).status_code


def test_request_is_one_line_with_its_id_route_counts_and_time(server: LiveServer, lines: Lines) -> None:
    post(server, "/v1/completions", "mine", prompt="hello", n=2)
    line = lines.of("mine")
    assert (line["message"], line["route"], line["status"], line["choices"]) == ("request", "/v1/completions", 200, 2)
    assert line["finish"] == ["stop"]
    assert line["prompt_tokens"] > 0
    assert line["output_tokens"] > 0
    assert line["ms"] > 0


def test_no_text_is_logged_whatever_becomes_of_the_request(server: LiveServer, lines: Lines) -> None:
    bodies: list[dict[str, Any]] = [
        {"prompt": SECRET},
        {"prompt": SECRET, "stream": True},
        {"prompt": f"{SECRET}<|error|>"},
        {"prompt": SECRET, "temperature": SECRET},
        {"prompt": {SECRET: SECRET}},
        {"prompt": SECRET * 200},
        {"prompt": "x", "stop": SECRET, "grammar": f"root ::= {SECRET}"},
        {"prompt": "x", "json_schema": {"type": SECRET}},
    ]
    for number, body in enumerate(bodies):
        for path in ("/v1/completions", "/completion", "/infill"):
            post(server, path, f"r{number}", **body)
        post(server, "/v1/chat/completions", f"c{number}", messages=[{"role": SECRET, "content": SECRET}], **body)
    post(server, "/tokenize", "t", content=SECRET)
    server.http.post("/v1/completions", content=SECRET.encode())
    server.http.get(f"/{SECRET}", headers={"authorization": f"Bearer {SECRET}"})
    assert lines.of("t")["status"] == 200
    assert SECRET not in lines.stream.getvalue()


def test_bodies_are_logged_when_asked_for(tmp_path: Path, lines: Lines) -> None:
    with live_server(tmp_path, log=LogConfig(prompts=True)) as server:
        post(server, "/v1/completions", "shown", prompt=SECRET)
        server.http.post("/v1/completions", content=b"\xff" * 100_000, headers={"x-request-id": "odd"})
    assert json.loads(lines.of("shown")["body"]) == {"prompt": SECRET}
    assert len(lines.of("odd")["body"]) == 1 << 16
