import importlib.resources

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


@pytest.mark.parametrize("name", ["none", "../cpu", ""])
def test_unknown_target_is_an_error_that_names_the_known(name: str) -> None:
    with pytest.raises(UsageError, match=r"targets: .*cpu"):
        load_target(name)


def test_a_targets_file_is_read_strictly(tmp_path):
    path = tmp_path / "mine.toml"
    text = importlib.resources.files("calstack.targets").joinpath("cpu.toml").read_text()
    path.write_text(text.replace('name = "cpu"', 'name = "mine"'))
    assert load_target(str(path)).name == "mine"
    path.write_text(text + "\nnonsense = 1\n")
    with pytest.raises(UsageError, match="nonsense"):
        load_target(str(path))
    with pytest.raises(UsageError, match="cannot be read"):
        load_target(str(tmp_path / "none.toml"))


def test_every_figure_of_a_board_says_where_it_comes_from():
    board = load_target("calculet-2")
    assert {chip.origin for chip in board.chips} == {"datasheet"}
    assert all(getattr(board.speeds, name).origin for name in board.speeds.__struct_fields__)
    assert "half" in board.chips[0].note
