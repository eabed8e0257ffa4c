"""What a profile says of a launch."""

import pytest

from calstack.api import CallTime, Ceilings, Completion
from calstack.bench.profile import summarise, trace_events


def _launch() -> Completion:
    calls = (
        CallTime("embed", -1, 0, 1_000, 4_000, 0),
        CallTime("linear", 0, 1_000, 4_000, 40_000, 8_000),
        CallTime("linear", 1, 5_000, 5_000, 40_000, 8_000),
    )
    return Completion(1, (), 0, 0, 10_000, 0, 10_000, 0, 0, 0, calls)


def test_rows_add_up_to_the_launch_and_come_longest_first() -> None:
    lines = summarise(_launch(), Ceilings(read_gb_s=10.0, int8_gop_s=1000.0), by="call")
    assert [line["name"] for line in lines] == ["linear", "embed"]
    assert sum(line["share"] for line in lines) == pytest.approx(1.0)
    assert lines[0]["gb_s"] == pytest.approx(80_000 / 9_000)
    assert lines[0]["roofline"] == pytest.approx(8_000 / 9_000)


def test_rows_by_layer_keep_calls_outside_layers_by_name() -> None:
    lines = summarise(_launch(), Ceilings(read_gb_s=10.0, int8_gop_s=1000.0), by="layer")
    assert [line["name"] for line in lines] == ["1", "0", "embed"]


def test_trace_has_an_event_per_call_in_microseconds() -> None:
    events = trace_events({"decode": _launch()})
    assert [(e["name"], e["ts"], e["dur"]) for e in events] == [("embed", 0.0, 1.0), ("linear", 1.0, 4.0), ("linear", 5.0, 5.0)]
