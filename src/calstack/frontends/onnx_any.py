"""Any ONNX file, for the inventory: its graph and shapes, no weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from calstack.errors import SourceError

if TYPE_CHECKING:
    from pathlib import Path

    import onnx_ir as ir

__all__ = ["read_onnx"]

_LIMIT = 2 << 30  # of a protobuf


def read_onnx(path: Path) -> ir.Model:
    """The model of an ONNX file.

    Raises:
        SourceError: when it is missing, too large, or no ONNX file.
    """
    import onnx_ir as ir

    try:
        if path.stat().st_size > _LIMIT:
            raise SourceError("is larger than a protobuf can be", where=str(path), remedy="store the weights beside the graph")
        return ir.load(path)
    except OSError as error:
        raise SourceError(f"cannot be read: {error.strerror}", where=str(path), remedy="check the path") from error
    except Exception as error:  # protobuf and onnx-ir raise many kinds
        if isinstance(error, SourceError):
            raise
        raise SourceError(
            f"is no ONNX file: {str(error).splitlines()[0][:120]}", where=str(path), remedy="export the model again"
        ) from error
