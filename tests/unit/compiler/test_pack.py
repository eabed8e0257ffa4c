"""The packed layout against an unpacker that goes element by element, as native/include/calstack/kernels.h words it."""

from typing import Any

import numpy as np
import pytest

from calstack.calbin.packing import packed_bytes
from calstack.compiler.pack import gate_up_order, pack_codes, pack_floats
from calstack.compiler.quantize.codes import Codes, join, take_rows
from calstack.specs import WeightFormat

RNG = np.random.default_rng(3)


def half(data: bytes, at: int) -> Any:
    return np.frombuffer(data[at : at + 2], np.float16)[0]


def unpack(data: bytes, n: int, k: int, g: int, *, wide: bool, minimum: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    codes = np.zeros((n, k // g, g), int)
    scale = np.zeros((n, k // g), np.float16)
    low = np.zeros((n, k // g), np.float16)
    code_bytes = g * 16 if wide else g * 8
    group_bytes = code_bytes + 32 + (32 if minimum else 0)
    for row in range(n):
        block, lane = divmod(row, 16)
        for group in range(k // g):
            at = (block * (k // g) + group) * group_bytes
            for x in range(g):
                if wide:
                    j, b = divmod(x, 4)
                    codes[row, group, x] = data[at + 64 * j + 4 * lane + b] - 128
                else:
                    j, rest = divmod(x, 8)
                    high, b = divmod(rest, 4)
                    byte = data[at + 64 * j + 4 * lane + b]
                    codes[row, group, x] = byte >> 4 if high else byte & 15
            scale[row, group] = half(data, at + code_bytes + 2 * lane)
            low[row, group] = half(data, at + code_bytes + 32 + 2 * lane) if minimum else 0
    return codes, scale, low if minimum else None


def random_codes(n: int, k: int, g: int, *, wide: bool, minimum: bool) -> Codes:
    shape = (n, k // g, g)
    codes = RNG.integers(-128, 128, shape, np.int8) if wide else RNG.integers(0, 16, shape, np.uint8)
    scale = RNG.standard_normal(shape[:2]).astype(np.float16)
    return Codes(codes, scale, RNG.standard_normal(shape[:2]).astype(np.float16) if minimum else None)


@pytest.mark.parametrize("n", [16, 48, 5, 17])
@pytest.mark.parametrize(("k", "g"), [(32, 32), (96, 32), (128, 64), (16, 8)])
@pytest.mark.parametrize(("wide", "minimum"), [(False, False), (False, True), (True, False)])
def test_unpacking_by_the_layouts_words_gives_the_codes_back(n: int, k: int, g: int, wide: bool, minimum: bool) -> None:
    weight = random_codes(n, k, g, wide=wide, minimum=minimum)
    packed = pack_codes(weight)
    fmt = WeightFormat.W8A8 if wide else WeightFormat.W4A8
    assert packed.dtype == np.uint8
    assert packed.nbytes == packed_bytes(fmt, n, k, g, minimum)
    codes, scale, low = unpack(packed.tobytes(), n, k, g, wide=wide, minimum=minimum)
    np.testing.assert_array_equal(codes, weight.codes)
    np.testing.assert_array_equal(scale, weight.scale)
    if weight.minimum is not None:
        np.testing.assert_array_equal(low, weight.minimum)


def test_padding_rows_have_zero_codes_and_scales() -> None:
    packed = pack_codes(random_codes(5, 32, 32, wide=False, minimum=True)).tobytes()
    codes, scale, low = unpack(packed, 16, 32, 32, wide=False, minimum=True)
    assert not codes[5:].any()
    assert not scale[5:].any()
    assert low is not None
    assert not low[5:].any()


def test_padding_rows_of_w8_stand_for_zero() -> None:
    packed = pack_codes(random_codes(3, 32, 32, wide=True, minimum=False)).tobytes()
    codes, scale, _ = unpack(packed, 16, 32, 32, wide=True, minimum=False)
    assert not scale[3:].any()
    assert (codes[3:] == 0).all() or (codes[3:] == -128).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("n", [16, 33])
def test_floats_are_packed_input_by_input(dtype: type, n: int) -> None:
    weight: Any = RNG.standard_normal((n, 7)).astype(dtype)
    flat: Any = pack_floats(weight).view(dtype)
    for row in range(n):
        for k in range(7):
            assert flat[(row // 16 * 7 + k) * 16 + row % 16] == weight[row, k]


def test_gate_and_up_rows_alternate_in_blocks_of_16() -> None:
    order = gate_up_order(32)
    assert order[:16].tolist() == list(range(16))
    assert order[16:32].tolist() == list(range(32, 48))
    assert order[32:48].tolist() == list(range(16, 32))
    assert order[48:].tolist() == list(range(48, 64))


def test_joined_and_reordered_codes_keep_their_values() -> None:
    a, b = (random_codes(16, 32, 32, wide=False, minimum=True) for _ in range(2))
    both = join([a, b])
    np.testing.assert_array_equal(both.float32(), np.concatenate([a.float32(), b.float32()]))
    order = np.arange(32)[::-1]
    np.testing.assert_array_equal(take_rows(both, order).float32(), both.float32()[order])
