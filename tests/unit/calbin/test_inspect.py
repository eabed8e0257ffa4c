from pathlib import Path
from typing import Any

import pytest

from calstack.calbin.compat import Offer, check_fit, mismatches
from calstack.calbin.inspect import describe, describe_program, size_text
from calstack.calbin.reader import Calbin, open_calbin
from calstack.errors import ArtifactError
from tests.support.calbins import KEY, edit_manifest, write_calbin


@pytest.fixture
def calbin(tmp_path: Path) -> Calbin:
    return open_calbin(write_calbin(tmp_path / "m"))


def test_description_names_model_submodels_memory_and_missing_quality(calbin: Calbin) -> None:
    text = describe(calbin)
    for part in ("by hand (llama)", KEY, "chip 0", "paged, bf16", "quality: not measured"):
        assert part in text


def test_program_is_described_a_call_a_line(calbin: Calbin) -> None:
    lines = describe_program(calbin, KEY).splitlines()
    assert any("norm_linear(x=x" in line and "gated=silu" in line and "[128, 32] w8a8/32" in line for line in lines)
    with pytest.raises(ArtifactError):
        describe_program(calbin, "none")


@pytest.mark.parametrize(("n", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 20, "3.0 MiB"), (5 << 40, "5.0 TiB")])
def test_sizes_are_readable(n: int, text: str) -> None:
    assert size_text(n) == text


def offer(**changes: Any) -> Offer:
    plain = {"name": "cpu", "chips": 1, "packed_layouts": ("n16.v1",), "numerics": (1,), "dram_bytes": (1 << 30,)}
    return Offer(**{**plain, **changes})


def test_fitting_device_has_no_mismatch(calbin: Calbin) -> None:
    assert mismatches(calbin.manifest, offer()) == ()
    check_fit(calbin.manifest, offer(dram_bytes=(0,)))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"packed_layouts": ("n32",)}, "$.packed_layout"),
        ({"numerics": (2,)}, "$.numerics"),
        ({"chips": 0}, "$.target.chips"),
        ({"dram_bytes": (1000,)}, "$.target.chips[0].dram_bytes"),
    ],
)
def test_each_field_that_does_not_fit_is_named(calbin: Calbin, change: dict[str, Any], field: str) -> None:
    assert [m.field for m in mismatches(calbin.manifest, offer(**change))] == [field]
    with pytest.raises(ArtifactError) as caught:
        check_fit(calbin.manifest, offer(**change))
    assert field in str(caught.value)


def test_both_sides_of_a_firmware_mismatch_are_named(tmp_path: Path) -> None:
    path = write_calbin(tmp_path / "m")
    edit_manifest(path, compatibility__firmware="0.4.8", compatibility__driver="1.0.0")
    with pytest.raises(ArtifactError, match=r"1\.0\.0.*0\.9.*1 other"):
        check_fit(open_calbin(path).manifest, offer(driver="0.9", firmware="0.4.7"))
