"""What this process may use of the machine: cores and memory, container limits included."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["memory_bytes", "usable_cores"]

_CGROUP = Path("/sys/fs/cgroup")
_PROC_MEMINFO = Path("/proc/meminfo")


def usable_cores(cgroup: Path = _CGROUP) -> int:
    """Cores this process may run on: the affinity mask, cut to the cgroup's CPU quota; at least 1."""
    return max(1, min(len(os.sched_getaffinity(0)), _quota_cores(cgroup)))


def memory_bytes(cgroup: Path = _CGROUP, meminfo: Path = _PROC_MEMINFO) -> int:
    """Bytes of memory of the machine or, where smaller, of the cgroup."""
    total = 0
    for line in _text(meminfo).splitlines():
        if line.startswith("MemTotal:"):
            total = int(line.split()[1]) * 1024
    limit = _text(cgroup / "memory.max") or _text(cgroup / "memory" / "memory.limit_in_bytes")
    return min(total, int(limit)) if limit.isdigit() and total else total


def _quota_cores(cgroup: Path) -> int:
    words = _text(cgroup / "cpu.max").split()
    if len(words) != 2:
        words = [_text(cgroup / "cpu" / "cpu.cfs_quota_us"), _text(cgroup / "cpu" / "cpu.cfs_period_us")]
    if not all(w.isdigit() for w in words) or int(words[1]) == 0:
        return 1 << 16
    return max(1, int(words[0]) // int(words[1]))


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
