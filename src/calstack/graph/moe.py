"""A mixture-of-experts layer as one node: a model-local function whose standard body onnxruntime runs and the compiler matches.

    y = calbin::MoE(x, router, gate, up, down; top_k, renormalise)

x, y [batch, q_len, hidden]; router [experts, hidden]; gate, up [experts, intermediate, hidden]; down [experts, hidden, intermediate].
p = softmax over experts of x·routerᵀ; the `top_k` largest p weigh their experts' `(silu(x·gateᵀ) * (x·upᵀ))·downᵀ`, divided by their
sum where `renormalise` is 1. Of equal p the lower expert is taken. The body computes every expert for every token: it is the
definition, not a way to run fast.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import onnx_ir as ir

__all__ = ["DOMAIN", "NAME", "is_moe", "moe_function", "same_body"]

DOMAIN, NAME = "calbin", "MoE"
_OPSET = 24
_INPUTS = ("x", "router", "gate", "up", "down")


def is_moe(node: ir.Node) -> bool:
    """Whether the node is a call of the function."""
    return (node.domain, node.op_type) == (DOMAIN, NAME)


def moe_function() -> ir.Function:
    """The function, a new object."""
    body = _Body()
    x, router, gate, up, down = body.inputs
    k = body("Reshape", body.number("top_k"), body.ints([1]))
    renormalise = body("Cast", body.number("renormalise"), to=ir.DataType.BOOL)
    p = body("Softmax", body("MatMul", x, body("Transpose", router, perm=[1, 0])), axis=-1)
    best, index = body.many("TopK", 2, p, k, axis=-1, largest=1, sorted=1)
    total = body("Where", renormalise, body("ReduceSum", best, body.ints([-1]), keepdims=1), body.floats(1.0))
    zeros = body("Mul", p, body.floats(0.0))
    share = body("ScatterElements", zeros, index, body("Div", best, total), axis=-1)  # [batch, q_len, experts]
    rows = body("Unsqueeze", x, body.ints([1]))  # [batch, 1, q_len, hidden] against [experts, hidden, intermediate]
    g = body("MatMul", rows, body("Transpose", gate, perm=[0, 2, 1]))
    u = body("MatMul", rows, body("Transpose", up, perm=[0, 2, 1]))
    h = body("Mul", body("Mul", g, body("Sigmoid", g)), u)
    each = body("MatMul", h, body("Transpose", down, perm=[0, 2, 1]))  # [batch, experts, q_len, hidden]
    weighted = body("Mul", each, body("Unsqueeze", body("Transpose", share, perm=[0, 2, 1]), body.ints([-1])))
    return body.function(body("ReduceSum", weighted, body.ints([1]), keepdims=0))


def same_body(function: ir.Function) -> bool:
    """Whether a function read from a file is this one, node by node, whatever its values are called."""
    return list(_shape_of(function)) == list(_shape_of(moe_function()))


def _shape_of(function: ir.Function) -> Iterator[object]:
    """Nodes with operands by number: equal for equal bodies."""
    numbers: dict[int, int] = {id(value): index for index, value in enumerate(function.inputs)}
    yield len(numbers), sorted(function.attributes)
    for node in function:
        operands = [None if value is None else numbers.get(id(value), -1) for value in node.inputs]
        yield node.domain, node.op_type, operands, sorted(_plain(attribute) for attribute in node.attributes.values())
        for value in node.outputs:
            numbers[id(value)] = len(numbers)
    yield [numbers.get(id(value), -1) for value in function.outputs]


def _plain(attribute: ir.Attr) -> tuple[str, str, str]:
    value: Any = attribute.value
    if isinstance(value, ir.TensorProtocol):
        value = (value.dtype, value.numpy().tolist())
    elif isinstance(value, list | tuple):
        value = list(value)
    return attribute.name, str(attribute.ref_attr_name), str(value)


class _Body:
    """Nodes of the function under construction."""

    def __init__(self) -> None:
        self.inputs = [ir.Value(name=name) for name in _INPUTS]
        self._nodes: list[ir.Node] = []

    def many(self, op: str, outputs: int, *inputs: ir.Value, **attributes: Any) -> list[ir.Value]:
        node = ir.node(op, list(inputs), attributes, num_outputs=outputs, name=f"{op}_{len(self._nodes)}")
        return self._add(node)

    def __call__(self, op: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        return self.many(op, 1, *inputs, **attributes)[0]

    def _add(self, node: ir.Node) -> list[ir.Value]:
        for index, value in enumerate(node.outputs):
            value.name = f"v{len(self._nodes)}_{index}"
        self._nodes.append(node)
        return list(node.outputs)

    def number(self, attribute: str) -> ir.Value:
        """An integer attribute of the calling node as a scalar."""
        reference = ir.RefAttr("value_int", attribute, ir.AttributeType.INT)
        return self._add(ir.Node("", "Constant", [], [reference], name=f"Constant_{len(self._nodes)}"))[0]

    def ints(self, values: list[int]) -> ir.Value:
        return self("Constant", value_ints=values)

    def floats(self, value: float) -> ir.Value:
        return self("Constant", value_float=value)

    def function(self, output: ir.Value) -> ir.Function:
        graph = ir.Graph(self.inputs, [output], nodes=self._nodes, opset_imports={"": _OPSET}, name=NAME)
        parameters: Mapping[str, ir.Attr] = {name: ir.Attr(name, ir.AttributeType.INT, None) for name in ("top_k", "renormalise")}
        return ir.Function(DOMAIN, NAME, graph=graph, attributes=parameters)
