from typing import Any

import pytest

from calstack.compiler.quantize.policy import Choice, Source, choose
from calstack.specs import QuantSpec, WeightFormat

W4, W8, W4A16, F32, F16, BF16 = (WeightFormat(f) for f in ("w4a8", "w8a8", "w4a16", "f32", "f16", "bf16"))


def chosen(*kinds: str, k: int = 64, head: bool = False, keep: bool = True, declared: str = "", **quant: Any) -> Choice:
    parts = [Source(f"w{i}", kind, declared or kind) for i, kind in enumerate(kinds)]
    return choose(parts, k=k, head=head, quant=QuantSpec(**quant), keep=keep)


@pytest.mark.parametrize(
    ("kinds", "fmt", "minimum", "exact"),
    [
        (("Q4_1",), W4, True, (True,)),
        (("Q4_0",), W4, False, (True,)),
        (("Q8_0",), W8, False, (True,)),
        (("F16",), F16, False, (True,)),
        (("Q4_K",), W4, True, (False,)),
        (("Q4_K", "Q6_K"), W8, False, (False, False)),
        (("Q5_0",), W8, False, (False,)),
        (("Q6_K",), W8, False, (False,)),
        (("BF16",), BF16, False, (True,)),
        (("Q4_0", "Q4_1"), W4, True, (True, True)),
        (("Q4_0", "Q8_0"), W8, False, (True, True)),
        (("Q4_1", "Q8_0"), W8, False, (False, True)),
        (("F16", "BF16"), F32, False, (True, True)),
        (("F16", "Q8_0"), W8, False, (False, True)),
    ],
)
def test_source_form_is_kept_and_mixtures_go_where_most_is_exact(kinds: tuple[str, ...], fmt: str, minimum: bool, exact: tuple) -> None:
    choice = chosen(*kinds)
    assert (choice.format, choice.minimum, choice.exact) == (fmt, minimum, exact)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("head", [True, False])
def test_float_checkpoints_default_to_eight_bits(kind: str, head: bool) -> None:
    assert chosen(kind, head=head, keep=False) == Choice(W8, 32, minimum=False, exact=(False,))


def test_head_stays_at_eight_bits_unless_the_source_has_four() -> None:
    assert chosen("BF16", head=True, keep=False, default=W4).format is W8
    assert chosen("Q4_0", head=True, default=W4) == Choice(W4, 32, minimum=False, exact=(True,))
    assert chosen("Q4_1", head=True) == Choice(W4, 32, minimum=True, exact=(True,))


def test_head_option_decides_for_the_head_alone() -> None:
    parts = [Source("w", "BF16", "BF16")]
    quant = QuantSpec(default=W8, head=W4)
    assert choose(parts, k=64, head=True, quant=quant, keep=False).format is W4
    assert choose(parts, k=64, head=False, quant=quant, keep=False).format is W8


def test_a_request_keeps_stored_bits_where_it_can() -> None:
    assert chosen("Q4_1", default=W4A16) == Choice(W4A16, 32, minimum=True, exact=(True,))
    assert chosen("Q4_0", default=W8).exact == (True,)
    assert chosen("Q4_1", default=W8).exact == (False,)
    assert chosen("Q8_0", default=F32).exact == (True,)
    assert chosen("F32", default=F16).exact == (False,)


def test_group_and_minimum_apply_to_float_sources() -> None:
    assert chosen("F32", keep=False, default=W4, group=64, minimum=False) == Choice(W4, 64, minimum=False, exact=(False,))
    assert chosen("F32", keep=False, default=W8, group=64).minimum is False


def test_inputs_that_are_no_whole_groups_stay_floats() -> None:
    assert chosen("BF16", k=48, keep=False).format is BF16
    assert chosen("F32", "F16", k=48, keep=False, default=W4).format is F32


def test_first_override_that_matches_wins() -> None:
    quant: dict[str, Any] = {"default": W4, "overrides": (("w0", F16), ("w*", W8))}
    assert chosen("F32", keep=False, **quant).format is F16
    assert choose([Source("w7", "F32", "F32")], k=64, head=False, quant=QuantSpec(**quant), keep=False).format is W8


def test_changed_weight_is_quantised_anew_into_the_form_it_had() -> None:
    assert chosen("F32", declared="Q4_1") == Choice(W4, 32, minimum=True, exact=(False,))
    assert chosen("F32", declared="Q8_0") == Choice(W8, 32, minimum=False, exact=(False,))
    assert chosen("F32", declared="F16").format is F16
