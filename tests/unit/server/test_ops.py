"""The operations plane: who may do what, what it does, and that nothing of it is on the public port."""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from calstack.errors import OverloadedError, UsageError
from calstack.server.config import OpsConfig
from calstack.server.errors import AuthenticationError
from calstack.server.ops.audit import verify
from calstack.server.ops.gate import Gate, Role
from calstack.server.ops.plane import ROUTES
from tests.support.live_server import LiveServer, live_server


class Operated:
    """A server and its operations socket."""

    def __init__(self, server: LiveServer, socket: Path) -> None:
        self.server, self.socket = server, socket

    def call(self, path: str, *, token: str = "", url: str = "http://ops", **order: Any) -> httpx.Response:
        transport = httpx.HTTPTransport(uds=str(self.socket)) if url == "http://ops" else None
        headers = {"authorization": f"Bearer {token}"} if token else {}
        with httpx.Client(transport=transport, base_url=url, timeout=30, headers=headers) as client:
            method = ROUTES[path].method if path in ROUTES else "GET"
            return client.request(method, path, json=order if method == "POST" else None)

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.socket.parent / "audit.jsonl").read_text().splitlines()]


def digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ops-") as found:  # pytest's own are too long for a socket
        yield Path(found)


def operated(directory: Path, config: OpsConfig | None = None, **rules: Any) -> Iterator[Operated]:
    runtime = directory / "run"
    with live_server(directory, ops=config or OpsConfig(), runtime_dir=runtime, **rules) as server:
        yield Operated(server, runtime / "ops.sock")


@pytest.fixture(scope="module")
def plane(directory: Path) -> Iterator[Operated]:
    tokens = directory / "tokens"
    tokens.write_text(f"# who may\neve viewer sha256:{digest('look')}\n\nolga operator {digest('act')}\n")
    yield from operated(directory, OpsConfig(token_file=tokens, reads_per_s=1000, registers=("temperature",)), reset_s=0.3)


def test_status_shows_engine_device_and_memory(plane: Operated) -> None:
    status = plane.call("/status").json()
    assert (status["engine"], status["draining"], status["in_flight"]) == ("ready", False, 0)
    assert status["device"]["name"] == "fake"
    assert status["device"]["chips"][0]["used_bytes"] == 4096
    assert status["device"]["status"] == "ready"


def test_status_of_an_engine_that_does_not_answer_says_so(plane: Operated, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("calstack.server.ops.plane._STATUS_S", 0.2)
    (directory / "mute").touch()
    status = plane.call("/status").json()
    (directory / "mute").unlink()
    assert status["device"] is None
    assert "did not answer" in status["error"]
    assert plane.call("/status").json()["error"] is None


def test_socket_is_for_its_user_alone(plane: Operated) -> None:
    assert plane.socket.stat().st_mode & 0o777 == 0o600
    assert plane.socket.parent.stat().st_mode & 0o777 == 0o700
    assert (plane.socket.parent / "audit.jsonl").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("prefix", ["", "/ops", "/v1"])
@pytest.mark.parametrize("path", ROUTES)
def test_public_port_has_none_of_it(plane: Operated, path: str, prefix: str) -> None:
    before = plane.server.engine_log()
    for method in ("GET", "POST", "PUT", "DELETE"):
        response = plane.server.http.request(method, prefix + path, headers={"authorization": "Bearer act"}, json={})
        assert response.status_code == 404
    assert plane.server.engine_log() == before


def test_no_route_reads_or_writes_memory_or_writes_registers() -> None:
    assert set(ROUTES) == {"/status", "/reset", "/dump", "/drain", "/resume", "/log-level", "/power", "/register"}


def test_viewer_may_look_and_not_act(plane: Operated) -> None:
    assert plane.call("/status", token="look").status_code == 200
    before = plane.server.engine_log()
    for path in ROUTES:
        if path != "/status":
            response = plane.call(path, token="look")
            assert (response.status_code, response.json()["error"]["type"]) == (403, "permission_error")
            assert (plane.records()[-1]["outcome"], plane.records()[-1]["who"]) == ("denied", "token:eve")
    assert plane.server.engine_log() == before


def test_wrong_token_is_refused_even_from_a_user_who_may(plane: Operated) -> None:
    assert plane.call("/status", token="guess").status_code == 401
    assert plane.call("/reset", token=digest("act")).status_code == 401
    assert plane.records()[-1]["outcome"] == "denied"


def test_unknown_routes_methods_and_fields_are_refused(plane: Operated) -> None:
    assert plane.call("/memory").status_code == 404
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(plane.socket)), base_url="http://ops") as client:
        assert client.get("/reset").status_code == 404
        assert client.post("/reset", json={"adress": 4}).status_code == 400
        assert client.post("/reset", content=b"{").status_code == 400
        assert client.post("/reset", content=b" " * 5000).status_code == 413


