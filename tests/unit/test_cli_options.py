"""Option types, and `serve`'s options out of the configuration tree."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click
import pytest

from calstack.cli.params import Bytes, Ints, Quant
from calstack.cli.serve import config_options
from calstack.cli.settings import build_config, leaves
from calstack.server.config import ServeConfig
from calstack.specs import QuantSpec, WeightFormat


@pytest.mark.parametrize(("text", "expected"), [("1,4,8", (1, 4, 8)), ("8,1,8", (1, 8)), ("16", (16,))])
def test_ints_are_sorted_without_repeats(text: str, expected: tuple[int, ...]) -> None:
    assert Ints().convert(text, None, None) == expected


@pytest.mark.parametrize("text", ["", "0", "1,-2", "1,x", "1.5"])
def test_ints_refuse_what_is_not_positive_numbers(text: str) -> None:
    with pytest.raises(click.BadParameter):
        Ints().convert(text, None, None)


@pytest.mark.parametrize(
    ("text", "expected"), [("0", 0), ("512", 512), ("4k", 4096), ("512M", 512 << 20), ("2GiB", 2 << 30), ("1tb", 1 << 40)]
)
def test_bytes_take_binary_suffixes(text: str, expected: int) -> None:
    assert Bytes().convert(text, None, None) == expected


@pytest.mark.parametrize("text", ["-1", "1.5G", "G", "10 apples"])
def test_bytes_refuse_other_text(text: str) -> None:
    with pytest.raises(click.BadParameter):
        Bytes().convert(text, None, None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("source", QuantSpec()),
        ("w8a8", QuantSpec(default=WeightFormat.W8A8)),
        ("w4a8,group=64,min=off", QuantSpec(default=WeightFormat.W4A8, group=64, minimum=False)),
        ("f32,head=f16", QuantSpec(default=WeightFormat.F32, head=WeightFormat.F16)),
        ("w4a8,*.down=w8a8", QuantSpec(default=WeightFormat.W4A8, overrides=(("*.down", WeightFormat.W8A8),))),
    ],
)
def test_quant_reads_every_part(text: str, expected: QuantSpec) -> None:
    assert Quant().convert(text, None, None) == expected


@pytest.mark.parametrize("text", ["w5a5", "w8a8,group", "w8a8,group=x", "w8a8,min=maybe", "w8a8,head=w9", "w8a8,*.q=none"])
def test_quant_refuses_and_shows_the_grammar(text: str) -> None:
    with pytest.raises(click.BadParameter, match=r"FORMAT\[,group=N\]"):
        Quant().convert(text, None, None)


def test_every_configuration_leaf_is_an_option_of_its_own() -> None:
    parameters = [leaf.parameter for leaf in leaves(ServeConfig)]
    assert len(set(parameters)) == len(parameters)
    assert all(leaf.text for leaf in leaves(ServeConfig))
    assert {"port", "max_queued_requests", "grace_s"} <= set(parameters)


def test_options_build_the_tree_they_came_from() -> None:
    seen: list[ServeConfig] = []

    @config_options
    @click.command()
    @click.argument("calbin", type=click.Path(path_type=Path))
    def show(**values: object) -> None:
        seen.append(build_config(ServeConfig, values))

    show.main(["m.calbin"], standalone_mode=False)
    show.main(["m.calbin", "--port", "0", "--kv-memory", "1G", "--engine-command", "a", "--engine-command", "b"], standalone_mode=False)
    assert seen[0] == ServeConfig(calbin=Path("m.calbin"))
    assert (seen[1].listen.port, seen[1].engine.kv_memory, seen[1].engine.command) == (0, 1 << 30, ("a", "b"))
    assert dataclasses.replace(seen[1], listen=seen[0].listen, engine=seen[0].engine) == seen[0]
