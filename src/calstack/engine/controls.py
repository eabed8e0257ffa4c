"""What the operations plane asks of a device, done by the engine's thread between two turns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from calstack.devices.base import DeviceControls
from calstack.engine.result import error_value
from calstack.errors import CalstackError, DeviceFatal, DeviceNeedsReset, RequestError, UnsupportedError, UsageError
from calstack.runtime.runtime import Runtime
from calstack.wire import ChipState, DeviceAnswer, DeviceCommand

__all__ = ["Controls"]


class Controls:
    """Carries out commands. `dump` writes the flight recorder down and gives its path, None when it could not; None: nowhere to write."""

    def __init__(self, runtime: Runtime, dump: Callable[[str], Path | None] | None) -> None:
        self._runtime, self._dump = runtime, dump

    def run(self, command: DeviceCommand) -> DeviceAnswer:
        """Do it and say how it ended. Raises DeviceFatal when the device is lost by it."""
        try:
            text = self._do(command)
        except DeviceFatal:
            raise
        except CalstackError as error:
            return DeviceAnswer(id=command.id, error=error_value(error))
        device = self._runtime.device
        chips = tuple(
            ChipState(
                id=chip.id,
                used_bytes=chip.used_bytes,
                total_bytes=chip.total_bytes,
                parameter_bytes=chip.parameter_bytes,
                kv_bytes=chip.kv_bytes,
                activation_bytes=chip.activation_bytes,
                buffer_bytes=chip.buffer_bytes,
            )
            for chip in self._runtime.memory()
        )
        return DeviceAnswer(id=command.id, device=device.info().name, status=device.status().value, chips=chips, text=text)

    def _do(self, command: DeviceCommand) -> str:
        match command.action:
            case "reset":
                self._runtime.reset(DeviceNeedsReset("an operator reset the device"))
            case "dump":
                return self._written()
            case "power":
                return self._power(command.value)
            case "register":
                return self._register(command.value)
        return ""

    def _written(self) -> str:
        if self._dump is None:
            raise UnsupportedError("no directory for dumps is configured", where="engine.dump_dir", remedy="set it and start again")
        if (path := self._dump("on demand")) is None:
            raise CalstackError(
                "the dump was not written", where="engine.dump_dir", remedy="look at its free space and at engine.dump_bytes"
            )
        return str(path)

    def _power(self, mode: str) -> str:
        controls = self._offered()
        if not (modes := controls.power_modes()):
            raise UnsupportedError("this device has no power modes")
        if mode not in modes:
            raise RequestError(f"{mode[:40]!r} is not a power mode", where="$.mode", remedy=f"one of {', '.join(modes)}", param="mode")
        controls.set_power_mode(mode)
        return mode

    def _register(self, name: str) -> str:
        try:
            return str(self._offered().read_register(name))
        except UsageError as error:
            raise RequestError(error.what, where=error.where, remedy=error.remedy, param="name") from error

    def _offered(self) -> DeviceControls:
        device = self._runtime.device
        if not isinstance(device, DeviceControls):
            raise UnsupportedError("this device has neither power modes nor registers")
        return device
