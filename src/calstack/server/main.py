"""`serve`: brings the parts up, tells when they are ready, and takes them down in order."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import logging
import signal
import socket
from collections.abc import Callable, Generator

import click
import prometheus_client
import uvicorn
import uvloop
from starlette.types import ASGIApp

from calstack.errors import UsageError
from calstack.server.access import Access
from calstack.server.admission import Admission
from calstack.server.app import build_app
from calstack.server.config import ListenConfig, ServeConfig
from calstack.server.context import Context
from calstack.server.journal import Journal
from calstack.server.log import logging_to_stderr
from calstack.server.metrics import Metrics
from calstack.server.model import load_model
from calstack.server.protocol import GuardedProtocol
from calstack.server.supervisor import EngineState, Supervisor
from calstack.wire import CalbinInfo, LaunchTimes

__all__ = ["Started", "StopSwitch", "run", "serve"]

logger = logging.getLogger(__name__)

_TEXT_THREADS = 2
_CLOSE_S = 2  # for the last bytes of answers, after every choice has ended


@dataclasses.dataclass(frozen=True, slots=True)
class Started:
    """A server that takes requests."""

    url: str
    context: Context


class StopSwitch:
    """Pressed once: drain. Pressed twice: now."""

    def __init__(self) -> None:
        self.drain, self.now = asyncio.Event(), asyncio.Event()

    def press(self) -> None:
        """Call on the event loop."""
        (self.now if self.drain.is_set() else self.drain).set()


def serve(config: ServeConfig) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit code.

    Raises:
        CalstackError: when the configuration is wrong, the calbin cannot be read, or the engine does not start.
    """
    config.check()
    logging_to_stderr(config.log)

    async def main() -> None:
        switch, loop = StopSwitch(), asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, switch.press)
        await run(config, switch, _announce)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
    return 0


async def run(
    config: ServeConfig,
    switch: StopSwitch,
    on_ready: Callable[[Started], None],
    on_listening: Callable[[Started], None] | None = None,
) -> None:
    """Serve until the switch is pressed.

    Args:
        config: what to serve.
        switch: pressed to stop.
        on_ready: called once, when the first request can be answered.
        on_listening: called once, when the port answers (with 503 until the engine is ready).

    Raises:
        CalstackError: as `serve`.
    """
    config.check()
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # a series per counter that no dashboard reads
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(_bind(config.listen))
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(_TEXT_THREADS, "text"))
        context = await _build(config, pool)
        started = Started(_url(config.listen, listener), context)
        context.supervisor.start()
        server = _Server(_uvicorn(build_app(context)))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        if on_listening is not None:
            on_listening(started)
        try:
            await _until_stopped(context, switch, lambda: on_ready(started))
        finally:
            await _drain(context, switch, config.grace_s)
            server.stop.set()
            await serving
    if context.supervisor.error is not None and not switch.drain.is_set():
        raise context.supervisor.error


async def _build(config: ServeConfig, pool: concurrent.futures.ThreadPoolExecutor) -> Context:
    limits = config.limits
    admission = Admission(lanes=1, max_requests=limits.max_queued_requests, max_tokens=limits.max_queued_tokens)
    journal = Journal()

    def launched(launches: tuple[LaunchTimes, ...]) -> None:
        metrics.launches(launches)

    def ready(info: CalbinInfo) -> None:
        admission.lanes = info.max_lanes

    supervisor = Supervisor(config, journal, on_launches=launched, on_ready=ready)
    access = Access(config.access)
    model = await asyncio.get_running_loop().run_in_executor(
        pool, lambda: load_model(config.calbin, config.model, template_seconds=limits.template_seconds)
    )
    metrics = Metrics(admission, lambda: supervisor.stats, lambda: _device_status(supervisor), model.id)
    return Context(
        config=config,
        model=model,
        journal=journal,
        supervisor=supervisor,
        admission=admission,
        metrics=metrics,
        pool=pool,
        access=access,
    )


def _device_status(supervisor: Supervisor) -> int:
    if supervisor.state is not EngineState.READY:
        return -1
    return supervisor.stats.device_status if supervisor.stats else 0


async def _until_stopped(context: Context, switch: StopSwitch, on_ready: Callable[[], None]) -> None:
    """Return when the switch is pressed or the engine is given up."""
    told = False
    stopped = asyncio.create_task(switch.drain.wait())
    while not stopped.done() and context.supervisor.state is not EngineState.FAILED:
        if context.supervisor.state is EngineState.READY and not told:
            told = True
            on_ready()
        changed = asyncio.create_task(context.supervisor.changed.wait())
        await asyncio.wait({stopped, changed}, return_when=asyncio.FIRST_COMPLETED)
        changed.cancel()
    stopped.cancel()


async def _drain(context: Context, switch: StopSwitch, grace_s: float) -> None:
    """Refuse new work, let running work finish for `grace_s` or until the second press, then end the engine."""
    context.draining = True
    logger.info("draining", extra={"in_flight": context.admission.in_flight, "grace_s": grace_s})
    waits = [asyncio.create_task(context.admission.wait_idle()), asyncio.create_task(switch.now.wait())]
    if context.supervisor.state is not EngineState.FAILED:
        await asyncio.wait(waits, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    await context.supervisor.stop()


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers and without its ten wake-ups a second."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.stop = asyncio.Event()

    async def main_loop(self) -> None:
        await self.stop.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def _uvicorn(app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=GuardedProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=_CLOSE_S,
    )


def _bind(listen: ListenConfig) -> socket.socket:
    try:
        family = socket.getaddrinfo(listen.host, listen.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        return socket.create_server((listen.host, listen.port), family=family, backlog=2048)
    except OSError as error:
        where = f"{listen.host}:{listen.port}"
        raise UsageError(f"cannot listen: {error.strerror}", where=where, remedy="take another --host or --port") from error


def _url(listen: ListenConfig, listener: socket.socket) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(listen.host, listen.host)  # noqa: S104  # nothing is bound here
    return f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"


def _announce(started: Started) -> None:
    info = started.context.supervisor.info
    device = info.device if info else ""
    click.echo(f"calstack serves {started.context.model.id} on {device} at {started.url} (ctrl-c ends it)")
    body = '{"messages": [{"role": "user", "content": "Name the capital of France."}], "temperature": 0}'
    click.echo(f"curl {started.url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'")
