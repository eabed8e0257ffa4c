"""The server's parts without a socket: admission, body bounds, frames, journal, configuration, logs."""

from __future__ import annotations

import asyncio
import json
import logging
import struct
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calstack import errors
from calstack.errors import OverloadedError, RequestError, UsageError
from calstack.server.admission import Admission
from calstack.server.body import check_depth
from calstack.server.config import EngineConfig, ListenConfig, ServeConfig
from calstack.server.errors import answer_of, error_of
from calstack.server.journal import Journal
from calstack.server.launch import engine_command, runtime_directory
from calstack.server.link import EngineLink
from calstack.server.log import JsonFormatter
from calstack.specs import SamplingParams
from calstack.wire import EngineStats, ErrorValue, Finish, StepOutput, Submit, TokenLogprob, TokenOut


def depth_of(text: str) -> int:
    depth = most = 0
    for char in text:
        depth += (char == "[") - (char == "]")
        most = max(most, depth)
    return most


@given(st.text('[]"\\x', max_size=40))
def test_depth_check_counts_as_json_does(text: str) -> None:
    nested = json.dumps({"a": text})
    check_depth(nested.encode(), 1)  # brackets inside a string never count


@given(st.text("[]", max_size=40), st.integers(1, 10))
def test_depth_check_refuses_exactly_what_is_deeper(text: str, limit: int) -> None:
    if depth_of(text) > limit:
        with pytest.raises(RequestError, match="nested deeper"):
            check_depth(text.encode(), limit)
    else:
        check_depth(text.encode(), limit)


def test_admission_refuses_beyond_lanes_and_queue_and_takes_again_after_a_release() -> None:
    admission = Admission(lanes=2, max_requests=3, max_tokens=100)
    places = admission.reserve(5)
    with pytest.raises(OverloadedError):
        admission.reserve(1)
    admission.release(places[0])
    admission.release(places[0])  # a second release of one place has no effect
    assert admission.in_flight == 4
    admission.reserve(1)
    assert admission.waiting == 3
    assert admission.refused == 1


def test_retry_after_follows_measured_times() -> None:
    admission = Admission(lanes=2, max_requests=10, max_tokens=100)
    for place in admission.reserve(12):
        admission.release(place, service_s=6.0)
    admission.reserve(12)
    assert admission.retry_after() == pytest.approx((10 + 1) / 2 * 6.0)
    assert answer_of(OverloadedError("full", retry_after=admission.retry_after())).headers == {"retry-after": "33"}


def test_waiting_tokens_return_to_zero_however_a_choice_ends() -> None:
    admission = Admission(lanes=1, max_requests=10, max_tokens=100)
    places = admission.reserve(3)
    admission.hold_tokens(places, 7)
    assert admission.waiting_tokens == 21
    admission.started(places[0])
    admission.started(places[0])
    for place in places:
        admission.release(place)
    assert (admission.waiting_tokens, admission.in_flight) == (0, 0)


def stats(**counters: int) -> EngineStats:
    return EngineStats(
        lanes_used=0, queued_requests=0, queued_tokens=0, running=0, kv_blocks_used=0, kv_blocks_total=0, kv_wait_ms=0.0,
        dram_used_bytes=(), device_status=0, times_s={}, counters=counters,
    )  # fmt: skip


