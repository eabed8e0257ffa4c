"""The picture of a report, and what is refused before a long run."""

from pathlib import Path

import msgspec
import pytest

from calstack.bench.plot import check_plot, plot
from calstack.bench.report import Report
from calstack.errors import UsageError

REPORT = Path(__file__).parents[3] / "docs" / "reference" / "bench" / "smollm2-135m-q4_1.json"


def test_a_report_is_drawn_with_ours_and_the_peers_named(tmp_path: Path) -> None:
    target = tmp_path / "bench.svg"
    check_plot(target)
    plot(msgspec.json.decode(REPORT.read_bytes(), type=Report), target)
    text = target.read_text()
    for name in ("calstack, device", "calstack, http", "llama.cpp", "openvino", "prefill", "decode", "batch"):
        assert f"<!-- {name} -->" in text


@pytest.mark.parametrize(("name", "says"), [("bench.xyz", "picture"), ("missing/bench.png", "no directory")])
def test_a_name_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path, name: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        check_plot(tmp_path / name)
