import pytest

from calstack.errors import UsageError
from calstack.targets.spec import load_target, target_names


@pytest.mark.parametrize("name", target_names())
def test_every_built_in_target_has_chips_numbered_from_zero(name: str) -> None:
    spec = load_target(name)
    assert spec.name == name
    assert [chip.id for chip in spec.chips] == list(range(len(spec.chips)))
    assert spec.chips
    assert spec.packed_layout == "n16.v1"


def test_cpu_takes_prefill_and_decode_lanes_in_one_launch() -> None:
    assert load_target("cpu").mixed_prefill_decode


@pytest.mark.parametrize("name", ["none", "../cpu", "", "cpu.toml"])
def test_unknown_target_is_an_error_that_names_the_known(name: str) -> None:
    with pytest.raises(UsageError, match=r"targets: .*cpu"):
        load_target(name)
