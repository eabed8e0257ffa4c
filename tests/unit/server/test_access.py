"""Keys, origins, and the names that dashboards read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import anthropic
import openai
import pytest

from calstack.errors import UsageError
from calstack.server.access import Access
from calstack.server.config import AccessConfig
from tests.support.live_server import LiveServer, live_server


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    directory = tmp_path_factory.mktemp("locked")
    file = directory / "keys"
    file.write_text(f"# keys\nalice sha256:{digest('k1')}\n\n{digest('k2')}\n")
    access = AccessConfig(api_key_file=file, cors_origins=("localhost", "https://app.example"))
    with live_server(directory, access=access) as running:
        running.http.headers["authorization"] = "Bearer k1"
        yield running


@pytest.mark.parametrize("headers", [{"authorization": ""}, {"authorization": "Bearer k3"}, {"authorization": f"Bearer {digest('k1')}"}])
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/slots", "/nowhere"])
def test_without_a_valid_key_every_route_is_a_401(locked: LiveServer, path: str, headers: dict[str, str]) -> None:
    response = locked.http.get(path, headers=headers)
    assert response.status_code == 401
    assert response.json()["error"]["type"] == "authentication_error"


@pytest.mark.parametrize(
    "headers", [{"authorization": "Bearer k1"}, {"authorization": "bearer k2"}, {"authorization": "", "x-api-key": "k2"}]
)
def test_valid_key_is_taken_from_either_header(locked: LiveServer, headers: dict[str, str]) -> None:
    assert locked.http.get("/v1/models", headers=headers).status_code == 200


def test_health_needs_no_key(locked: LiveServer) -> None:
    assert locked.http.get("/health", headers={"authorization": ""}).status_code == 200


def test_official_clients_send_keys_that_are_taken_and_see_refusals(locked: LiveServer) -> None:
    good = openai.OpenAI(base_url=f"{locked.url}/v1", api_key="k1", max_retries=0)
    assert good.models.list().data
    with pytest.raises(openai.AuthenticationError):
        good.with_options(api_key="no").models.list()
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=locked.url, api_key="no", max_retries=0).messages.create(
            model="tiny", max_tokens=1, messages=[{"role": "user", "content": "x"}]
        )


@pytest.mark.parametrize("origin", ["http://localhost:3000", "https://127.0.0.1", "http://[::1]:1", "https://app.example"])
def test_allowed_origin_is_echoed(locked: LiveServer, origin: str) -> None:
    for method, path in (("OPTIONS", "/v1/chat/completions"), ("GET", "/v1/models"), ("GET", "/nowhere")):
        answer = locked.http.request(method, path, headers={"origin": origin})
        assert answer.headers["access-control-allow-origin"] == origin
        assert "authorization" in answer.headers["access-control-allow-headers"]


@pytest.mark.parametrize(
    "origin",
    [
        "http://localhost.evil.example", "http://evil.localhost.example", "http://notlocalhost", "https://app.example.evil",
        "http://app.example", "null", "http://localhost@evil.example", "ftp://localhost", "http://[bad",
    ],
)  # fmt: skip
def test_other_origin_gets_no_header(locked: LiveServer, origin: str) -> None:
    answer = locked.http.get("/v1/models", headers={"origin": origin})
    assert answer.status_code == 200
    assert "access-control-allow-origin" not in answer.headers


def test_no_origin_is_allowed_unless_named(server: LiveServer) -> None:
    assert "access-control-allow-origin" not in server.http.get("/v1/models", headers={"origin": "http://localhost"}).headers


@pytest.mark.parametrize("text", ["", "# none\n", "secret\n", "a b c\n"])
def test_key_file_without_digests_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(UsageError):
        Access(AccessConfig(api_key_file=file))
    with pytest.raises(UsageError):
        Access(AccessConfig(api_key_file=tmp_path / "missing"))


def test_dashboard_names_count_what_was_done(server: LiveServer) -> None:
    def value(name: str) -> float:
        lines = server.http.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))

    names = ["llamacpp:tokens_predicted_total", "vllm:generation_tokens_total", "vllm:request_success_total", "llamacpp:n_decode_total"]
    before = [value(name) for name in names]
    used = server.complete("hello world").json()["usage"]["completion_tokens"]
    after = [value(name) for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)][:3] == [used, used, 1]
    assert after[3] > before[3]
    assert value("vllm:time_to_first_token_seconds_count") > 0
    assert value("llamacpp:requests_processing") == value("vllm:num_requests_waiting") == 0
