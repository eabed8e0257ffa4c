"""Connections that are too slow, too large, too many, half closed or never read; unix sockets and TLS."""

from __future__ import annotations

import contextlib
import socket
import ssl
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import trustme

from calstack.errors import UsageError
from calstack.server.config import LimitsConfig, ListenConfig
from calstack.server.listen import bind_unix, tls_context
from tests.support.live_server import LiveServer, live_server

LIMITS = LimitsConfig(
    head_timeout_s=1.0, body_timeout_s=0.4, idle_timeout_s=0.4, write_timeout_s=0.4, max_head_bytes=8192, max_head_fields=20
)  # fmt: skip


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("strict"), limits=LIMITS) as running:
        running.http = httpx.Client(
            base_url=running.url, timeout=30, limits=httpx.Limits(max_keepalive_connections=0)
        )  # they are closed soon
        yield running


def connect(server: LiveServer, *, receive_bytes: int = 0) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    sock = socket.socket()
    if receive_bytes:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    sock.settimeout(20)
    sock.connect((host, int(port)))
    return sock


def until_closed(sock: socket.socket) -> bytes:
    """All that comes until the other end closes or resets."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while part := sock.recv(1 << 16):
            data += part
    return data


# --- heads ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"GET /health HTTP/1.1\r\nhost: x\r\nx-slow: "])
def test_head_that_does_not_come_is_a_408(strict: LiveServer, sent: bytes) -> None:
    with connect(strict) as client:
        client.sendall(sent)
        assert until_closed(client).startswith(b"HTTP/1.1 408 ")


def test_head_that_comes_byte_by_byte_has_no_more_time(strict: LiveServer) -> None:
    with connect(strict) as client, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        for byte in b"GET /health HTTP/1.1\r\n" + b"x-drip: y\r\n" * 20:
            client.sendall(bytes([byte]))
            time.sleep(0.02)
        pytest.fail("the server waited")


def test_many_slow_heads_hold_nobody_up_and_are_all_cut_off(strict: LiveServer) -> None:
    slow = [connect(strict) for _ in range(60)]
    for client in slow:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nx: ")
    assert strict.complete("hello").json()["choices"][0]["text"] == "hello"
    for client in slow:
        assert until_closed(client).startswith(b"HTTP/1.1 408 ")
        client.close()
    strict.assert_alive()


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 9000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 30 + b"\r\n",
        b"GET /health HTTP/1.1\r\n" + b"x: " + b"y" * 9000,
        b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"".join(b"x-%d: %s\r\n" % (n, b"y" * 1000) for n in range(12)),
    ],
    ids=["long path", "long field", "many fields", "endless field", "many long fields"],
)
def test_head_that_is_too_large_is_a_431(strict: LiveServer, head: bytes) -> None:
    with connect(strict) as client:
        client.sendall(head)
        assert until_closed(client).startswith(b"HTTP/1.1 431 ")
    assert strict.http.get("/health").status_code == 200


def test_client_that_goes_on_sending_a_head_is_cut_off(strict: LiveServer) -> None:
    with connect(strict) as client, pytest.raises(OSError):  # a reset or a broken pipe
        client.sendall(b"GET / HTTP/1.1\r\n" + b"".join(b"x-%d: %s\r\n" % (n, b"y" * 1000) for n in range(40_000)))
    assert strict.http.get("/health").status_code == 200


def test_head_within_the_bounds_is_taken_also_on_a_connection_that_was_used(strict: LiveServer) -> None:
    with connect(strict) as client:
        for _ in range(5):
            client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"a: %s\r\n" % (b"b" * 400) * 15 + b"\r\n")
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("junk", [b"\x16\x03\x01\x02\x00\x01", b"HELO\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\r\n\r\n\x00\x00"])
def test_what_is_not_http_is_a_400(strict: LiveServer, junk: bytes) -> None:
    with connect(strict) as client:
        client.sendall(junk)
        assert until_closed(client).startswith(b"HTTP/1.1 400 ")


def test_refused_heads_are_counted_by_status(strict: LiveServer) -> None:
    def counted(status: int) -> float:
        lines = strict.http.get("/metrics").text.splitlines()
        return sum(float(line.split()[1]) for line in lines if line.startswith(f'calrt_errors_total{{code="{status}"}}'))

    before = [counted(status) for status in (400, 408, 431)]
    for sent in (b"HELO\r\n\r\n", b"GET /", b"", b"GET / HTTP/1.1\r\nx: " + b"y" * 9000):
        with connect(strict) as client:
            client.sendall(sent)
            until_closed(client)
    assert [counted(status) - b for status, b in zip((400, 408, 431), before, strict=True)] == [1, 1, 1]


# --- bodies and answers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/apply-template", "/v1/messages/count_tokens"])
def test_body_that_does_not_come_is_a_408(strict: LiveServer, path: str) -> None:
    with connect(strict) as client:
        client.sendall(b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{" % path.encode())
        assert until_closed(client).startswith(b"HTTP/1.1 408 ")


def test_chunked_body_beyond_the_limit_is_a_413(tmp_path: Path) -> None:
    with live_server(tmp_path, limits=LimitsConfig(max_body_bytes=10_000)) as server, connect(server) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        with contextlib.suppress(OSError):
            for _ in range(100):
                client.sendall(b"400\r\n" + b" " * 1024 + b"\r\n")
        assert until_closed(client).startswith(b"HTTP/1.1 413 ")


def test_client_that_does_not_read_is_cut_off_and_frees_its_lane(strict: LiveServer) -> None:
    body = b'{"prompt": "<|long|>abc", "stream": true, "max_tokens": 400, "n": 30, "logprobs": 20}'
    with connect(strict, receive_bytes=4096) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        assert client.recv(15) == b"HTTP/1.1 200 OK"
        strict.assert_idle_soon(20)
        time.sleep(1.0)  # more than write_timeout_s
        assert b"[DONE]" not in until_closed(client)


def test_idle_connection_is_closed(strict: LiveServer) -> None:
    with connect(strict) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        assert client.recv(10) == b""


@pytest.mark.parametrize("stream", [b"true", b"false"])
def test_half_closed_client_counts_as_gone(strict: LiveServer, stream: bytes) -> None:
    body = b'{"prompt": "<|hang|>x", "stream": %s}' % stream
    with connect(strict) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        client.shutdown(socket.SHUT_WR)
        assert until_closed(client) == b""
    strict.assert_alive()


def test_more_connections_than_may_be_get_a_503_and_the_others_work(tmp_path: Path) -> None:
    with live_server(tmp_path, listen=ListenConfig(port=0, max_connections=8)) as server:
        others = [connect(server) for _ in range(8)]
        until_answered(server, 503)
        for client in others:
            client.close()
        until_answered(server, 200)


def until_answered(server: LiveServer, status: int) -> None:
    """The server accepts, and notices that a client has closed, when it comes to it."""
    end = time.monotonic() + 10
    while httpx.get(f"{server.url}/health").status_code != status:
        assert time.monotonic() < end
        time.sleep(0.02)


# --- unix sockets --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def short() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="uds-") as found:  # pytest's own are too long for a socket
        yield Path(found)


def test_public_routes_are_served_on_a_unix_socket(short: Path, tmp_path: Path) -> None:
    path = short / "public.sock"
    with live_server(tmp_path, listen=ListenConfig(uds=path)) as server:
        assert server.url == f"unix:{path}"
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://x") as client:
            assert client.get("/health").status_code == 200
            answer = client.post("/v1/completions", json={"prompt": "hello", "stream": True})
            assert answer.text.endswith("data: [DONE]\n\n")
    assert not path.exists()


def test_socket_that_nobody_listens_on_any_more_is_replaced(short: Path) -> None:
    path = short / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with bind_unix(path, 0o600) as found:
        assert found.getsockname() == str(path)
        assert path.stat().st_mode & 0o777 == 0o600


def test_socket_in_use_a_file_and_a_long_path_are_refused(short: Path) -> None:
    (short / "file").write_text("precious")
    with bind_unix(short / "s", 0o600):
        for path in (short / "s", short / "file", short / ("x" * 120), short / "none" / "s"):
            with pytest.raises(UsageError), bind_unix(path, 0o600):
                pass
        assert (short / "s").exists()
    assert (short / "file").read_text() == "precious"


# --- TLS -----------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def encrypted(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    directory = tmp_path_factory.mktemp("tls")
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(directory / "key.pem")
    issued.cert_chain_pems[0].write_to_path(directory / "cert.pem")
    listen = ListenConfig(port=0, tls_cert=directory / "cert.pem", tls_key=directory / "key.pem")
    with live_server(directory, listen=listen) as running:
        yield running


def client_context(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


def test_https_answers_and_streams(encrypted: LiveServer, authority: trustme.CA) -> None:
    assert encrypted.url.startswith("https://")
    with httpx.Client(base_url=encrypted.url, verify=client_context(authority)) as client:
        assert client.get("/health").status_code == 200
        answer = client.post("/v1/completions", json={"prompt": "hello", "stream": True})
        assert answer.text.endswith("data: [DONE]\n\n")


def test_unknown_authority_old_protocol_and_plain_http_are_not_served(encrypted: LiveServer, authority: trustme.CA) -> None:
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{encrypted.url}/health")
    old = client_context(authority)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that they are old is the point
        old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{encrypted.url}/health", verify=old)
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{encrypted.url.replace('https', 'http')}/health")


def test_client_that_stops_in_the_handshake_holds_nobody_up(encrypted: LiveServer, authority: trustme.CA) -> None:
    host, port = encrypted.url.removeprefix("https://").split(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(b"\x16\x03\x01")
        assert httpx.get(f"{encrypted.url}/health", verify=client_context(authority)).status_code == 200


def test_certificate_that_cannot_be_used_is_refused_at_start(authority: trustme.CA, tmp_path: Path) -> None:
    issued, other = authority.issue_cert("a.example"), authority.issue_cert("b.example")
    cert, key, junk = tmp_path / "cert", tmp_path / "key", tmp_path / "junk"
    issued.cert_chain_pems[0].write_to_path(cert)
    other.private_key_pem.write_to_path(key)
    junk.write_text("junk")
    wrong = [(cert, key), (junk, None), (tmp_path / "none", None), (cert, None), (None, key)]
    for tls_cert, tls_key in wrong:
        with pytest.raises(UsageError):
            tls_context(ListenConfig(tls_cert=tls_cert, tls_key=tls_key))
