"""`serve`: brings the parts up, tells when they are ready, and takes them down in order."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
import prometheus_client
import uvicorn
import uvloop

from calstack.server.access import Access
from calstack.server.admission import Admission
from calstack.server.app import build_app
from calstack.server.config import ServeConfig
from calstack.server.context import Context
from calstack.server.journal import Journal
from calstack.server.launch import runtime_directory
from calstack.server.listen import HttpServer, http_config, public_socket, tls_context, url_of
from calstack.server.log import logging_to_stderr
from calstack.server.metrics import Metrics
from calstack.server.model import load_model
from calstack.server.ops.audit import AuditLog
from calstack.server.ops.gate import Gate
from calstack.server.ops.listen import ops_server, ops_sockets
from calstack.server.ops.plane import OpsPlane
from calstack.server.protocol import Bounds, bounded
from calstack.server.supervisor import EngineState, Supervisor
from calstack.server.switch import StopSwitch
from calstack.server.traces import open_traces
from calstack.wire import CalbinInfo, LaunchTimes

__all__ = ["Started", "StopSwitch", "run", "serve"]

logger = logging.getLogger(__name__)

_TEXT_THREADS = 2
_GRAMMARS = 2  # constraints that compile at once


@dataclasses.dataclass(frozen=True, slots=True)
class Started:
    """A server that takes requests."""

    url: str
    context: Context


def serve(config: ServeConfig, *, notify: Callable[[str], None] = lambda _: None) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit code.

    Args:
        config: what to serve.
        notify: takes `READY=1` and `STOPPING=1`, as a service manager reads them.

    Raises:
        CalstackError: when the configuration is wrong, the calbin cannot be read, or the engine does not start.
    """
    config.check()
    logging_to_stderr(config.log)

    async def main() -> None:
        switch, loop = StopSwitch(), asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, switch.press)

        def on_ready(started: Started) -> None:
            _announce(started)
            notify("READY=1")

        stopping = loop.create_task(_on_drain(switch, lambda: notify("STOPPING=1")))
        await run(config, switch, on_ready)
        stopping.cancel()

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
        tls = tls_context(config.listen)
        listener = stack.enter_context(public_socket(config.listen))
        pool = stack.enter_context(ThreadPoolExecutor(_TEXT_THREADS, "text"))
        grammar_pool = stack.enter_context(ThreadPoolExecutor(_GRAMMARS, "grammar"))
        directory = stack.enter_context(runtime_directory(config.runtime_dir))
        context = await _build(config, pool, grammar_pool, directory)
        stack.callback(context.model.constraints.close)
        started = Started(url_of(config.listen, listener), context)
        public = HttpServer(_public(context, tls))
        servers = [(public, [listener])]
        if config.ops.enabled:
            servers.append(stack.enter_context(_operations(context, switch, directory)))
        context.supervisor.start()
        async with _serving(servers):
            if on_listening is not None:
                on_listening(started)
            try:
                await _until_stopped(context, switch, lambda: on_ready(started))
            finally:
                await _drain(context, switch, config.grace_s)
        if context.traces is not None:
            await asyncio.to_thread(context.traces.close)
    if context.supervisor.error is not None and not switch.drain.is_set():
        raise context.supervisor.error


@contextlib.asynccontextmanager
async def _serving(servers: list[tuple[HttpServer, list[socket.socket]]]) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(server.serve(sockets=sockets)) for server, sockets in servers]
    try:
        yield
    finally:
        for server, _ in servers:
            server.stop.set()
        await asyncio.gather(*tasks)


def _public(context: Context, tls: ssl.SSLContext | None) -> uvicorn.Config:
    listen, limits = context.config.listen, context.config.limits
    bounds = Bounds(limits.max_head_bytes, limits.max_head_fields, limits.head_timeout_s, limits.write_timeout_s)
    app = build_app(context)
    return http_config(
        app, bounded(bounds, on_refused=context.metrics.failed), connections=listen.max_connections, idle_s=limits.idle_timeout_s, tls=tls
    )


@contextlib.contextmanager
def _operations(context: Context, switch: StopSwitch, directory: Path) -> Iterator[tuple[HttpServer, list[socket.socket]]]:
    config = context.config.ops
    gate = Gate(config)
    with (
        contextlib.closing(AuditLog(config.audit_file or directory / "audit.jsonl")) as audit,
        ops_sockets(config, directory, others=gate.others) as sockets,
    ):
        names = [str(found.getsockname()) for found in sockets]
        logger.info("operations plane", extra={"sockets": names, "audit": str(audit.path), "records": audit.chain.records})
        yield ops_server(OpsPlane(context, gate, audit, switch)), sockets


async def _on_drain(switch: StopSwitch, then: Callable[[], None]) -> None:
    await switch.drain.wait()
    then()


async def _build(config: ServeConfig, pool: ThreadPoolExecutor, grammar_pool: ThreadPoolExecutor, directory: Path) -> Context:
    limits = config.limits
    admission = Admission(lanes=1, max_requests=limits.max_queued_requests, max_tokens=limits.max_queued_tokens)
    journal = Journal()

    def launched(launches: tuple[LaunchTimes, ...]) -> None:
        metrics.launches(launches)

    def ready(info: CalbinInfo) -> None:
        admission.lanes = info.max_lanes

    supervisor = Supervisor(config, journal, on_launches=launched, on_ready=ready, directory=directory)
    access = Access(config.access)
    model = await asyncio.get_running_loop().run_in_executor(
        pool, lambda: load_model(config.calbin, config.model, template_seconds=limits.template_seconds)
    )
    metrics = Metrics(admission, lambda: supervisor.stats, lambda: _device_status(supervisor), model.id, lambda: access.refused)
    return Context(
        config=config,
        model=model,
        journal=journal,
        supervisor=supervisor,
        admission=admission,
        metrics=metrics,
        pool=pool,
        grammar_pool=grammar_pool,
        access=access,
        traces=open_traces(config.trace, model.id),
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


def _announce(started: Started) -> None:
    info = started.context.supervisor.info
    device = info.device if info else ""
    click.echo(f"calstack serves {started.context.model.id} on {device} at {started.url} (ctrl-c ends it)")
    route, body = "/v1/chat/completions", '{"messages": [{"role": "user", "content": "Name the capital of France."}], "temperature": 0}'
    encoder = started.context.model.spec.encoder
    if encoder is not None and encoder.pooling != "none":
        route, body = "/v1/embeddings", '{"input": "The capital of France."}'
    elif encoder is not None:
        route, body = "/classify", '{"input": "The capital of France."}'
    socket_path = started.context.config.listen.uds
    where = f"{started.url}" if socket_path is None else f"--unix-socket {socket_path} http://localhost"
    click.echo(f"curl {where}{route} -H 'Content-Type: application/json' -d '{body}'")
