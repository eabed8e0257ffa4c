"""A small calbin written by hand: one layer of random weights, no compiler involved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from calstack.calbin.manifest import (
    Chip,
    Compatibility,
    Constraints,
    IOTensor,
    KVSpec,
    Manifest,
    PackedTensor,
    SourceInfo,
    Submodel,
    TargetRef,
    Workload,
)
from calstack.calbin.packing import packed_bytes
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
from calstack.calbin.reader import MANIFEST
from calstack.calbin.shard import padded
from calstack.calbin.writer import CalbinWriter
from calstack.specs import Activation, DType, KVDType, ModelSpec, Role, RopeSpec, WeightFormat

KEY = "decode.b2.q1.c128.paged"
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCAB, WIDE = 32, 2, 1, 16, 64, 64


def w8(name: str, n: int, k: int) -> Weight:
    return Weight(tensor=name, format=WeightFormat.W8A8, n=n, k=k, group=32)


def calls() -> tuple[Call, ...]:
    embed, norm = w8("embed", VOCAB, HIDDEN), Vector(tensor="norm", n=HIDDEN)
    shape: dict[str, Any] = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
    qkv = w8("qkv", (HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN)
    return (
        Embed(weight=embed, out="x"),
        RopeTable(inv_freq=Vector(tensor="inv_freq", n=HEAD_DIM // 2), out="rope"),
        NormLinear(layer=0, x="x", norm=norm, eps=1e-5, weight=qkv, out="qkv"),
        QkNormRopeKv(layer=0, qkv="qkv", table="rope", kv_layer=0, rope_dim=HEAD_DIM, **shape),
        Attention(layer=0, qkv="qkv", kv_layer=0, scale=0.25, out="attn", **shape),
        Linear(layer=0, x="attn", weight=w8("o", HIDDEN, HEADS * HEAD_DIM), residual="x"),
        NormLinear(layer=0, x="x", norm=norm, eps=1e-5, weight=w8("gate_up", 2 * WIDE, HIDDEN), gated=Activation.SILU, out="mlp"),
        Linear(layer=0, x="mlp", weight=w8("down", HIDDEN, WIDE), residual="x"),
        LmHead(x="x", norm=norm, eps=1e-5, weight=embed),
    )


def program() -> Program:
    widths = {"x": HIDDEN, "rope": HEAD_DIM, "qkv": (HEADS + 2 * KV_HEADS) * HEAD_DIM, "attn": HEADS * HEAD_DIM, "mlp": WIDE}
    buffers, at = [], 0
    for name, width in widths.items():
        buffers.append(Buffer(name=name, dtype=DType.F32, width=width, rows=2, offset=at))
        at += -(-8 * width // 64) * 64
    return Program(submodel=KEY, rows=2, lanes=2, context=128, buffers=tuple(buffers), arena_bytes=(at,), streams=(calls(),))


def tensor_sizes() -> dict[str, int]:
    """True bytes of every tensor, in shard order."""
    sizes: dict[str, int] = {}
    for call in calls():
        for field in call.__struct_fields__:
            value = getattr(call, field)
            if isinstance(value, Weight):
                sizes[value.tensor] = packed_bytes(value.format, value.n, value.k, value.group, value.minimum)
            elif isinstance(value, Vector):
                sizes[value.tensor] = 4 * value.n
    return sizes


def manifest(arena: int) -> Manifest:
    sizes = tensor_sizes()
    kv_bytes = 2 * KV_HEADS * 64 * HEAD_DIM * 2
    chip = Chip(
        id=0,
        params="params/chip0.safetensors",
        params_bytes=sum(map(padded, sizes.values())),
        activation_bytes=arena,
        kv_bytes_per_block=kv_bytes,
        dram_bytes=1 << 20,
        sram_bytes=0,
    )
    submodel = Submodel(
        key=KEY,
        role=Role.DECODE,
        batch=2,
        q_len=1,
        context=128,
        kv="paged",
        program=f"programs/{KEY}.json",
        rows=2,
        inputs=(IOTensor(name="input_ids", dtype=DType.I32, shape=("rows",), valid=(0, VOCAB - 1)),),
        outputs=(IOTensor(name="token", dtype=DType.I32, shape=(2,)),),
        workload=(
            Workload(unit="macs", constant=0, per_token=1, per_past_token=1),
            Workload(unit="bytes", constant=1, per_token=1, per_past_token=1),
        ),
    )
    return Manifest(
        producer="calstack",
        version="0.1.0",
        source=SourceInfo(kind="config", name="by hand"),
        model=ModelSpec(
            arch="llama",
            name="by hand",
            layers=1,
            hidden=HIDDEN,
            intermediate=WIDE,
            heads=HEADS,
            kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            vocab=VOCAB,
            context=128,
            rope=RopeSpec(dim=HEAD_DIM),
        ),
        target=TargetRef(name="cpu", chips=(chip,)),
        submodels=(submodel,),
        constraints=Constraints(max_tokens_per_launch=2, mixed_prefill_decode=True, late_inputs=False, kv=("paged",)),
        kv=KVSpec(
            kind="paged", dtype=KVDType.BF16, layers=1, heads=KV_HEADS, head_dim=HEAD_DIM, block_positions=64, bytes_per_block=kv_bytes
        ),
        tensors=tuple(PackedTensor(name=n, chip=0, bytes=b, format=WeightFormat.W8A8, shape=(1,)) for n, b in sizes.items()),
        quant=(),
        compatibility=Compatibility(format="1.0", runtime=">=0.1.0", compiler="0.1.0"),
        files=(),
    )


def write_calbin(path: Path, *, replace: bool = False) -> Path:
    """A sound calbin at `path`."""
    made = program()
    rng = np.random.default_rng(7)
    with CalbinWriter(path, replace=replace) as writer:
        with writer.shard("params/chip0.safetensors", tensor_sizes().items()) as shard:
            for name, nbytes in tensor_sizes().items():
                shard.add(name, rng.integers(0, 256, nbytes, np.uint8))
        writer.add_program(f"programs/{KEY}.json", made)
        writer.add("tokenizer.json", b"{}")
        return writer.seal(manifest(made.arena_bytes[0]))


def edit_manifest(path: Path, **changes: Any) -> None:
    """Replace fields of the manifest as raw JSON; `files__0__path` reaches `files[0].path`."""
    edit_json(path / MANIFEST, **changes)


def edit_json(file: Path, **changes: Any) -> None:
    value = msgspec.json.decode(file.read_bytes())
    for key, new in changes.items():
        at, *rest = key.split("__")
        node = value
        for step in rest:
            node = node[int(at) if at.isdigit() else at]
            at = step
        node[int(at) if at.isdigit() else at] = new
    file.write_bytes(msgspec.json.encode(value))
