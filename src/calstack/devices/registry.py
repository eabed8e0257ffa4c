"""Devices by name: the built-in ones (`faults:NAME?…` wraps any), and those of the entry-point group `calstack.devices`.

A vendor's entry point names a callable that takes OpenOptions and gives a Device.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points

from calstack.devices.base import Device, OpenOptions
from calstack.devices.faults import open_faults
from calstack.errors import UsageError

__all__ = ["GROUP", "device_names", "open_device"]

GROUP = "calstack.devices"

_FAULTS = "faults:"
_Opener = Callable[[OpenOptions], Device]


def _open_cpu(options: OpenOptions) -> Device:
    from calstack.devices.cpu import CpuDevice

    return CpuDevice(options)


def _open_null(options: OpenOptions) -> Device:
    from calstack.devices.null import NullDevice

    return NullDevice(options)


_BUILT_IN: dict[str, _Opener] = {"cpu": _open_cpu, "null": _open_null}


def device_names() -> tuple[str, ...]:
    """Names that `open_device` knows, built-in ones first."""
    return tuple(_BUILT_IN) + tuple(sorted({e.name for e in entry_points(group=GROUP)} - set(_BUILT_IN)))


def open_device(name: str, options: OpenOptions | None = None) -> Device:
    """Open a device.

    Raises:
        UsageError: when no device has that name or an option is wrong; it names what is known.
    """
    options = options or OpenOptions()
    if options.completion not in {"event", "poll"}:
        raise UsageError(f"completion {options.completion!r} is not known", where="--completion", remedy="use event or poll")
    if name.startswith(_FAULTS):
        return open_faults(name.removeprefix(_FAULTS), options, open_device)
    if name in _BUILT_IN:
        return _BUILT_IN[name](options)
    for entry in entry_points(group=GROUP, name=name):
        opener: _Opener = entry.load()
        return opener(options)
    raise UsageError(f"no device is called {name!r}", where="--device", remedy=f"known devices: {', '.join(device_names())}")
