"""A cache of one layer for kernel tests, written here from the drawing of layout kv64.v1, and attention in float64."""

from __future__ import annotations

import dataclasses

import numpy as np

from calstack.native import _core

kernels = _core.kernels
ISAS = [isa for isa in kernels.isas() if isa not in ("reference", "avx2_vnni")]  # these families of avx2_vnni are those of avx2
BLOCK = 64
POISON = 0xFF  # NaN in both cache types


@dataclasses.dataclass(frozen=True)
class Case:
    """What a call sees: `past` positions in the cache before the first of `rows` rows."""

    past: int
    rows: int
    dim: int = 64
    heads: int = 9
    kv_heads: int = 3
    bf16: bool = True
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
    return (bf16_bits(x).astype(np.uint32) << 16).view(np.float32)


class Lane:
    """One lane's cache (block ids shuffled, all bytes poisoned at first) and what was put there."""

    def __init__(self, case, rng, positions=None):
        self.case = case
        self.positions = positions or case.end
        n = (self.positions + BLOCK - 1) // BLOCK
        elem = 2 if case.bf16 else 4
        self.layer_bytes = 2 * case.kv_heads * case.dim * BLOCK * elem
        self.blocks = np.full((n + 2, self.layer_bytes + 128), POISON, np.uint8)
        self.tables = rng.permutation(n + 2)[:n].astype(np.int32)[None].copy()
        self.cache = kernels.Cache(
            self.blocks, self.tables, case.bf16, case.heads, case.kv_heads, case.dim, case.window, case.scale, case.softcap
        )

    def planes(self, block):
        """K [kv, 4, dim, 16] and V [kv, 64, dim] of a block, as u16 or f32."""
        c = self.case
        layer = self.blocks[block, -self.layer_bytes :].view(np.uint16 if c.bf16 else np.float32)
        k, v = np.split(layer, 2)
        return k.reshape(c.kv_heads, 4, c.dim, 16), v.reshape(c.kv_heads, BLOCK, c.dim)

    def put(self, position, k, v):
        """K and V [kv, dim] of one position, rounded as the cache rounds."""
        if self.case.bf16:
            k, v = bf16_bits(k), bf16_bits(v)
        to_k, to_v = self.planes(self.tables[0, position // BLOCK])
        j = position % BLOCK
        to_k[:, j // 16, :, j % 16] = k
        to_v[:, j] = v

    def get(self, position):
        k, v = self.planes(self.tables[0, position // BLOCK])
        j = position % BLOCK
        k, v = k[:, j // 16, :, j % 16], v[:, j]
        return (
            (k, v) if not self.case.bf16 else ((k.astype(np.uint32) << 16).view(np.float32), (v.astype(np.uint32) << 16).view(np.float32))
        )


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


def attention_f64(case, lane, qkv):
    """Softmax attention of every row over the keys it sees, in float64."""
    kv = [lane.get(p) for p in range(case.end)]
    k, v = (np.stack([pair[i] for pair in kv]).astype(np.float64) for i in (0, 1))
    out = np.zeros((case.rows, case.heads, case.dim))
    for row, position in enumerate(positions_of(case)):
        first = max(0, position - case.window + 1) if case.window else 0
        q = qkv[row, : case.heads * case.dim].reshape(case.heads, case.dim).astype(np.float64)
        for head in range(case.heads):
            group = head // (case.heads // case.kv_heads)
            s = k[first : position + 1, group] @ q[head] * case.scale
            if case.softcap:
                s = case.softcap * np.tanh(s / case.softcap)
            p = np.exp(s - s.max())
            out[row, head] = p / p.sum() @ v[first : position + 1, group]
    return out.reshape(case.rows, -1)
