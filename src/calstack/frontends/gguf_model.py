"""From an open GGUF file to what the compiler needs: ModelSpec, weights under HF names, tokenizer, template."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from calstack.calbin.manifest import SourceInfo
from calstack.errors import UnsupportedError
from calstack.frontends import limits
from calstack.frontends.arch import family_of_gguf
from calstack.frontends.arch.rope import llama3_factors
from calstack.frontends.assemble import attach_weights, check_layers
from calstack.frontends.gguf import GGUFFile, TensorEntry, read_gguf
from calstack.frontends.gguf_tokenizer import adds_bos, build_tokenizer
from calstack.frontends.mapped import MappedTensor
from calstack.frontends.normalise import normalise
from calstack.frontends.reading import bad, hash_files
from calstack.graph.model import GraphBundle
from calstack.progress import Progress
from calstack.specs import ModelSpec, RopeSpec

if TYPE_CHECKING:
    from calstack.frontends.arch.family import Family
    from calstack.frontends.metadata import Metadata

__all__ = ["open_gguf", "spec_of"]

_LAYER = re.compile(r"(?<=\.)\d{1,4}(?=\.)")
_ROPE_FACTORS = "rope_freqs.weight"
# llama3 scaling reaches GGUF only as its factors; these are the published settings they can come from.
_LLAMA3 = RopeSpec(dim=2, scaling="llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192)


def hf_name(name: str, names: Mapping[str, str]) -> str | None:
    """The HF parameter name of a GGUF tensor, None when it has none. `names` maps stems, `*` is the layer."""
    stem, _, kind = name.rpartition(".")
    if kind not in ("weight", "bias"):
        return None
    layer = _LAYER.search(name)
    pattern = names.get(_LAYER.sub("*", stem + ".", count=1)[:-1])
    return None if pattern is None else f"{pattern.replace('*', str(int(layer[0])) if layer else '')}.{kind}"


def gguf_name(name: str, names: Mapping[str, str]) -> str:
    """The GGUF name of an HF parameter, for messages; the HF name where a source has another form."""
    stem, _, kind = name.rpartition(".")
    layer = _LAYER.search(name)
    short_of = {long: short for short, long in names.items()}
    short = short_of.get(_LAYER.sub("*", stem + ".", count=1)[:-1])
    return name if short is None else f"{short.replace('*', layer[0] if layer else '')}.{kind}"


def _entry(file: GGUFFile, name: str, dims: int) -> TensorEntry:
    if name not in file.tensors:
        bad(file.path, f"tensor {name!r}", "the tensor is missing")
    if len(file.tensors[name].shape) != dims:
        bad(file.path, f"tensor {name!r}", f"{len(file.tensors[name].shape)} dimensions, expected {dims}")
    return file.tensors[name]


def _rope(file: GGUFFile, arch: str, head_dim: int) -> RopeSpec:
    meta, key = file.metadata, f"{arch}.rope."
    rope = RopeSpec(
        theta=meta.number(key + "freq_base", 1.0, 1e12, 10000.0),
        dim=meta.integer(key + "dimension_count", 2, limits.MAX_HEAD_DIM, head_dim),
    )
    scaling = meta.text(key + "scaling.type", "linear" if key + "scale_linear" in meta else "none")
    if _ROPE_FACTORS in file.tensors:
        return _llama3_rope(file, rope)
    if scaling == "linear":
        factor_key = key + ("scale_linear" if key + "scale_linear" in meta else "scaling.factor")
        return msgspec.structs.replace(rope, scaling="linear", factor=meta.number(factor_key, 1e-3, 1e6, 1.0))
    if scaling == "yarn":
        factor = meta.number(key + "scaling.factor", 1.0, 1e6)
        original = meta.integer(key + "scaling.original_context_length", 1, limits.MAX_CONTEXT)
        attention = meta.number(key + "scaling.attn_factor", 1e-3, 1e3, 1.0) * (0.1 * math.log(factor) + 1.0)
        return msgspec.structs.replace(rope, scaling="yarn", factor=factor, original_context=original, attention_factor=attention)
    if scaling != "none":
        raise UnsupportedError(f"rope scaling {scaling[:32]!r} is not supported", where=f"{file.path}: {key}scaling.type")
    return rope


def _llama3_rope(file: GGUFFile, plain: RopeSpec) -> RopeSpec:
    entry = _entry(file, _ROPE_FACTORS, 1)
    if entry.shape != (plain.dim // 2,) or entry.kind != "F32":
        bad(file.path, f"tensor {_ROPE_FACTORS!r}", f"expected {plain.dim // 2} F32 values")
    factors = np.frombuffer(file.map, np.float32, plain.dim // 2, entry.offset)
    largest = float(factors.max())
    if not math.isfinite(largest) or largest < 1.0:
        bad(file.path, f"tensor {_ROPE_FACTORS!r}", "the factors are not finite numbers from 1")
    rope = msgspec.structs.replace(_LLAMA3, theta=plain.theta, dim=plain.dim, factor=largest)
    if not np.allclose(llama3_factors(rope), factors, rtol=1e-5):
        raise UnsupportedError("these rope factors are not supported", where=f"{file.path}: tensor {_ROPE_FACTORS!r}")
    return rope


def _token_ids(meta: Metadata, vocab: int, *names: str) -> tuple[int, ...]:
    keys = [f"tokenizer.ggml.{name}_token_id" for name in names]
    ids = [meta.integer(key, 0, vocab - 1) for key in keys if key in meta]
    return tuple(dict.fromkeys(ids))


def _family(file: GGUFFile) -> Family:
    arch = file.metadata.text("general.architecture")
    experts = file.metadata.integer(f"{arch}.expert_count", 0, limits.MAX_EXPERTS, 0)
    return family_of_gguf(arch, f"{file.path}: general.architecture", experts=experts > 0)


def spec_of(file: GGUFFile) -> ModelSpec:
    """The model that the metadata describes; widths are checked against the tensors when the graphs are built."""
    meta = file.metadata
    arch = meta.text("general.architecture")
    family = _family(file)
    if meta.integer("split.count", 0, 1 << 16, 1) > 1:
        raise UnsupportedError(
            "a file split into parts is not supported", where=f"{file.path}: split.count", remedy="merge the parts first"
        )
    vocab = _entry(file, "token_embd.weight", 2).shape[0]
    if vocab > limits.MAX_VOCAB:
        bad(file.path, "tensor 'token_embd.weight'", f"a vocabulary of {vocab} is more than {limits.MAX_VOCAB}")
    hidden = meta.integer(f"{arch}.embedding_length", 1, limits.MAX_WIDTH)
    heads = meta.integer(f"{arch}.attention.head_count", 1, limits.MAX_HEADS)
    head_dim = meta.integer(f"{arch}.attention.key_length", 2, limits.MAX_HEAD_DIM, max(2, hidden // heads))
    if meta.integer(f"{arch}.attention.value_length", 2, limits.MAX_HEAD_DIM, head_dim) != head_dim:
        raise UnsupportedError("values of another size than keys are not supported", where=f"{file.path}: {arch}.attention.value_length")
    fields: dict[str, Any] = {
        "arch": family.model_type,
        "name": meta.text("general.name", file.path.stem)[:200],
        "layers": meta.integer(f"{arch}.block_count", 1, limits.MAX_LAYERS),
        "hidden": hidden,
        "intermediate": meta.integer(f"{arch}.feed_forward_length", 1, limits.MAX_WIDTH),
        "heads": heads,
        "kv_heads": meta.integer(f"{arch}.attention.head_count_kv", 1, limits.MAX_HEADS, heads),
        "head_dim": head_dim,
        "vocab": vocab,
        "context": meta.integer(f"{arch}.context_length", 1, limits.MAX_CONTEXT),
        "rope": _rope(file, arch, head_dim),
        "norm_eps": meta.number(f"{arch}.attention.layer_norm_{'' if family.encoder else 'rms_'}epsilon", 1e-13, 1.0),
        "qk_norm": family.qk_norm,
        "qkv_bias": "blk.0.attn_q.bias" in file.tensors,
        "o_bias": "blk.0.attn_output.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "tied_embeddings": "output.weight" not in file.tensors,
        "bos_ids": _token_ids(meta, vocab, "bos"),
        "eos_ids": _token_ids(meta, vocab, "eos", "eot", "eom"),
        "pad_id": next(iter(_token_ids(meta, vocab, "padding")), None),
        "add_bos": meta.flag("tokenizer.ggml.add_bos_token", adds_bos(meta)),
    }
    spec = ModelSpec(**(fields | family.gguf(meta)))
    limits.check_relations(spec, file.path)
    return spec


def _weights(file: GGUFFile, spec: ModelSpec, family: Family) -> dict[str, MappedTensor]:
    heads = {"attn_q": spec.heads, "attn_k": spec.kv_heads} if family.gguf_interleaved_qk else {}
    if heads and spec.rope.dim != spec.head_dim:
        raise UnsupportedError(
            "rope over a part of each head is not supported here", where=f"{file.path}: {family.in_gguf}.rope.dimension_count"
        )
    tensors = {}
    for entry in file.tensors.values():
        name = hf_name(entry.name, family.gguf_names)
        if name is None:
            if entry.name == _ROPE_FACTORS:
                continue
            raise UnsupportedError(
                f"{spec.arch} models with this tensor are not supported",
                where=f"{file.path}: tensor {entry.name[:80]!r}",
                remedy="use a plain checkpoint of this architecture",
            )
        stem = entry.name.split(".")[-2]
        if stem in heads and entry.shape[0] != heads[stem] * spec.head_dim:
            bad(file.path, f"tensor {entry.name!r}", f"{entry.shape[0]} rows, expected {heads[stem]} heads of {spec.head_dim}")
        tensors[name] = MappedTensor(name, entry.kind, entry.shape, file.map, entry.offset, heads.get(stem, 0))
    return tensors


def _chat_template(meta: Metadata) -> str:
    template = meta.text("tokenizer.chat_template", "")
    if len(template) > limits.MAX_TEMPLATE_BYTES:
        bad(meta.path, "tokenizer.chat_template", f"{len(template)} characters are more than {limits.MAX_TEMPLATE_BYTES}")
    return template


def _generation(spec: ModelSpec, meta: Metadata) -> dict[str, object]:
    found: dict[str, object] = {"eos_token_id": list(spec.eos_ids)}
    ranges = {"temp": ("temperature", 1e3), "top_p": ("top_p", 1.0), "min_p": ("min_p", 1.0)}
    for key, (name, high) in ranges.items():
        if f"general.sampling.{key}" in meta:
            found[name] = meta.number(f"general.sampling.{key}", 0.0, high)
    if "general.sampling.top_k" in meta:
        found["top_k"] = meta.integer("general.sampling.top_k", 0, limits.MAX_VOCAB)
    return found


def open_gguf(path: Path, *, progress: Progress) -> GraphBundle:
    """Read a GGUF model.

    Raises SourceError when the file is damaged, UnsupportedError when it holds what this compiler cannot do.
    """
    file = read_gguf(path)
    spec = spec_of(file)
    family = _family(file)
    weights = normalise(_weights(file, spec, family), spec, family, path)
    check_layers(spec, weights, path, f"{family.in_gguf}.block_count")
    tokenizer = build_tokenizer(file.metadata, spec.vocab)
    graphs, tensors = attach_weights(spec, weights, path=path, source_name=lambda name: gguf_name(name, family.gguf_names))
    return GraphBundle(
        spec=spec,
        graphs=graphs,
        tensors=tensors,
        tokenizer_json=tokenizer,
        chat_template=_chat_template(file.metadata),
        generation=_generation(spec, file.metadata),
        source=SourceInfo(
            kind="gguf",
            name=spec.name,
            licence=file.metadata.text("general.license", "")[:200],
            files=hash_files([path], path.parent, progress),
        ),
    )
