"""The page for people: whole, self-contained, closed to other origins."""

from __future__ import annotations

import json
import re
from pathlib import Path

from calstack.server.page import PAGES
from tests.support.live_server import LiveServer, live_server


def test_every_file_is_served_and_lets_nothing_foreign_in(server: LiveServer) -> None:
    for path, (_, kind) in PAGES.items():
        answer = server.http.get(path)
        assert answer.status_code == 200
        assert answer.headers["content-type"].encode() == kind
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert "http" not in answer.text.replace("http://www.w3.org/2000/svg", "")


def test_page_links_only_what_is_served_and_names_every_control(server: LiveServer) -> None:
    page = server.http.get("/").text
    scripts = "".join(server.http.get(path).text for path in PAGES if path.endswith(".js"))
    linked = re.findall(r'(?:src|href)="(/[^"]+)"', page) + re.findall(r'from "(/[^"]+)"', scripts)
    assert set(linked) == set(PAGES) - {"/"}
    assert set(re.findall(r'at\("([\w-]+)"\)', scripts)) <= set(re.findall(r'id="([\w-]+)"', page))
    labelled = set(re.findall(r'<label for="(\w+)"', page)) | set(re.findall(r'<label[^>]*>[^<]*<\w+ id="(\w+)"', page))
    assert set(re.findall(r'<(?:input|textarea) id="(\w+)"', page)) == labelled


def test_no_other_path_below_static_exists(server: LiveServer) -> None:
    for path in ("/static/", "/static/../app.py", "/static/%2e%2e/app.py", "/static/app.py"):
        assert server.http.get(path).status_code == 404


def test_live_figures_come_every_second_until_the_reader_leaves(server: LiveServer) -> None:
    server.chat("count me")
    with server.http.stream("GET", "/metrics/events") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = (line for line in response.iter_lines() if line)
        first, second = (json.loads(next(lines).removeprefix("data: ")) for _ in range(2))
    assert second["time_s"] > first["time_s"]
    assert (first["lanes"], first["kv_total"], first["memory_used"], first["state"]) == (4, 64, [4096], "ready")
    assert first["first_tokens"] >= 1
    server.assert_alive()


def test_live_figures_end_when_the_server_drains(tmp_path: Path) -> None:
    with live_server(tmp_path) as server, server.http.stream("GET", "/metrics/events") as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        server.press_stop()
        assert len([line for line in lines if line]) < 4
