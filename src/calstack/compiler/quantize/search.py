"""Float weights -> codes by least squared error per group.

Per group a grid of starting scales is tried; each gives codes, the codes give the best scale (and minimum) by least squares, rounded
to f16, and the pair whose own nearest codes have the smallest error wins. Values that fill a 16-step grid are met exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from calstack.compiler.quantize.codes import Codes

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float32]
    Found = tuple[npt.NDArray[np.uint8] | npt.NDArray[np.int8], Floats, Floats | None]

__all__ = ["search_w4", "search_w8"]

_CHUNK = 4096  # groups searched at once: their temporaries stay in the second-level cache
_GRID = np.linspace(-1.0, 1.5, 11, dtype=np.float32)  # around the plain range of 15 steps
_REFITS = 2
_HALF_MAX = np.float32(65504)


def search_w4(weight: Floats, *, group: int, minimum: bool) -> Codes:
    """4-bit codes of `weight` [rows, k] with a scale, and a minimum where asked, per `group` inputs."""
    return _search(weight, group, _affine if minimum else _symmetric)


def search_w8(weight: Floats, *, group: int) -> Codes:
    """8-bit codes of `weight` [rows, k] with a scale per `group` inputs."""
    return _search(weight, group, _bytes)


def _search(weight: Floats, group: int, find: Callable[[Floats], Found]) -> Codes:
    rows, k = weight.shape
    flat = np.ascontiguousarray(weight, np.float32).reshape(-1, group)
    chunks = [flat[start : start + _CHUNK] for start in range(0, len(flat), _CHUNK)]
    with ThreadPoolExecutor(max_workers=2) as pool:  # numpy lets go of the interpreter inside its loops
        found = list(pool.map(find, chunks))
    codes = np.concatenate([f[0] for f in found]).reshape(rows, k // group, group)
    scale = _half(np.concatenate([f[1] for f in found])).reshape(rows, k // group)
    lows = [f[2] for f in found if f[2] is not None]
    return Codes(codes, scale, _half(np.concatenate(lows)).reshape(scale.shape) if lows else None)


def _half(values: Floats) -> npt.NDArray[np.float16]:
    return np.clip(values, -_HALF_MAX, _HALF_MAX).astype(np.float16)


def _rounded(values: Floats) -> Floats:
    return _half(values).astype(np.float32)


def _inverse(scale: Floats) -> Floats:
    return np.divide(1.0, scale, out=np.zeros_like(scale), where=scale != 0)


def _affine_codes(x: Floats, d: Floats, m: Floats) -> Floats:
    q = (x - m[:, None]) * _inverse(d)[:, None]
    return np.clip(np.rint(q, out=q), 0, 15, out=q)


def _affine_error(x: Floats, q: Floats, d: Floats, m: Floats) -> Floats:
    r = q * d[:, None]
    r += m[:, None]
    r -= x
    error: Floats = np.einsum("gk,gk->g", r, r)
    return error


def _affine_fit(x: Floats, q: Floats, d: Floats, m: Floats) -> tuple[Floats, Floats]:
    """Least squares (d, m) of x against q, in f64 sums; groups with one distinct code keep their pair."""
    n = x.shape[1]
    sq, sx = q.sum(1, dtype=np.float64), x.sum(1, dtype=np.float64)
    sqq, sqx = np.einsum("gk,gk->g", q, q).astype(np.float64), np.einsum("gk,gk->g", q, x).astype(np.float64)
    determinant = n * sqq - sq * sq
    good = determinant > 0
    fit = np.divide(n * sqx - sq * sx, determinant, out=d.astype(np.float64), where=good)
    fit = np.where(fit > 0, fit, d)
    low = np.where(good, (sx - fit * sq) / n, m)
    return _rounded(fit.astype(np.float32)), _rounded(low.astype(np.float32))


def _affine(x: Floats) -> Found:
    low, high = x.min(1), x.max(1)
    span = high - low
    best_d, best_m = _rounded(span / 15), _rounded(low)
    best_q = _affine_codes(x, best_d, best_m)
    best_e = _affine_error(x, best_q, best_d, best_m)
    for delta in _GRID:
        d, m = span / (15 + delta), low
        for _ in range(_REFITS):
            d, m = _affine_fit(x, _affine_codes(x, d, m), d, m)
        q = _affine_codes(x, d, m)
        error = _affine_error(x, q, d, m)
        better = error < best_e
        best_e, best_d, best_m = np.where(better, error, best_e), np.where(better, d, best_d), np.where(better, m, best_m)
        best_q[better] = q[better]
    return best_q.astype(np.uint8), best_d, best_m


def _scaled_codes(x: Floats, d: Floats, least: int, most: int) -> Floats:
    q = x * _inverse(d)[:, None]
    return np.clip(np.rint(q, out=q), least, most, out=q)


def _scaled_error(x: Floats, q: Floats, d: Floats) -> Floats:
    r = q * d[:, None]
    r -= x
    error: Floats = np.einsum("gk,gk->g", r, r)
    return error


def _scaled_fit(x: Floats, q: Floats, d: Floats) -> Floats:
    sqq, sqx = np.einsum("gk,gk->g", q, q), np.einsum("gk,gk->g", q, x)
    return _rounded(np.divide(sqx, sqq, out=d.copy(), where=sqq > 0))


def _scaled(x: Floats, starts: list[Floats], least: int, most: int) -> tuple[Floats, Floats]:
    best_d = _rounded(starts[0])
    best_q = _scaled_codes(x, best_d, least, most)
    best_e = _scaled_error(x, best_q, best_d)
    for start in starts:
        d = start
        for _ in range(_REFITS):
            d = _scaled_fit(x, _scaled_codes(x, d, least, most), d)
        q = _scaled_codes(x, d, least, most)
        error = _scaled_error(x, q, d)
        better = error < best_e
        best_e, best_d = np.where(better, error, best_e), np.where(better, d, best_d)
        best_q[better] = q[better]
    return best_q, best_d


def _symmetric(x: Floats) -> Found:
    """Codes 0..15 stand for -8..7, so the largest magnitude belongs at -8: its sign decides the scale's."""
    peak = np.take_along_axis(x, np.abs(x).argmax(1)[:, None], axis=1)[:, 0]
    q, d = _scaled(x, [peak / (-8 - delta) for delta in _GRID], -8, 7)
    return (q + 8).astype(np.uint8), d, None


def _bytes(x: Floats) -> Found:
    q, d = _scaled(x, [np.abs(x).max(1) / 127], -127, 127)
    return q.astype(np.int8), d, None
