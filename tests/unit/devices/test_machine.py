from __future__ import annotations

import os

import pytest

from calstack.devices.machine import memory_bytes, usable_cores


@pytest.mark.parametrize(("quota", "cores"), [("150000 100000", 1), ("50000 100000", 1), ("max 100000", 0), ("nonsense", 0), ("", 0)])
def test_cores_are_cut_to_the_quota(tmp_path, quota, cores):
    (tmp_path / "cpu.max").write_text(quota)
    assert usable_cores(tmp_path) == (cores or len(os.sched_getaffinity(0)))


def test_the_first_cgroup_version_counts_too(tmp_path):
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("100000\n")
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
    assert usable_cores(tmp_path) == 1


@pytest.mark.parametrize(("limit", "want"), [("1048576", 1 << 20), ("max", 2 << 20), ("9999999999", 2 << 20), (None, 2 << 20)])
def test_memory_is_the_smaller_of_machine_and_cgroup(tmp_path, limit, want):
    (tmp_path / "meminfo").write_text("MemTotal:        2048 kB\nMemFree: 1 kB\n")
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit + "\n")
    assert memory_bytes(tmp_path, tmp_path / "meminfo") == want
