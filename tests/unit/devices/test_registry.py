from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints

import pytest

from calstack.devices import registry
from calstack.devices.base import OpenOptions
from calstack.devices.null import NullDevice
from calstack.devices.registry import device_names, open_device
from calstack.errors import UsageError


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(UsageError, match="cpu, null"):
        open_device("gpu")


def test_a_vendors_entry_point_opens_its_device(monkeypatch):
    entry = EntryPoint("vendor", "calstack.devices.null:NullDevice", registry.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda **where: EntryPoints([entry]).select(**where))
    assert device_names() == ("cpu", "null", "vendor")
    device = open_device("vendor", OpenOptions(queue_depth=2))
    assert isinstance(device, NullDevice)
    assert device.info().queue_depth == 2
    device.close()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("null", OpenOptions(extra=(("warp", "9"),))),
        ("null", OpenOptions(extra=(("row_us", "fast"),))),
        ("null", OpenOptions(completion="carrier pigeon")),
        pytest.param("cpu", OpenOptions(extra=(("warp", "9"),)), marks=pytest.mark.native),
        pytest.param("cpu", OpenOptions(isa="avx9000"), marks=pytest.mark.native),
        pytest.param("cpu", OpenOptions(threads=-1), marks=pytest.mark.native),
        pytest.param("cpu", OpenOptions(queue_depth=0), marks=pytest.mark.native),
    ],
)
def test_an_option_that_makes_no_sense_is_refused(name, options):
    with pytest.raises(UsageError):
        open_device(name, options)


@pytest.mark.native
def test_polling_devices_have_no_event_descriptor():
    for name in ("cpu", "null"):
        device = open_device(name, OpenOptions(completion="poll"))
        assert device.event_fd() == -1
        device.close()