def framed(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


@given(st.integers(1, 9), st.integers(1, 50))
def test_frames_come_out_whole_however_they_are_cut(count: int, size: int) -> None:
    got: list[object] = []
    link = EngineLink(got.append, lambda _: None)
    messages = [stats(number=number) for number in range(count)]
    data = b"".join(framed(msgspec.msgpack.encode(message)) for message in messages)
    for start in range(0, len(data), size):
        link.data_received(data[start : start + size])
    assert got == messages


@pytest.mark.parametrize("data", [b"\xff\xff\xff\x7f", framed(b"\xc1nonsense"), framed(msgspec.msgpack.encode({"type": "Other"}))])
def test_damaged_frame_breaks_the_connection(data: bytes) -> None:
    class Transport(asyncio.Transport):
        aborted = False

        def abort(self) -> None:
            self.aborted = True

    lost: list[Exception | None] = []
    link, transport = EngineLink(lambda _: pytest.fail("no message"), lost.append), Transport()
    link.connection_made(transport)
    link.data_received(data)
    link.connection_lost(None)
    assert transport.aborted
    assert lost[0] is not None


class Collect:
    def __init__(self) -> None:
        self.ids: list[int] = []
        self.ends: list[Finish] = []

    def on_tokens(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> None:
        self.ids.extend(ids)

    def on_prompt(self, start: int, logprobs: Sequence[TokenLogprob]) -> None: ...

    def on_finish(self, finish: Finish) -> None:
        self.ends.append(finish)


def submit(name: str) -> Submit:
    return Submit(request=name, prompt=(1, 2), max_tokens=9, sampling=SamplingParams(), seed=3, choice=1)


def test_journal_resumes_after_what_was_delivered_with_the_same_seed_and_choice() -> None:
    journal, sink = Journal(), Collect()
    entry = journal.accept(submit("a"), sink)
    entry.sent = True
    journal.record(TokenOut(request="a", ids=(5, 6)))
    assert journal.crashed() == []
    again = entry.resumed()
    assert (again.output, again.seed, again.choice, again.max_tokens, again.alone) == ((5, 6), 3, 1, 9, False)
    journal.record(TokenOut(request="a", ids=(7,), finish=Finish(reason="length")))
    assert sink.ids == [5, 6, 7]
    assert len(journal) == 0


def test_choice_ends_once_and_ignores_what_comes_after() -> None:
    journal, sink = Journal(), Collect()
    journal.accept(submit("a"), sink)
    journal.end("a", Finish(reason="cancelled"))
    journal.end("a", Finish(reason="stop"))
    journal.record(TokenOut(request="a", ids=(5,), finish=Finish(reason="stop")))
    assert [end.reason for end in sink.ends] == ["cancelled"]
    assert sink.ids == []


def test_choice_in_flight_in_two_crashes_runs_alone_and_fails_in_the_third() -> None:
    journal = Journal()
    entry, waiting = journal.accept(submit("a"), Collect()), journal.accept(submit("b"), Collect())
    for crash in range(1, 4):
        entry.sent = True
        failed = journal.crashed()
        assert entry.resumed().alone == (crash >= 2)
        assert failed == ([entry] if crash == 3 else [])
    assert waiting.crashes == 0  # it was never given to an engine


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("RequestError", 400), ("ContextSizeError", 400), ("NotInCalbin", 501), ("UnsupportedError", 501), ("OverloadedError", 429),
        ("UnavailableError", 503), ("DeadlineError", 504), ("DeviceFatal", 500), ("DeviceRetryable", 503), ("DeviceNeedsReset", 503),
        ("CancelledError", 499), ("CalstackError", 500), ("ArtifactError", 500), ("NoSuchError", 500), ("annotations", 500),
    ],
)  # fmt: skip
def test_engine_error_keeps_its_meaning_over_the_wire(kind: str, status: int) -> None:
    answer = answer_of(error_of(ErrorValue(kind=kind, message="what happened", param="p", retry_after=3.0)))
    assert answer.status == status
    assert answer.body["error"]["code"] == status
    assert "what happened" in answer.body["error"]["message"]
    assert ("retry-after" in answer.headers) == (status in {429, 503})


def test_every_error_class_has_an_answer() -> None:
    for name in errors.__all__:
        if name not in {"OverloadedError", "UnavailableError", "ContextSizeError"}:
            assert 400 <= answer_of(getattr(errors, name)("x")).status < 600


def test_runtime_directory_is_private_short_and_removed() -> None:
    with runtime_directory(None) as directory:
        assert directory.stat().st_mode & 0o777 == 0o700
        assert len(str(directory / "engine-00000.sock").encode()) <= 107
    assert not directory.exists()


def test_long_temporary_directory_does_not_make_a_long_socket_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with runtime_directory(None) as directory:
        assert len(str(directory).encode()) < 90
    with pytest.raises(UsageError, match="socket path"), runtime_directory(deep):
        pass


@pytest.mark.parametrize(
    "config",
    [
        ServeConfig(calbin=Path("x"), listen=ListenConfig(port=70000)),
        ServeConfig(calbin=Path("x"), grace_s=-1),
        ServeConfig(calbin=Path("x"), engine=EngineConfig(threads=-1)),
    ],
)
def test_configuration_out_of_range_is_named(config: ServeConfig) -> None:
    with pytest.raises(UsageError, match=r"listen\.port|grace_s|engine\.threads"):
        config.check()


def test_engine_command_can_be_found_in_a_process_list() -> None:
    command = engine_command(ServeConfig(calbin=Path("m.calbin")), Path("/run/s"))
    assert command[1:5] == ["-m", "calstack", "engine", "m.calbin"]
    assert command[command.index("--connect") + 1] == "/run/s"


def test_log_line_is_json_with_its_fields() -> None:
    record = logging.LogRecord("calstack.x", logging.INFO, "f", 1, "request", None, None)
    record.__dict__ |= {"request_id": "r", "status": 200, "path": Path("p")}
    line = json.loads(JsonFormatter().format(record))
    assert (line["message"], line["level"], line["request_id"], line["status"], line["path"]) == ("request", "info", "r", 200, "p")


def test_step_output_is_what_the_engine_sends() -> None:
    step = StepOutput(tokens=(TokenOut(request="a", ids=(1,)),))
    got: list[object] = []
    EngineLink(got.append, lambda _: None).data_received(framed(msgspec.msgpack.encode(step)))
    assert got == [step]
