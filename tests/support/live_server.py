"""A real server (uvicorn, port 0) in a thread of the test process, over the fake engine in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import uvloop

from calstack.server.config import AccessConfig, EngineConfig, LimitsConfig, ListenConfig, LogConfig, OpsConfig, ServeConfig, TraceConfig
from calstack.server.context import Context
from calstack.server.main import Started, StopSwitch, run
from tests.support.fake_engine import Rules
from tests.support.tiny_model import SPECIALS, TEMPLATE, special, vocab_size, write_calbin


class LiveServer:
    def __init__(self, url: str, context: Context, rules: Rules, press: Any, thread: threading.Thread) -> None:
        self.url, self.context, self.rules, self._press, self.thread = url, context, rules, press, thread
        self.http = httpx.Client(base_url=url, timeout=30)
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30)
        self.failure: list[BaseException] = []

    def press_stop(self) -> None:
        self._press()

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def chat(self, content: Any, **more: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", messages=[{"role": "user", "content": content}], **more)

    def complete(self, prompt: Any, **more: Any) -> httpx.Response:
        return self.post("/v1/completions", prompt=prompt, **{"max_tokens": 200, **more})

    def events(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """Data of a stream's events; asserts the protocol around them."""
        response = self.http.post(path, json={**body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        blocks = response.content.decode("utf-8", "strict").split("\n\n")
        assert blocks[-2:] == ["data: [DONE]", ""]
        return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2] if not block.startswith(":")]

    def engine_log(self) -> list[dict[str, Any]]:
        path = Path(self.rules.log_file)
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def idle(self) -> bool:
        """Nothing in flight anywhere."""
        stats = self.http.get("/metrics").text
        return self.context.admission.in_flight == 0 and len(self.context.journal) == 0 and "calrt_kv_used_batches 0.0" in stats

    def assert_idle_soon(self, seconds: float = 3.0) -> None:
        """Nothing stays in flight."""
        end = time.monotonic() + seconds
        while not self.idle():
            assert time.monotonic() < end
            time.sleep(0.02)

    def assert_alive(self) -> None:
        assert self.http.get("/health").status_code == 200
        assert self.chat("fine").json()["choices"][0]["message"]["content"] == "fine"
        assert self.idle()


@contextlib.contextmanager
def live_server(
    directory: Path, *, template: str | None = TEMPLATE, generation: dict[str, Any] | None = None, wait: bool = True, grace_s: float = 5.0,
    limits: LimitsConfig | None = None, access: AccessConfig | None = None,
    ops: OpsConfig | None = None, listen: ListenConfig | None = None, runtime_dir: Path | None = None,
    trace: TraceConfig | None = None, log: LogConfig | None = None, more_specials: Sequence[str] = (), **rules: Any,
) -> Iterator[LiveServer]:  # fmt: skip
    """Start, yield, stop and check that the server went down in order."""
    calbin = write_calbin(directory, template=template, generation=generation, more_specials=more_specials)
    made = Rules(
        specials={name: special(name) for name in SPECIALS},
        vocab=vocab_size() + len(more_specials),
        crash_file=str(directory / "crashed"),
        log_file=str(directory / "engine.log"),
        **rules,
    )
    (directory / "rules.json").write_text(json.dumps(dataclasses.asdict(made)))
    command = (sys.executable, "-m", "tests.support.fake_engine", str(directory / "rules.json"))
    config = ServeConfig(
        calbin=calbin,
        grace_s=grace_s,
        listen=listen or ListenConfig(port=0),
        ops=ops or OpsConfig(),
        runtime_dir=runtime_dir,
        trace=trace or TraceConfig(),
        log=log or LogConfig(),
        limits=limits or LimitsConfig(),
        access=access or AccessConfig(),
        engine=EngineConfig(command=command, restarts=2),
    )
    with _running(config, made, wait=wait) as server:
        yield server


@contextlib.contextmanager
def _running(config: ServeConfig, rules: Rules, *, wait: bool) -> Iterator[LiveServer]:
    ready, failure, started, loop_box = threading.Event(), [], [], []

    async def main() -> None:
        switch = StopSwitch()
        loop_box.append((asyncio.get_running_loop(), switch))

        def on_ready(value: Started) -> None:
            started.append(value)
            ready.set()

        def on_listening(value: Started) -> None:
            if not wait:
                on_ready(value)

        await run(config, switch, on_ready if wait else lambda _: None, on_listening)

    def body() -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(main())
        except BaseException as error:  # noqa: BLE001
            failure.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    assert ready.wait(30), "the server did not start"
    if failure:
        raise failure[0]

    def press() -> None:
        loop, switch = loop_box[0]
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(switch.press)

    server = LiveServer(started[0].url, started[0].context, rules, press, thread)
    server.failure = failure
    try:
        yield server
    finally:
        press()
        thread.join(10)
        assert not thread.is_alive(), "the server did not stop"
        server.http.close()
        server.openai.close()