def test_reset_is_done_by_the_engine_and_audited_with_begin_and_end(plane: Operated) -> None:
    count = len(plane.records())
    assert plane.call("/reset", token="act").json()["status"] == "ready"
    assert plane.server.engine_log()[-1] == {"what": "command", "action": "reset", "value": ""}
    new = plane.records()[count:]
    assert [(one["who"], one["action"], one["outcome"]) for one in new] == [
        ("token:olga", "/reset", "begun"),
        ("token:olga", "/reset", "done"),
    ]


def test_only_one_changing_operation_runs(plane: Operated) -> None:
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        codes = sorted(pool.map(lambda _: plane.call("/reset").status_code, range(4)))
    assert codes == [200, 409, 409, 409]
    assert plane.call("/status").status_code == 200


def test_power_mode_of_a_device_without_one_is_a_501(plane: Operated) -> None:
    response = plane.call("/power", mode="low")
    assert (response.status_code, response.json()["error"]["type"]) == (501, "not_supported_error")
    assert plane.records()[-1]["outcome"] == "failed"


def test_registers_are_read_only_where_the_configuration_names_them(plane: Operated) -> None:
    assert plane.call("/register", name="temperature").json() == {"name": "temperature", "value": 7}
    for name in ("clock", "", "temperature "):
        assert plane.call("/register", name=name).status_code == 403
    assert [one["value"] for one in plane.server.engine_log() if one.get("action") == "register"] == ["temperature"]


def test_drain_refuses_new_work_lets_the_old_finish_and_resume_takes_it_back(plane: Operated) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(plane.server.complete, "<|slow|>abcdefghijklmnop")
        while plane.server.context.admission.in_flight == 0:
            time.sleep(0.005)
        assert plane.call("/drain").json() == {"draining": True, "in_flight": 1}
        assert plane.server.http.get("/health").status_code == 503
        assert plane.server.complete("x").status_code == 503
        assert plane.call("/status").json()["draining"] is True
        assert running.result().json()["choices"][0]["text"] == "abcdefghijklmnop"
    assert plane.call("/resume").json() == {"draining": False}
    plane.server.assert_alive()


def test_log_level_is_set(plane: Operated) -> None:
    assert plane.call("/log-level", level="debug").json() == {"log_level": "debug"}
    assert plane.call("/status").json()["log_level"] == "debug"
    assert plane.call("/log-level", level="loud").status_code == 400
    plane.call("/log-level", level="info")


def test_audit_log_is_a_valid_chain_and_status_names_its_head(plane: Operated) -> None:
    chain = verify(plane.socket.parent / "audit.jsonl")
    assert chain.records > 2
    assert plane.call("/status").json()["audit"] == {"records": chain.records, "head": chain.head}


