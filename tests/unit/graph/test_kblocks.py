from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from calstack.graph.blocks import KINDS, dequantise


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"])
def test_values_equal_the_gguf_package_bit_for_bit(kind: str) -> None:
    raw = np.random.default_rng(5).integers(0, 256, (6, KINDS[kind].row_bytes(768)), dtype=np.uint8)
    with np.errstate(all="ignore"):  # random scales are infinite or no number now and then
        got, want = dequantise(kind, raw, (2, 3, 768)), quants.dequantize(raw, GGMLQuantizationType[kind])
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got.reshape(6, 768), want)


@pytest.mark.parametrize("kind", ["Q5_0", "Q5_1"])
def test_a_row_that_is_not_whole_blocks_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=kind):
        KINDS[kind].row_bytes(40)
    with pytest.raises(ValueError, match="Q4_K"):
        KINDS["Q4_K"].row_bytes(128)
