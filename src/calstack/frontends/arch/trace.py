"""From a ModelSpec to the prefill and decode graphs: inputs, outputs and their names are the same for every architecture."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir
from onnxscript import GraphBuilder

from calstack.frontends.arch.decoder import CausalLM, Past
from calstack.frontends.arch.encoder import Encoder
from calstack.graph.names import CUR_LEN, EMBEDDING, HIDDEN, INPUT_IDS, LOGITS, PAST_LEN, POSITIONS, SCORES, TYPE_IDS, kv_in, kv_out

if TYPE_CHECKING:
    from calstack.specs import EncoderSpec, ModelSpec

__all__ = ["IR_VERSION", "OPSET", "trace", "trace_encoder"]

OPSET, IR_VERSION = 24, 11  # the newest opset for which onnxruntime has native kernels for every operator used


def trace(spec: ModelSpec, *, name: str, q_len: int | str) -> ir.Model:
    """The graph of a decoder, weights without data. `q_len` is a number for a fixed length, or the name of a free one."""
    builder = GraphBuilder(ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name=name))
    ids = builder.input(INPUT_IDS, ir.DataType.INT64, ["batch", q_len])
    positions = builder.input(POSITIONS, ir.DataType.INT64, ["batch", q_len])
    builder.input(PAST_LEN, ir.DataType.INT64, ["batch"])
    past = [_past(builder, spec, layer) for layer in range(spec.layers)]
    logits, present = CausalLM(spec)(builder.op, ids, positions, past)
    builder.add_output(logits, LOGITS)
    for layer, grown in enumerate(present):
        _add_present(builder, spec, layer, grown)
    functions = list(builder.functions.values())
    builder.graph.opset_imports.update({function.domain: 1 for function in functions})
    return ir.Model(builder.graph, ir_version=IR_VERSION, producer_name="calstack", functions=functions)


def trace_encoder(spec: ModelSpec, encoder: EncoderSpec) -> ir.Model:
    """The graph of an encoder, weights without data."""
    builder = GraphBuilder(ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name="encode"))
    ids, positions, types = (builder.input(name, ir.DataType.INT64, ["batch", "q_len"]) for name in (INPUT_IDS, POSITIONS, TYPE_IDS))
    lengths = builder.input(CUR_LEN, ir.DataType.INT64, ["batch"])
    outputs = Encoder(spec, encoder)(builder.op, ids, positions, types, lengths)
    shapes = (["batch", "q_len", spec.hidden], ["batch", spec.hidden], ["batch", len(encoder.labels)])
    for name, value, shape in zip((HIDDEN, EMBEDDING, SCORES), outputs, shapes, strict=True):
        if value is not None:
            value.type, value.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(shape)
            builder.add_output(value, name)
    return ir.Model(builder.graph, ir_version=IR_VERSION, producer_name="calstack")


def _past(builder: GraphBuilder, spec: ModelSpec, layer: int) -> Past:
    shape = ["batch", spec.kv_heads, "past", spec.head_dim]
    return Past(*(builder.input(kv_in(layer, which), ir.DataType.FLOAT, shape) for which in "kv"))


def _add_present(builder: GraphBuilder, spec: ModelSpec, layer: int, grown: Past) -> None:
    for which, value in zip("kv", (grown.k, grown.v), strict=True):
        value.shape = ir.Shape(["batch", spec.kv_heads, "total", spec.head_dim])
        builder.add_output(value, kv_out(layer, which))
