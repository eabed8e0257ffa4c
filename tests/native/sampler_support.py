"""The sampler of docs/concepts/numerics.md in numpy, and calls of the native one."""

from __future__ import annotations

import dataclasses

import numpy as np

from tests.native.attention_support import ISAS, kernels, same_bits

__all__ = ["ISAS", "Sampling", "candidates", "explain", "kernels", "penalised", "same_bits", "uniform"]

M64 = (1 << 64) - 1
F = np.float32
EXP_COEFFICIENTS = ["0x1.6850e4p-10", "0x1.123bccp-7", "0x1.555b98p-5", "0x1.55548ep-3", "0x1.fffff8p-2", "0x1p+0", "0x1p+0"]


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Arguments of a call, by the names of the binding."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    softcap: float = 0.0
    bias: dict = dataclasses.field(default_factory=dict)
    prompt: tuple = ()
    output: tuple = ()
    allowed: np.ndarray | None = None  # bool per id
    seed: int = 1
    choice: int = 0
    index: int = 0
    top_logprobs: int = -1

    def run(self, isa, logits):
        """(token, logprob, top ids, top logprobs, adjusted logits)."""
        z = np.array(logits, F)
        names = ("temperature", "top_k", "top_p", "min_p", "repetition", "frequency", "presence", "softcap", "seed", "choice", "index")
        more = {name: getattr(self, name) for name in (*names, "top_logprobs")}
        if self.bias:
            more |= {"bias_ids": np.array(list(self.bias), np.int32), "bias": np.array(list(self.bias.values()), F)}
        for name in ("prompt", "output"):
            if getattr(self, name):
                more[name] = np.array(getattr(self, name), np.int32)
        if self.allowed is not None:
            more["mask"] = packed_mask(self.allowed)
        token, logprob, ids, logprobs = kernels.sample(isa, z, **more)
        return token, logprob, ids[0], logprobs[0], z


def packed_mask(allowed):
    padded = np.zeros((len(allowed) + 31) // 32 * 32, bool)
    padded[: len(allowed)] = allowed
    return np.packbits(padded, bitorder="little").view(np.uint32)


def fma(a, b, c):
    return (np.asarray(a, np.longdouble) * np.asarray(b, np.longdouble) + np.asarray(c, np.longdouble)).astype(F)


def exp(x):
    x = np.asarray(x, F)
    clipped = np.clip(x, F(-87), F(88))
    n = np.rint(clipped * F(float.fromhex("0x1.715476p+0")))
    r = fma(n, F(-float.fromhex("0x1.62e4p-1")), clipped)
    r = fma(n, F(-float.fromhex("0x1.7f7d1cp-20")), r)
    p = np.full_like(r, F(float.fromhex(EXP_COEFFICIENTS[0])))
    for c in EXP_COEFFICIENTS[1:]:
        p = fma(p, r, F(float.fromhex(c)))
    return np.where(x < F(-87), F(0), np.ldexp(p, n.astype(np.int32)))


def penalised(s, logits):
    z = np.array(logits, F)
    vocab = len(z)
    if s.softcap:
        cap = F(s.softcap)
        z = cap * fma(F(2), F(1) / (F(1) + exp(-(F(2) * (z / cap)))), F(-1))
    for i, b in s.bias.items():
        if 0 <= i < vocab:
            z[i] += F(b)
    history = [i for i in (*s.prompt, *s.output) if 0 <= i < vocab]
    for i in set(history):
        z[i] = z[i] / F(s.repetition) if z[i] > 0 else z[i] * F(s.repetition)
        if count := s.output.count(i):
            z[i] = fma(F(-count), F(s.frequency), z[i]) - F(s.presence)
    if s.allowed is not None:
        z[~s.allowed] = -np.inf
    return z


def block_sums(e):
    """Inclusive f64 sums after each block of 256."""
    out, total = [], 0.0
    for b in range(0, len(e), 256):
        lanes = np.zeros(16)
        block = np.zeros(256)
        block[: len(e[b : b + 256])] = e[b : b + 256]
        for row in block.reshape(16, 16):
            lanes = lanes + row
        for width in (8, 4, 2, 1):
            lanes = lanes[:width] + lanes[width : 2 * width]
        total += lanes[0]
        out.append(total)
    return out


def cut(e, passes):
    sums = [0.0, *block_sums(e)]
    for b, after in enumerate(sums[1:]):
        if passes(after):
            running, block = sums[b], e[b * 256 : b * 256 + 256].astype(np.float64)
            for i, value in enumerate(block):
                running += value
                if passes(running):
                    return b * 256 + i
            return b * 256 + int(np.flatnonzero(block > 0)[-1])
    return int(np.flatnonzero(e > 0)[-1])


def candidates(s, z):
    """Ids and e of what is kept, in order."""
    with np.errstate(invalid="ignore", over="ignore"):
        e = exp((z - z.max()) / F(s.temperature))
    k = s.top_k if 0 < s.top_k < len(z) else None
    if k is None and s.top_p >= 1 and s.min_p <= 0:
        return np.arange(len(z)), e
    ids = np.argsort(-z, kind="stable")[:k]
    if s.top_p < 1:
        target = float(F(s.top_p)) * block_sums(e[ids] if k else e)[-1]
        ids = ids[: cut(e[ids], lambda total: total >= target) + 1]
    if s.min_p > 0:
        ids = ids[e[ids] >= F(s.min_p)]
    return ids, e[ids]


def mix(x):
    x = (x + 0x9E3779B97F4A7C15) & M64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & M64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & M64
    return x ^ (x >> 31)


def uniform(seed, choice, index):
    h = mix((mix(mix(seed) ^ ((choice + 0x9E3779B97F4A7C15) & M64)) + index * 0xD1342543DE82EF95) & M64)
    return (h >> 11) * 2.0**-53


def explain(s, logits):
    """The token numpy chooses; -1 when there is none."""
    z = penalised(s, logits)
    if np.isnan(z).any() or not np.isfinite(z.max()):
        return -1
    if s.temperature < 1e-6:
        return int(z.argmax())
    ids, e = candidates(s, z)
    if len(ids) == 0:
        return int(z.argmax())
    target = uniform(s.seed, s.choice, s.index) * block_sums(e)[-1]
    return int(ids[cut(e, lambda total: total > target)])
