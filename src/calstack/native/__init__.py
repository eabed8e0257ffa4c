"""The compiled core behind checked wrappers; nothing else imports `_core`."""

from __future__ import annotations

try:
    from calstack.native import _core
except ImportError as error:
    from calstack.errors import UsageError

    raise UsageError(
        f"the compiled module cannot be loaded: {error}", where="calstack.native", remedy="run `make native` in the checkout"
    ) from error

from calstack.native._core import BoundError, CalbinBuilder, CpuDevice, QueueFullError, kernels, pool_probe, pool_probe_together

__all__ = ["BoundError", "CalbinBuilder", "CpuDevice", "QueueFullError", "kernels", "pool_probe", "pool_probe_together"]

_VERSION = 1

if _core.version() != _VERSION:
    from calstack.errors import UsageError

    raise UsageError(
        f"the compiled module speaks interface {_core.version()}, this package {_VERSION}",
        where="calstack.native",
        remedy="run `make native`",
    )
