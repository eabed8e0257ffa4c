"""A small decoder written straight as a calbin, and the same decoder in numpy f64: device tests need no compiler."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from calstack.calbin.manifest import (
    Chip,
    Compatibility,
    Constraints,
    KVSpec,
    Manifest,
    PackedTensor,
    SourceInfo,
    Submodel,
    TargetRef,
    Workload,
)
from calstack.calbin.packing import weight_bytes
from calstack.calbin.program import (
    Attention,
    Buffer,
    Call,
    Embed,
    Linear,
    LmHead,
    NormLinear,
    Program,
    QkNormRopeKv,
    RopeTable,
    Vector,
    Weight,
)
from calstack.calbin.shard import padded
from calstack.calbin.writer import CalbinWriter
from calstack.compiler.pack import gate_up_order, pack_floats
from calstack.specs import Activation, DType, KVDType, ModelSpec, Role, RopeSpec, WeightFormat

BLOCK = 64


@dataclasses.dataclass(frozen=True)
class Tiny:
    """Sizes of the decoder and its submodels."""

    vocab: int = 160
    hidden: int = 32
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    intermediate: int = 48
    layers: int = 2
    context: int = 2304
    prefill_rows: int = 512
    batch: int = 4
    kv: KVDType = KVDType.F32
    seed: int = 0
    logit_softcap: float = 0.0

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def prefill(self) -> str:
        return f"prefill.b{self.batch}.q{self.prefill_rows}.c{self.context}.paged"

    @property
    def extend(self) -> str:
        return f"extend.b{self.batch}.q8.c{self.context}.paged"

    @property
    def decode(self) -> str:
        return f"decode.b{self.batch}.q1.c{self.context}.paged"


def weights(t: Tiny) -> dict[str, np.ndarray]:
    """Parameters by name, f32; linear weights are [n, k]."""
    rng = np.random.default_rng(t.seed)

    def linear(n: int, k: int) -> np.ndarray:
        return np.asarray(rng.standard_normal((n, k)) * (1.5 / k**0.5), np.float32)

    inv = 1.0 / 10000.0 ** (np.arange(0, t.head_dim, 2) / t.head_dim)
    out = {"embed": linear(t.vocab, t.hidden) * np.float32(3), "head": linear(t.vocab, t.hidden), "inv_freq": inv.astype(np.float32)}
    out["norm"] = np.ones(t.hidden, np.float32)
    for i in range(t.layers):
        out |= {
            f"{i}.norm1": 1 + rng.standard_normal(t.hidden).astype(np.float32) / 10,
            f"{i}.norm2": 1 + rng.standard_normal(t.hidden).astype(np.float32) / 10,
            f"{i}.qkv": linear(t.qkv, t.hidden),
            f"{i}.bias": rng.standard_normal(t.qkv).astype(np.float32) / 10,
            f"{i}.o": linear(t.hidden, t.heads * t.head_dim),
            f"{i}.gate_up": linear(2 * t.intermediate, t.hidden),
            f"{i}.down": linear(t.hidden, t.intermediate),
        }
    return out


def write_tiny(path: Path, t: Tiny) -> Path:
    """Seal the decoder as a calbin at `path`."""
    params = weights(t)
    packed = {name: _packed(name, value, t) for name, value in params.items()}
    with CalbinWriter(path) as writer:
        programs = {
            key: _program(t, key, rows) for key, rows in ((t.prefill, t.prefill_rows), (t.decode, t.batch), (t.extend, 8 * t.batch))
        }
        for key, program in programs.items():
            writer.add_program(f"programs/{key}.json", program)
        with writer.shard("params/chip0.safetensors", [(n, v.nbytes) for n, v in packed.items()]) as shard:
            for name, value in packed.items():
                shard.add(name, value)
        return writer.seal(_manifest(t, params, packed, max(p.arena_bytes[0] for p in programs.values())))


def forward(t: Tiny, tokens: list[int]) -> np.ndarray:
    """Logits [len(tokens), vocab] in f64."""
    p = {k: v.astype(np.float64) for k, v in weights(t).items()}
    x = p["embed"][np.array(tokens)]
    angle = np.outer(np.arange(len(tokens)), p["inv_freq"])
    cos, sin = np.cos(angle), np.sin(angle)
    for i in range(t.layers):
        qkv = _rms(x, p[f"{i}.norm1"]) @ p[f"{i}.qkv"].T + p[f"{i}.bias"]
        x = x + _attend(t, qkv, cos, sin) @ p[f"{i}.o"].T
        gate, up = np.split(_rms(x, p[f"{i}.norm2"]) @ p[f"{i}.gate_up"].T, 2, axis=1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ p[f"{i}.down"].T
    logits = _rms(x, p["norm"]) @ p["head"].T
    return t.logit_softcap * np.tanh(logits / t.logit_softcap) if t.logit_softcap else logits


def _rms(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    return np.asarray(x / np.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-5) * w)


def _attend(t: Tiny, qkv: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    rows = len(qkv)
    q, k, v = np.split(qkv.reshape(rows, -1, t.head_dim), [t.heads, t.heads + t.kv_heads], axis=1)

    def rope(x: np.ndarray) -> np.ndarray:
        a, b = np.split(x, 2, axis=2)
        c, s = cos[:, None], sin[:, None]
        return np.concatenate([a * c - b * s, b * c + a * s], axis=2)

    q, k = rope(q), rope(k)
    out = np.empty((rows, t.heads, t.head_dim))
    mask = np.tril(np.ones((rows, rows), bool))
    for h in range(t.heads):
        g = h * t.kv_heads // t.heads
        s = np.where(mask, q[:, h] @ k[:, g].T * t.head_dim**-0.5, -np.inf)
        e = np.exp(s - s.max(axis=1, keepdims=True))
        out[:, h] = e / e.sum(axis=1, keepdims=True) @ v[:, g]
    return out.reshape(rows, -1)


def _is_linear(name: str) -> bool:
    return name.rsplit(".", maxsplit=1)[-1] in {"embed", "head", "qkv", "o", "gate_up", "down"}


def _packed(name: str, value: np.ndarray, t: Tiny) -> np.ndarray:
    if name.endswith("gate_up"):
        value = value[gate_up_order(t.intermediate)]
    return pack_floats(value) if _is_linear(name) else np.ascontiguousarray(value).view(np.uint8)


def _weight(name: str, n: int, k: int) -> Weight:
    return Weight(tensor=name, format=WeightFormat.F32, n=n, k=k)


def _program(t: Tiny, key: str, rows: int) -> Program:
    widths = {"x": t.hidden, "qkv": t.qkv, "att": t.heads * t.head_dim, "mlp": t.intermediate, "rope": t.head_dim}
    buffers, offset = [], 0
    for name, width in widths.items():
        buffers.append(Buffer(name=name, dtype=DType.F32, width=width, rows=rows, offset=offset))
        offset += -(-width * rows * 4 // 64) * 64
    calls: list[Call] = [
        Embed(weight=_weight("embed", t.vocab, t.hidden), out="x"),
        RopeTable(inv_freq=Vector(tensor="inv_freq", n=t.head_dim // 2), out="rope"),
    ]
    for i in range(t.layers):
        calls += _layer(t, i)
    head = _weight("head", t.vocab, t.hidden)
    calls.append(LmHead(x="x", norm=Vector(tensor="norm", n=t.hidden), eps=1e-5, weight=head, softcap=t.logit_softcap))
    return Program(
        submodel=key, rows=rows, lanes=t.batch, context=t.context, buffers=tuple(buffers), arena_bytes=(offset,), streams=(tuple(calls),)
    )


def _layer(t: Tiny, i: int) -> list[Call]:
    shape: dict[str, Any] = {"kv_layer": i, "heads": t.heads, "kv_heads": t.kv_heads, "head_dim": t.head_dim}
    norm1, norm2 = (Vector(tensor=f"{i}.norm{j}", n=t.hidden) for j in (1, 2))
    bias = Vector(tensor=f"{i}.bias", n=t.qkv)
    return [
        NormLinear(layer=i, x="x", norm=norm1, eps=1e-5, weight=_weight(f"{i}.qkv", t.qkv, t.hidden), bias=bias, out="qkv"),
        QkNormRopeKv(layer=i, qkv="qkv", table="rope", rope_dim=t.head_dim, **shape),
        Attention(layer=i, qkv="qkv", scale=t.head_dim**-0.5, out="att", **shape),
        Linear(layer=i, x="att", weight=_weight(f"{i}.o", t.hidden, t.heads * t.head_dim), residual="x"),
        NormLinear(
            layer=i,
            x="x",
            norm=norm2,
            eps=1e-5,
            weight=_weight(f"{i}.gate_up", 2 * t.intermediate, t.hidden),
            gated=Activation.SILU,
            out="mlp",
        ),
        Linear(layer=i, x="mlp", weight=_weight(f"{i}.down", t.hidden, t.intermediate), residual="x"),
    ]


def _manifest(t: Tiny, params: dict[str, np.ndarray], packed: dict[str, np.ndarray], arena: int) -> Manifest:
    kv_bytes = t.layers * t.kv_heads * BLOCK * t.kv.position_bytes(t.head_dim)
    sizes = {n: v.nbytes for n, v in packed.items()}
    assert all(sizes[n] == weight_bytes(_weight(n, *v.shape)) for n, v in params.items() if _is_linear(n))
    chip = Chip(
        id=0,
        params="params/chip0.safetensors",
        params_bytes=sum(padded(v) for v in sizes.values()),
        activation_bytes=arena,
        kv_bytes_per_block=kv_bytes,
        dram_bytes=1 << 30,
        sram_bytes=0,
    )
    return Manifest(
        producer="tests",
        version="0",
        source=SourceInfo(kind="config", name="tiny"),
        model=_model(t),
        target=TargetRef(name="cpu", chips=(chip,)),
        submodels=(
            _submodel(t, t.prefill, Role.PREFILL, t.prefill_rows, t.prefill_rows),
            _submodel(t, t.decode, Role.DECODE, 1, t.batch),
            _submodel(t, t.extend, Role.EXTEND, 8, 8 * t.batch),
        ),
        constraints=Constraints(max_tokens_per_launch=t.prefill_rows, mixed_prefill_decode=False, late_inputs=False, kv=("paged",)),
        kv=KVSpec(
            kind="paged",
            dtype=t.kv,
            layers=t.layers,
            heads=t.kv_heads,
            head_dim=t.head_dim,
            block_positions=BLOCK,
            bytes_per_block=kv_bytes,
        ),
        tensors=tuple(
            PackedTensor(name=n, chip=0, bytes=sizes[n], format=WeightFormat.F32, shape=tuple(v.shape)) for n, v in params.items()
        ),
        quant=(),
        compatibility=Compatibility(format="1.0", runtime=">=0.1.0", compiler="0.1.0"),
        files=(),
    )


def _submodel(t: Tiny, key: str, role: Role, q_len: int, rows: int) -> Submodel:
    work = Workload(unit="macs", constant=0.0, per_token=1.0, per_past_token=0.0)
    return Submodel(
        key=key,
        role=role,
        batch=t.batch,
        q_len=q_len,
        context=t.context,
        kv="paged",
        program=f"programs/{key}.json",
        rows=rows,
        inputs=(),
        outputs=(),
        workload=(work,),
    )


def _model(t: Tiny) -> ModelSpec:
    return ModelSpec(
        arch="llama",
        name="tiny",
        layers=t.layers,
        hidden=t.hidden,
        intermediate=t.intermediate,
        heads=t.heads,
        kv_heads=t.kv_heads,
        head_dim=t.head_dim,
        vocab=t.vocab,
        context=t.context,
        rope=RopeSpec(dim=t.head_dim),
        qkv_bias=True,
    )