def test_action_that_cannot_be_recorded_is_not_done(plane: Operated, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    before = plane.server.engine_log()
    monkeypatch.setattr(os, "write", full)
    response = plane.call("/reset")
    monkeypatch.undo()
    assert response.status_code == 500
    assert "No space left" in response.json()["error"]["message"]
    assert plane.server.engine_log() == before
    verify(plane.socket.parent / "audit.jsonl")
    assert plane.call("/reset").status_code == 200


def test_engine_that_dies_under_an_operation_is_a_503(plane: Operated) -> None:
    response = plane.call("/dump")  # the fake engine dies of it, once
    assert response.status_code == 503
    assert plane.records()[-1]["outcome"] == "failed"
    plane.server.assert_idle_soon()


def test_status_answers_while_the_engine_loads_and_actions_do_not(tmp_path: Path) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="ops-") as found,
        live_server(tmp_path, ops=OpsConfig(), runtime_dir=Path(found) / "run", ready_after_s=1.0, wait=False) as server,
    ):
        plane = Operated(server, Path(found) / "run" / "ops.sock")
        status = plane.call("/status").json()
        assert (status["engine"], status["device"]) == ("loading", None)
        assert plane.call("/reset").status_code == 503


def test_drain_with_exit_ends_the_server(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="ops-") as found, live_server(tmp_path, runtime_dir=Path(found) / "run") as server:
        plane = Operated(server, Path(found) / "run" / "ops.sock")
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            running = pool.submit(server.complete, "<|slow|>abcdefghijklmnop")
            while server.context.admission.in_flight == 0:
                time.sleep(0.005)
            assert plane.call("/drain", exit=True).status_code == 200
            assert plane.call("/resume").status_code == 409
            assert running.result().status_code == 200
        server.thread.join(10)
        assert not server.thread.is_alive()
        assert not plane.socket.exists()


def test_token_works_over_tcp_and_a_user_does_not(tmp_path: Path, free_port: int) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"olga operator {digest('act')}\n")
    with live_server(tmp_path, ops=OpsConfig(token_file=tokens, port=free_port)) as server:
        plane = Operated(server, tmp_path)
        url = f"http://127.0.0.1:{free_port}"
        assert plane.call("/status", url=url).status_code == 401
        assert plane.call("/reset", url=url, token="act").status_code == 200


def test_disabled_plane_has_no_socket(tmp_path: Path) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="ops-") as found,
        live_server(tmp_path, ops=OpsConfig(enabled=False), runtime_dir=Path(found) / "run"),
    ):
        assert not (Path(found) / "run" / "ops.sock").exists()


# --- the gate ------------------------------------------------------------------------------------------------------------------


def test_users_have_the_roles_that_are_configured() -> None:
    gate = Gate(OpsConfig(viewers=("1234",), operators=("4321", "nobody")))
    assert gate.admit(1234, [], 0.0).role is Role.VIEWER
    assert gate.admit(4321, [], 0.0).role is Role.OPERATOR
    assert gate.admit(os.geteuid(), [], 0.0).role is Role.OPERATOR
    for stranger in (999_999, None):
        with pytest.raises(AuthenticationError):
            gate.admit(stranger, [], 0.0)


def test_caller_that_asks_too_often_waits_and_others_do_not() -> None:
    gate = Gate(OpsConfig(viewers=("1234",), reads_per_s=2.0))
    for _ in range(20):
        gate.admit(1234, [], 0.0)
    with pytest.raises(OverloadedError) as refused:
        gate.admit(1234, [], 0.0)
    assert 0 < refused.value.retry_after <= 0.5
    gate.admit(0, [], 0.0)
    gate.admit(1234, [], 0.5)
    with pytest.raises(OverloadedError):
        gate.admit(1234, [], 0.5)


@pytest.mark.parametrize("text", ["", "# none\n", "eve boss " + "0" * 64, "eve viewer secret", "0" * 64])
def test_token_file_that_says_something_else_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "tokens"
    file.write_text(text)
    with pytest.raises(UsageError):
        Gate(OpsConfig(token_file=file))


@pytest.mark.parametrize("config", [OpsConfig(port=1), OpsConfig(viewers=("no such user",)), OpsConfig(token_file=Path("/nonexistent"))])
def test_plane_that_nobody_could_use_is_refused(config: OpsConfig) -> None:
    with pytest.raises(UsageError):
        Gate(config)
