"""A model of which there is only config.json: the graphs of its shapes, no weights, no tokenizer."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, NoReturn

from calstack.calbin.manifest import SourceInfo
from calstack.errors import UnsupportedError
from calstack.frontends.hf_config import spec_of
from calstack.frontends.metadata import Metadata
from calstack.frontends.reading import bad, hash_files, read_json
from calstack.graph.model import GraphBundle
from calstack.progress import Progress

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

    from calstack.specs import ModelSpec

__all__ = ["open_config", "read_config"]

_MAX_CONFIG_BYTES = 16 << 20
_MAX_PARAMETERS = 1 << 45
_KINDS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@dataclasses.dataclass(frozen=True, slots=True)
class ShapeOnly:
    """A StoredTensor whose values are nowhere."""

    name: str
    kind: str
    shape: tuple[int, ...]

    def stored(self) -> npt.NDArray[np.uint8]:
        """Never."""
        self._refuse()

    def float32(self) -> npt.NDArray[np.float32]:
        """Never."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise UnsupportedError("a config.json alone has no weights", where=f"tensor {self.name}", remedy="give the whole model directory")


def read_config(path: Path) -> tuple[Metadata, ModelSpec]:
    """A config.json, and the model that it describes. Raises as `open_config`."""
    config = Metadata(path, read_json(path, _MAX_CONFIG_BYTES))
    return config, spec_of(config, name=config.text("_name_or_path", "") or path.resolve().parent.name)


def open_config(path: Path, *, progress: Progress) -> GraphBundle:
    """The graphs that a config.json describes.

    Raises SourceError when it is damaged, UnsupportedError when this compiler cannot do it.
    """
    config, spec = read_config(path)
    stored = config.text("dtype" if "dtype" in config else "torch_dtype", "bfloat16")
    if stored not in _KINDS:
        bad(path, "torch_dtype", f"{stored[:32]!r} is none of {', '.join(_KINDS)}")
    from calstack.frontends.arch import build_graphs
    from calstack.frontends.assemble import attach

    graphs = build_graphs(spec)
    first = next(iter(graphs.values()))
    shapes = {n: tuple(v.shape.numpy()) for n, v in first.graph.initializers.items() if v.const_value is None and v.shape is not None}
    if (total := sum(math.prod(shape) for shape in shapes.values())) > _MAX_PARAMETERS:
        bad(path, "", f"describes {total} parameters")
    tensors = {name: ShapeOnly(name, _KINDS[stored], shape) for name, shape in shapes.items()}
    for model in graphs.values():
        for name, tensor in tensors.items():
            attach(model.graph.initializers[name], tensor)
    return GraphBundle(
        spec=spec,
        graphs=graphs,
        tensors=tensors,
        tokenizer_json=b"",
        chat_template="",
        generation={},
        source=SourceInfo(kind="config", name=spec.name, files=hash_files([path], path.parent, progress)),
    )
