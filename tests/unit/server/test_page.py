"""The page for people: whole, self-contained, closed to other origins."""

from __future__ import annotations

import re

from calstack.server.page import PAGES
from tests.support.live_server import LiveServer


def test_every_file_is_served_and_lets_nothing_foreign_in(server: LiveServer) -> None:
    for path, (_, kind) in PAGES.items():
        answer = server.http.get(path)
        assert answer.status_code == 200
        assert answer.headers["content-type"].encode() == kind
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert "http" not in re.sub(r"HTTP", "", answer.text)


def test_page_links_only_what_is_served_and_names_every_control(server: LiveServer) -> None:
    page = server.http.get("/").text
    assert set(re.findall(r'(?:src|href)="([^"]+)"', page)) == set(PAGES) - {"/"}
    script = server.http.get("/static/app.js").text
    assert set(re.findall(r'at\("(\w+)"\)', script)) <= set(re.findall(r'id="(\w+)"', page))
    labelled = set(re.findall(r'<label for="(\w+)"', page)) | set(re.findall(r"<label>[^<]*<\w+ id=\"(\w+)\"", page))
    assert set(re.findall(r'<(?:input|textarea) id="(\w+)"', page)) == labelled


def test_no_other_path_below_static_exists(server: LiveServer) -> None:
    for path in ("/static/", "/static/../app.py", "/static/%2e%2e/app.py", "/static/app.py"):
        assert server.http.get(path).status_code == 404
