"""Float data of ONNX initializers: inside the model or in external files, every range checked before it is mapped."""

from __future__ import annotations

import mmap
from pathlib import Path

import onnx_ir as ir

from calstack.frontends.mapped import MappedTensor
from calstack.frontends.reading import bad, inside, map_file
from calstack.graph.walk import name_of

__all__ = ["FloatReader"]

_KINDS = {ir.DataType.FLOAT: "F32", ir.DataType.FLOAT16: "F16", ir.DataType.BFLOAT16: "BF16"}


class FloatReader:
    """Gives initializers as mapped tensors; files are mapped once and must lie inside `directory`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._maps: dict[Path, mmap.mmap] = {}

    def tensor(self, graph_file: Path, value: ir.Value) -> MappedTensor:
        """The data of one initializer; SourceError when its place or size is wrong."""
        name, data = name_of(value), value.const_value
        field = f"initializer {name[:120]!r}"
        if data is None or data.dtype not in _KINDS:
            bad(graph_file, field, "its data are not f32, f16 or bf16")
        shape = tuple(int(dim) for dim in data.shape)
        if not shape or 0 in shape:
            bad(graph_file, field, f"the shape {list(shape)} is not one of a weight")
        place, offset = self._external(graph_file, field, data) if isinstance(data, ir.ExternalTensor) else self._copy(data)
        tensor = MappedTensor(name, _KINDS[data.dtype], shape, place, offset)
        if offset + tensor.nbytes > len(place):
            bad(graph_file, field, f"its {tensor.nbytes} bytes at offset {offset} reach past the end of its data")
        return tensor

    def _external(self, graph_file: Path, field: str, data: ir.ExternalTensor) -> tuple[mmap.mmap, int]:
        path = inside(self._directory, str(data.location), owner=graph_file, field=field)
        if path not in self._maps:
            if not path.resolve().is_relative_to(self._directory.resolve()):
                bad(graph_file, field, f"the path {str(data.location)[:120]!r} leads outside its directory")
            self._maps[path] = map_file(path)
        offset = data.offset or 0
        if offset < 0:
            bad(graph_file, field, f"the offset {offset} is negative")
        if data.length is not None and data.length != data.nbytes:
            bad(graph_file, field, f"{data.length} bytes are promised, the shape needs {data.nbytes}")
        return self._maps[path], offset

    @staticmethod
    def _copy(data: ir.TensorProtocol) -> tuple[mmap.mmap, int]:
        raw = data.tobytes()
        place = mmap.mmap(-1, max(1, len(raw)))
        place.write(raw)
        return place, 0
