"""onnxruntime runs an encoder's graph: the oracle for embeddings and classifiers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from calstack.graph.evaluate import open_segment, third_of_memory
from calstack.graph.names import CUR_LEN, INPUT_IDS, POSITIONS, TYPE_IDS
from calstack.graph.segments import split_graph
from calstack.specs import Role

if TYPE_CHECKING:
    import numpy.typing as npt

    from calstack.graph.model import GraphBundle

    Rows = Sequence[Sequence[int]]

__all__ = ["run_encoder"]


def run_encoder(
    bundle: GraphBundle, rows: Rows, types: Rows | None = None, *, threads: int = 2, budget_bytes: int = 0
) -> dict[str, npt.NDArray[np.float32]]:
    """Outputs of the encode graph by name for a batch of texts.

    Args:
        bundle: the encoder; its graph and float weights are what runs, in f32.
        rows: token ids of each text, at least one each; shorter ones are padded, which must not matter.
        types: segments alike, 0 where none are given.
        threads: onnxruntime's threads.
        budget_bytes: most float weights held at once; 0 = a third of memory.

    Returns:
        `hidden` [texts, longest, hidden] (zero where padded), `embedding` [texts, hidden] and `scores` [texts, labels] where the
        graph has them.
    """
    model = bundle.graphs[Role.ENCODE]
    values: dict[str, Any] = _inputs(rows, types)
    for segment in split_graph(model, budget_bytes or third_of_memory()):
        session, weights = open_segment(segment, threads)
        feeds = {name: values[name] for name in segment.inputs}
        values |= dict(zip(segment.outputs, session.run(list(segment.outputs), feeds | weights), strict=True))
    found = {str(value.name): values[str(value.name)] for value in model.graph.outputs}
    used = values[POSITIONS] < values[CUR_LEN][:, None]
    return {name: value * used[..., None] if value.ndim == 3 else value for name, value in found.items()}


def _inputs(rows: Rows, types: Rows | None) -> dict[str, npt.NDArray[np.int64]]:
    if not rows or not all(rows):
        raise ValueError("texts of at least one token are needed")
    lengths = np.array([len(row) for row in rows], np.int64)
    width = int(lengths.max())
    positions = np.broadcast_to(np.arange(width, dtype=np.int64), (len(rows), width)).copy()
    return {
        INPUT_IDS: _padded(rows, width),
        POSITIONS: positions,
        TYPE_IDS: _padded(types if types is not None else [[0] * len(row) for row in rows], width),
        CUR_LEN: lengths,
    }


def _padded(rows: Rows, width: int) -> npt.NDArray[np.int64]:
    return np.array([[*row, *[0] * (width - len(row))] for row in rows], np.int64)
