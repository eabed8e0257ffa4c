"""Weights for kernel tests: logical arrays, their packed form (layout n16.v1, written here from the drawing) and their f64 value."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from calstack.native import _core

kernels = _core.kernels
ISAS = [isa for isa in kernels.isas() if isa != "reference"]
GROUPED = ("w4a8", "w8a8", "w4a16")


def ceil16(n):
    return (n + 15) // 16 * 16


@dataclasses.dataclass(frozen=True)
class TestWeight:
    """codes [n, k] (q of numerics.md, 0..15 or -128..127) with scale, minimum [n, k/g] f16, or values [n, k]."""

    __test__ = False
    format: str
    n: int
    k: int
    group: int
    codes: Any = None  # an array where the format has it
    scale: Any = None
    minimum: np.ndarray | None = None
    values: Any = None  # u16 bits for bf16

    def packed(self, order=None):
        """Bytes of the blocks; `order` [blocks, 16] gives the logical output of each packed lane (-1 = padding)."""
        if order is None:
            order = np.where(np.arange(ceil16(self.n)) < self.n, np.arange(ceil16(self.n)), -1).reshape(-1, 16)
        return np.concatenate([self._block(lanes) for lanes in order])

    def native(self, order=None, n=None):
        group = self.group if self.format in GROUPED else 0
        return kernels.Weight(self.packed(order), self.format, n or self.n, self.k, group, self.minimum is not None)

    def f64(self):
        if self.format not in GROUPED:
            bits = self.values.astype(np.uint32) << 16 if self.format == "bf16" else None
            return bits.view(np.float32).astype(np.float64) if bits is not None else self.values.astype(np.float64)
        d = np.repeat(self.scale.astype(np.float64), self.group, axis=1)
        if self.minimum is not None:
            return d * self.codes + np.repeat(self.minimum.astype(np.float64), self.group, axis=1)
        return d * (self.codes - (0 if self.format == "w8a8" else 8))

    def _lanes(self, array, lanes, pad):
        rows = array[np.maximum(lanes, 0)].copy()
        rows[lanes < 0] = pad
        return rows

    def _block(self, lanes):
        if self.format not in GROUPED:
            return np.ascontiguousarray(self._lanes(self.values, lanes, 0).T).view(np.uint8).reshape(-1)
        parts = []
        codes = self._lanes(self.codes, lanes, 0)
        for g in range(self.k // self.group):
            parts.append(self._codes(codes[:, g * self.group : (g + 1) * self.group]))
            parts.append(self._lanes(self.scale[:, g], lanes, 0).view(np.uint8))
            if self.minimum is not None:
                parts.append(self._lanes(self.minimum[:, g], lanes, 0).view(np.uint8))
        return np.concatenate([p.reshape(-1) for p in parts])

    def _codes(self, codes):  # [16, group]
        if self.format == "w8a8":
            return (codes + 128).astype(np.uint8).reshape(16, -1, 4).transpose(1, 0, 2)
        halves = codes.astype(np.uint8).reshape(16, -1, 2, 4)
        return (halves[:, :, 0] | halves[:, :, 1] << 4).transpose(1, 0, 2)


def random_weight(rng, fmt, n, k, group=32, minimum=False):
    if fmt in GROUPED:
        low, high = (-128, 128) if fmt == "w8a8" else (0, 16)
        scale = rng.uniform(-0.02, 0.02, (n, k // group)).astype(np.float16)
        scale[rng.random(scale.shape) < 0.05] = np.float16(3e-6)  # a denormal half
        least = rng.uniform(-0.2, 0.1, scale.shape).astype(np.float16) if minimum else None
        return TestWeight(fmt, n, k, group, codes=rng.integers(low, high, (n, k)), scale=scale, minimum=least)
    values = rng.standard_normal((n, k)).astype(np.float32) * np.float32(0.05)
    stored = {"f32": values, "f16": values.astype(np.float16), "bf16": (values.view(np.uint32) >> 16).astype(np.uint16)}[fmt]
    return TestWeight(fmt, n, k, 0, values=stored)


def random_rows(rng, rows, k, group=32):
    """Rows with what a model never has as well: zero groups, denormals, huge and tiny magnitudes, outliers."""
    x = rng.standard_normal((rows, k)).astype(np.float32)
    kinds = rng.integers(0, 12, (rows, k // group))
    factor = np.select([kinds == 0, kinds == 1, kinds == 2, kinds == 3], [0.0, 1e-41, 1e18, 1e-18], 1.0).astype(np.float32)
    x *= np.repeat(factor, group, axis=1)
    x[rng.random(x.shape) < 0.002] *= np.float32(100.0)
    x[rng.random(x.shape) < 0.01] = np.float32(-0.0)
    return x


def same_bits(a, b):
    """Equal bit for bit; shows the first difference otherwise."""
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    if a.dtype == np.float32:
        a, b = a.view(np.uint32), b.view(np.uint32)
    where = np.argwhere(a != b)
    assert not len(where), f"{len(where)} of {a.size} differ, first at {where[0]}: {a[tuple(where[0])]:#x} != {b[tuple(where[0])]:#x}"


def gated_order(n):
    """Packed lanes of a gate/up pair of n/2 outputs each: blocks in (gate, up) pairs, each half padded to 16."""
    half = n // 2
    gate = np.where(np.arange(ceil16(half)) < half, np.arange(ceil16(half)), -1).reshape(-1, 16)
    up = np.where(gate < 0, -1, gate + half)
    return np.stack([gate, up], axis=1).reshape(-1, 16)
