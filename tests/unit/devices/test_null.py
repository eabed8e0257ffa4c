"""What the null device has beside the contract: virtual time, scripted ids, and answers that depend on KV contents."""

from __future__ import annotations

import shutil

import pytest

from calstack.clock import VirtualClock
from calstack.devices.base import OpenOptions
from calstack.devices.null import NullDevice
from calstack.errors import ArtifactError
from tests.unit.devices.conftest import Rig, lane

COST = OpenOptions(extra=(("launch_us", "1000"), ("row_us", "10")))


@pytest.fixture
def virtual(tiny, tiny_path):
    device = NullDevice(COST, clock=VirtualClock())
    yield Rig(device, device.load(tiny_path, kv_blocks=40), tiny, tiny_path)
    device.close()


def test_a_launch_costs_its_rows_in_virtual_time(virtual):
    first = virtual.device.submit(virtual.launch(lane(0, [1] * 100)))
    second = virtual.device.submit(virtual.launch(lane(100, [1])))
    a, b = virtual.claim(first), virtual.claim(second)
    assert (a.started_ns, a.finished_ns, a.infer_ns) == (0, 2_000_000, 2_000_000)
    assert (b.started_ns, b.finished_ns) == (2_000_000, 3_010_000)


def test_a_wait_moves_virtual_time_no_further_than_its_time_out(virtual):
    ticket = virtual.device.submit(virtual.launch(lane(0, [1] * 100)))
    assert virtual.device.wait(ticket, 0.0015) is None
    assert virtual.device.poll(ticket) is None
    done = virtual.device.wait(ticket, 10)
    assert done is not None
    assert done.finished_ns == 2_000_000


def test_cancelling_moves_later_launches_forward(virtual):
    tickets = [virtual.device.submit(virtual.launch(lane(0, [1] * 100))) for _ in range(3)]
    assert virtual.device.cancel(tickets[1])
    assert virtual.claim(tickets[2]).finished_ns == 4_000_000


def test_a_script_chooses_the_ids(tiny, tiny_path):
    device = NullDevice(OpenOptions(), script=lambda lane_input, content: 7 + lane_input.past_len)
    rig = Rig(device, device.load(tiny_path, kv_blocks=40), tiny, tiny_path)
    assert rig.run(lane(0, [1, 2])).lanes[0].token == 7
    assert rig.run(lane(2, [1])).lanes[0].token == 9
    device.close()


def test_a_wrong_block_or_a_stale_position_changes_the_answer(virtual):
    prompt = list(range(100))
    virtual.run(lane(0, prompt, [3, 4]))
    want = virtual.run(lane(100, [5], [3, 4])).lanes[0].token
    virtual.run(lane(0, [9] * 100, [6, 7]))
    assert virtual.run(lane(100, [5], [3, 7])).lanes[0].token != want
    assert virtual.run(lane(99, [5], [3, 4])).lanes[0].token != want


def test_only_the_manifest_is_read(tiny_path, tmp_path):
    shutil.copy(tiny_path / "manifest.json", tmp_path)
    device = NullDevice(OpenOptions())
    assert device.manifest(device.load(tmp_path, kv_blocks=1)).model.name == "tiny"
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(ArtifactError, match="not valid"):
        device.load(tmp_path, kv_blocks=1)
    device.close()
