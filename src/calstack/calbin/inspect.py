"""A calbin as a person reads it."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from calstack.calbin.program import Call, Program, Vector, Weight
from calstack.errors import ArtifactError

if TYPE_CHECKING:
    from calstack.calbin.manifest import Manifest
    from calstack.calbin.reader import Calbin

__all__ = ["describe", "describe_program", "size_text"]

_HIDDEN = ("layer", "norm_kind", "op")


def size_text(nbytes: float) -> str:
    """Bytes in the unit that leaves one to four digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def describe(calbin: Calbin) -> str:
    """The manifest in about thirty lines, and the quality card if there is one."""
    m = calbin.manifest
    lines = [
        *_model_lines(m),
        *_memory_lines(m),
        "submodels",
        *(f"  {s.key}: {s.rows} rows over {s.batch} lanes, {_work(m, s.key)}" for s in m.submodels),
        *_quality_lines(calbin),
    ]
    return "\n".join(lines)


def _model_lines(m: Manifest) -> list[str]:
    s = m.model
    shape = f"{s.layers} layers, hidden {s.hidden}, {s.heads} heads over {s.kv_heads} KV heads of {s.head_dim}, vocabulary {s.vocab}"
    licence = f", licence {m.source.licence}" if m.source.licence else ""
    return [
        f"{s.name} ({s.arch}): {shape}",
        f"from {m.source.kind} {m.source.name}{licence}",
        *(f"  {f.name}: {size_text(f.bytes)}, sha256 {f.sha256[:16]}…" for f in m.source.files),
        f"calbin format {m.format_major}.{m.format_minor} by {m.producer} {m.version}, target {m.target.name}, numerics {m.numerics}, "
        f"layout {m.packed_layout}" + (f", requires {', '.join(m.requires)}" if m.requires else ""),
    ]


def _memory_lines(m: Manifest) -> list[str]:
    forms = Counter((q.format.value + (" with minimum" if q.minimum else ""), q.exact) for q in m.quant)
    kinds = ", ".join(f"{count} tensors {name}{' (as in the source)' if exact else ''}" for (name, exact), count in forms.most_common())
    kv = m.kv
    lines = [f"weights: {kinds}"]
    lines += [
        f"chip {c.id}: parameters {size_text(c.params_bytes)}, activations {size_text(c.activation_bytes)}, "
        f"KV {size_text(c.kv_bytes_per_block)} per block of {kv.block_positions} positions"
        for c in m.target.chips
    ]
    lines.append(f"KV cache: {kv.kind}, {kv.dtype}, {kv.layers} layers of {kv.heads} x {kv.head_dim}" if kv.layers else "no KV cache")
    return lines


def _work(m: Manifest, key: str) -> str:
    work = {w.unit: w for w in next(s for s in m.submodels if s.key == key).workload}
    macs, nbytes = work.get("macs"), work.get("bytes")
    if macs is None or nbytes is None:
        return "no workload"
    return f"{macs.per_token / 1e6:.1f} M MACs a token, {size_text(nbytes.constant)} of weights a launch"


def _quality_lines(calbin: Calbin) -> list[str]:
    if not calbin.has("quality.json"):
        return ["quality: not measured"]
    try:
        card = json.loads(calbin.read("quality.json"))
        text = card["text"]
        if "cosine_mean" in card:
            return [_encoder_line(card)]
        line = (
            f"quality on {text['name']} ({card['windows']} windows of {card['window']} tokens): perplexity {card['perplexity']:.4f} "
            f"(reference {card['reference_perplexity']:.4f}), mean KL {card['kl_mean']:.5f}, top-1 {100 * card['top1']:.2f} %"
        )
        return [line]
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"is not a quality card: {error!r}", where="quality.json", remedy="compile the model again") from error


def _encoder_line(card: dict[str, Any]) -> str:
    return (
        f"quality on {card['text']['name']} ({card['texts']} texts, {card['tokens']} tokens): cosine to the reference "
        f"{card['cosine_mean']:.5f} on average, {card['cosine_min']:.5f} at least; largest error {card['error']:.2g} of the largest value"
    )


def describe_program(calbin: Calbin, key: str) -> str:
    """One submodel's command stream, a call a line.

    Raises:
        ArtifactError: when there is no such submodel.
    """
    program = calbin.program(key)
    head = f"{program.submodel}: {program.rows} rows, {program.lanes} lanes, context {program.context}"
    arenas = ", ".join(f"chip {chip}: arena {size_text(size)}" for chip, size in enumerate(program.arena_bytes))
    return "\n".join([head, arenas, *_buffer_lines(program), *_stream_lines(program)])


def _buffer_lines(program: Program) -> list[str]:
    return [f"  {b.name}: {b.dtype}[{b.rows}, {b.width}] at {b.space} {b.offset} of chip {b.chip}" for b in program.buffers]


def _stream_lines(program: Program) -> list[str]:
    lines = []
    for chip, stream in enumerate(program.streams):
        lines.append(f"chip {chip}")
        lines += [f"  {index:4} {'' if call.layer < 0 else call.layer:>3} {call_text(call)}" for index, call in enumerate(stream)]
    return lines


def call_text(call: Call) -> str:
    """`norm_linear(x=x, weight=…[960, 576] w4a8, out=qkv.0)`."""
    fields = {name: getattr(call, name) for name in call.__struct_fields__ if name not in _HIDDEN}
    shown = ", ".join(f"{name}={_value(value)}" for name, value in fields.items() if value is not None)
    return f"{call.OP}({shown})"


def _value(value: object) -> str:
    if isinstance(value, Weight):
        group = f"/{value.group}" if value.group else ""
        return f"{value.tensor}[{value.n}, {value.k}] {value.format}{group}{' min' if value.minimum else ''}"
    if isinstance(value, Vector):
        return f"{value.tensor}[{value.n}]"
    return str(value)
