"""Starts the engine process: connects first, so that whatever goes wrong afterwards reaches the server as one message."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from calstack.devices.base import OpenOptions
from calstack.devices.registry import open_device
from calstack.engine.assemble import assemble
from calstack.engine.constraints import Built
from calstack.engine.driver import Driver
from calstack.engine.link import ServerLink
from calstack.engine.options import EngineOptions
from calstack.engine.process import EngineProcess
from calstack.engine.result import error_value
from calstack.errors import CalstackError, DeviceError
from calstack.runtime.dump import DumpDirectory, dumped
from calstack.runtime.facts import CalbinFacts
from calstack.wire import EngineFailed

__all__ = ["run_engine"]


def run_engine(
    calbin: Path,
    socket: Path,
    *,
    device: str,
    open_options: OpenOptions,
    options: EngineOptions,
    kv_memory: int = 0,
    dumps: DumpDirectory | None = None,
    grammars: Callable[[CalbinFacts], Built] | None = None,
) -> int:
    """Serve until told to stop; returns the exit code (with that of DeviceError, the device was left open).
    Raises UnavailableError when nobody listens on `socket`.
    """
    link = ServerLink.connect(socket)
    try:
        opened = open_device(device, open_options)
    except CalstackError as error:
        return _failed(link, error)
    try:
        driver = assemble(opened, calbin, options=options, kv_memory=kv_memory, grammars=grammars)
        process = EngineProcess(driver, link, dump=partial(_dump, driver, calbin, dumps) if dumps is not None else None)
        process.install_signals()
        code = process.run()
    except CalstackError as error:
        code = _failed(link, error)
    except BaseException:
        opened.close()
        raise
    if code != DeviceError.exit_code:  # closing a lost device may never return
        opened.close()
    return code


def _dump(driver: Driver, calbin: Path, directory: DumpDirectory, reason: str) -> Path | None:
    name = driver.runtime.device.info().name
    return directory.write(dumped(driver.runtime.recorder.records(), calbin=str(calbin.resolve()), device=name, reason=reason))


def _failed(link: ServerLink, error: CalstackError) -> int:
    link.send(EngineFailed(error=error_value(error)))
    link.finish()
    return error.exit_code
