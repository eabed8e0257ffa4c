"""The header of a report: which machine, which versions."""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path

from calstack.bench.report import Machine

__all__ = ["describe_machine", "versions"]

_PACKAGES = ("calstack", "llama-cpp-python", "openvino", "openvino-genai")


def describe_machine(*, cores: int, threads: int, isa: str) -> Machine:
    """CPU model, memory and kernel of this machine, read from /proc."""
    return Machine(
        cpu=_cpu_name(),
        cores=cores,
        threads=threads,
        memory_gib=round(_memory_bytes() / 2**30, 1),
        isa=isa,
        kernel=platform.release(),
    )


def versions(peers: tuple[str, ...]) -> dict[str, str]:
    """Versions of what takes part."""
    names = {"llama.cpp": ("llama-cpp-python",), "openvino": ("openvino", "openvino-genai")}
    wanted = ["calstack", *(p for peer in peers for p in names.get(peer, ()))]
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in wanted if name in _installed()}}


def _installed() -> set[str]:
    return {name for name in _PACKAGES if next(iter(importlib.metadata.distributions(name=name)), None) is not None}


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        fields = dict(line.split(":", 1) for line in info.read_text().splitlines() if ":" in line)
        by_key = {key.strip(): value.strip() for key, value in fields.items()}
        model = " ".join(f"{by_key[key]}" for key in ("cpu family", "model") if key in by_key)
        return f"{by_key.get('model name', platform.machine())} (family/model {model})"
    return platform.processor() or platform.machine()


def _memory_bytes() -> int:
    info = Path("/proc/meminfo")
    if not info.exists():
        return 0
    for line in info.read_text().splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return 0
