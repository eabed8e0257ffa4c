"""A cache of one layer for kernel tests, written here from the drawing of layout kv64.v1, and attention in float64."""

from __future__ import annotations

import dataclasses

import numpy as np

from calstack.native import _core

kernels = _core.kernels
ISAS = [isa for isa in kernels.isas() if isa not in ("reference", "avx2_vnni")]  # these families of avx2_vnni are those of avx2
BLOCK = 64
POISON = 0xFF  # NaN in float planes and in scales
SIZES = {"f32": (4, 4), "bf16": (2, 2), "bf16_v8": (2, 1), "i8": (1, 1)}  # bytes of an element of K and of V
DTYPES = {4: np.float32, 2: np.uint16, 1: np.int8}


@dataclasses.dataclass(frozen=True)
class Case:
    """What a call sees: `past` positions in the cache before the first of `rows` rows."""

    past: int
    rows: int
    dim: int = 64
    heads: int = 9
    kv_heads: int = 3
    kv: str = "bf16"
    window: int = 0
    softcap: float = 0.0

    @property
    def end(self):
        return self.past + self.rows

    @property
    def row_floats(self):
        return (self.heads + 2 * self.kv_heads) * self.dim

    @property
    def scale(self):
        return float(np.float32(self.dim**-0.5))


def same_bits(a, b):
    np.testing.assert_array_equal(np.ascontiguousarray(a).view(np.uint32), np.ascontiguousarray(b).view(np.uint32))


def bf16_bits(x):
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def bf16_round(x):
    """Nearest bf16; what is below 2^-50 is 0."""
    near = (bf16_bits(x).astype(np.uint32) << 16).view(np.float32)
    return np.where(np.abs(x) < 2.0**-50, np.float32(0), near)


class Lane:
    """One lane's cache (block ids shuffled, all bytes poisoned at first) and what was put there."""

    def __init__(self, case, rng, positions=None):
        self.case = case
        self.positions = positions or case.end
        n = (self.positions + BLOCK - 1) // BLOCK
        self.layer_bytes = case.kv_heads * BLOCK * sum(size * case.dim + 4 * (size == 1) for size in SIZES[case.kv])
        self.blocks = np.full((n + 2, self.layer_bytes + 128), POISON, np.uint8)
        self.tables = rng.permutation(n + 2)[:n].astype(np.int32)[None].copy()
        self.cache = kernels.Cache(
            self.blocks, self.tables, case.kv, case.heads, case.kv_heads, case.dim, case.window, case.scale, case.softcap
        )

    def at(self, position):
        """Views of one position: K [kv, dim/2, 2] and V [kv, dim] as stored, and the f32 scales [kv] of each (None without)."""
        c, (k_size, v_size) = self.case, SIZES[self.case.kv]
        layer, j = self.blocks[self.tables[0, position // BLOCK], -self.layer_bytes :], position % BLOCK
        n, scales = c.kv_heads * BLOCK * c.dim, c.kv_heads * BLOCK * 4
        ends = np.cumsum([n * k_size, n * v_size, scales * (k_size == 1), scales * (v_size == 1)])
        k, v, ks, vs, _ = np.split(layer, ends)
        k, v = k.view(DTYPES[k_size]), v.view(DTYPES[v_size])
        if c.kv == "f32":
            k, v = k.reshape(c.kv_heads, c.dim // 2, 2, BLOCK)[..., j], v.reshape(c.kv_heads, BLOCK, c.dim)[:, j]
        else:
            k = k.reshape(c.kv_heads, c.dim // 2, BLOCK, 2)[:, :, j]
            v = v.reshape(c.kv_heads, BLOCK // 2, c.dim, 2)[:, j // 2, :, j % 2]
        return k, v, *(s.view(np.float32).reshape(c.kv_heads, BLOCK)[:, j] if s.size else None for s in (ks, vs))

    def put(self, position, k, v):
        """K and V [kv, dim] of one position, rounded as the cache rounds."""
        to_k, to_v, k_scale, v_scale = self.at(position)
        values, scale = stored(k, to_k.dtype)
        to_k[:] = values.reshape(to_k.shape)
        if k_scale is not None:
            k_scale[:] = scale
        to_v[:], scale = stored(v, to_v.dtype)
        if v_scale is not None:
            v_scale[:] = scale

    def get(self, position):
        k, v, k_scale, v_scale = self.at(position)
        return floats(np.ascontiguousarray(k).reshape(v.shape), k_scale), floats(v, v_scale)


def stored(x, dtype):
    """Values [heads, dim] as the cache holds them, and the scale of each head (of int8)."""
    x = np.ascontiguousarray(x, np.float32)
    if dtype == np.float32:
        return x, None
    if dtype == np.uint16:
        return bf16_bits(x), None
    top = np.abs(x).max(axis=1, keepdims=True)
    return np.rint(x * (np.float32(127) / top)).astype(np.int8), (top / np.float32(127))[:, 0]


def floats(x, scale):
    """What stored values [heads, dim] stand for."""
    if x.dtype == np.uint16:
        return (x.astype(np.uint32) << 16).view(np.float32)
    x = x.copy()
    return x if scale is None else x.astype(np.float32) * scale[:, None]


def filled(case, rng, first=0):
    """A lane whose positions [first, end) hold random K and V, the rest poison; and q rows (K, V of the rows are not read)."""
    lane = Lane(case, rng)
    k = rng.standard_normal((case.end, case.kv_heads, case.dim), np.float32)
    v = rng.standard_normal((case.end, case.kv_heads, case.dim), np.float32)
    for position in range(first, case.end):
        lane.put(position, k[position], v[position])
    qkv = rng.standard_normal((case.rows, case.row_floats), np.float32) * 3
    return lane, qkv


def positions_of(case):
    return np.arange(case.past, case.end, dtype=np.int32)


def run(isa, case, lane, qkv):
    return kernels.attention(isa, lane.cache, qkv, 0, positions_of(case))


def attention_f64(case, lane, qkv, *, rounded=True):
    """Softmax attention of every row over the keys it sees, in float64. `rounded`: with the factors beside K and V as bf16, as they are."""
    kv = [lane.get(p) for p in range(case.end)]
    k, v = (np.stack([pair[i] for pair in kv]).astype(np.float64) for i in (0, 1))
    rounding = bf16_round if rounded and case.kv != "f32" else (lambda x: x)
    v_scales = np.stack([lane.at(p)[3] for p in range(case.end)]) if SIZES[case.kv][1] == 1 else None
    out = np.zeros((case.rows, case.heads, case.dim))
    for row, position in enumerate(positions_of(case)):
        first = max(0, position - case.window + 1) if case.window else 0
        q = qkv[row, : case.heads * case.dim].reshape(case.heads, case.dim) * np.float32(case.scale)
        q = rounding(q).astype(np.float64)
        for head in range(case.heads):
            group = head // (case.heads // case.kv_heads)
            s = k[first : position + 1, group] @ q[head]
            if case.softcap:
                s = case.softcap * np.tanh(s / case.softcap)
            p = np.exp(s - s.max())
            weights = p.copy()
            for split in range(first // 256, position // 256 + 1):  # p is rounded beside the highest score of its split
                part = slice(max(256 * split, first) - first, 256 * (split + 1) - first)
                top = np.exp(s[part].max() - s.max())
                by = 1.0 if v_scales is None else v_scales[first : position + 1, group][part]
                weights[part] = rounding((p[part] / top * by).astype(np.float32)) * top / by
            out[row, head] = weights / p.sum() @ v[first : position + 1, group]
    return out.reshape(case.rows, -1)
