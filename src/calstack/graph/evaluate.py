"""onnxruntime runs the graphs of decoders: the oracle that goldens and the quality card are measured against.

Weights are fed as inputs, one segment of the graph at a time: nothing is written to disk, no weight is held twice, and a model
whose floats exceed `budget_bytes` runs layer by layer.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import onnx_ir as ir

from calstack.graph.names import INPUT_IDS, LOGITS, PAST_LEN, POSITIONS, is_kv
from calstack.graph.segments import Segment, split_graph

if TYPE_CHECKING:
    import numpy.typing as npt
    import onnxruntime as ort

    from calstack.graph.model import GraphBundle

    Arrays = dict[str, npt.NDArray[Any]]

__all__ = ["Oracle", "Phase", "open_segment", "third_of_memory"]

Phase = Literal["prefill", "decode"]


@dataclasses.dataclass
class _Loaded:
    segment: Segment
    session: ort.InferenceSession
    weights: Arrays


def third_of_memory() -> int:
    """Bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 3


class Oracle:
    """Teacher-forced logits of a bundle's graph, by onnxruntime in f32.

    Args:
        bundle: the model; its graph and float weights are what runs.
        phase: which graph; the decode graph takes one token per call (`chunk=1`).
        threads: onnxruntime's threads.
        budget_bytes: most float weights held at once; 0 = a third of memory.
    """

    def __init__(self, bundle: GraphBundle, *, phase: Phase = "prefill", threads: int = 2, budget_bytes: int = 0) -> None:
        model = bundle.prefill if phase == "prefill" else bundle.decode
        self._graph = model.graph
        self._threads = threads
        self._segments = split_graph(model, budget_bytes or third_of_memory())
        self._kept: _Loaded | None = None  # the only segment of a model that fits

    def logits(self, ids: Sequence[int], *, chunk: int = 512) -> npt.NDArray[np.float32]:
        """Logits [n, vocab] after each of `ids`; `chunk` tokens per call, KV carried between calls."""
        rows: npt.NDArray[np.float32] = self.batch([ids], chunk=chunk)[0]
        return rows

    def batch(self, rows: Sequence[Sequence[int]], *, chunk: int = 512) -> npt.NDArray[np.float32]:
        """Logits [rows, n, vocab] of rows of equal length, each from an empty past."""
        ids = np.asarray(rows, np.int64)
        if ids.ndim != 2 or ids.size == 0:
            raise ValueError(f"rows of equal length above 0 are needed, got shape {ids.shape}")
        live = [self._inputs(ids, start, chunk) for start in range(0, ids.shape[1], chunk)]
        for segment in self._segments:
            self._run(segment, live, ids.shape[0])
        return np.concatenate([values[LOGITS] for values in live], axis=1)

    def windows(self, rows: Sequence[Sequence[int]], *, batch: int = 1) -> Iterator[npt.NDArray[np.float32]]:
        """Logits [n, vocab] of each row in turn, `batch` rows (of equal length) at a time."""
        for start in range(0, len(rows), batch):
            yield from self.batch(rows[start : start + batch])

    def _inputs(self, ids: npt.NDArray[np.int64], start: int, chunk: int) -> Arrays:
        part = ids[:, start : start + chunk]
        positions = np.broadcast_to(np.arange(start, start + part.shape[1], dtype=np.int64), part.shape)
        past = np.full(part.shape[0], start, np.int64)
        return {INPUT_IDS: np.ascontiguousarray(part), POSITIONS: np.ascontiguousarray(positions), PAST_LEN: past}

    def _run(self, segment: Segment, live: list[Arrays], batch: int) -> None:
        loaded = self._load(segment)
        kv: Arrays = {}
        for values in live:
            feeds = {name: values[name] if name in values else kv.get(name) for name in segment.inputs}
            feeds = {name: self._empty_past(name, batch) if value is None else value for name, value in feeds.items()}
            results = dict(zip(segment.outputs, loaded.session.run(list(segment.outputs), feeds | loaded.weights), strict=True))
            kv = {name.removesuffix(".out"): value for name, value in results.items() if is_kv(name)}
            for name in segment.last_use:
                values.pop(name, None)
            values.update((name, value) for name, value in results.items() if not is_kv(name))

    def _empty_past(self, name: str, batch: int) -> npt.NDArray[np.float32]:
        shape = next(value.shape for value in self._graph.inputs if value.name == name)
        assert shape is not None
        return np.zeros((batch, int(shape[1]), 0, int(shape[3])), np.float32)

    def _load(self, segment: Segment) -> _Loaded:
        if self._kept is not None and self._kept.segment is segment:
            return self._kept
        loaded = _Loaded(segment, *open_segment(segment, self._threads))
        if len(self._segments) == 1:
            self._kept = loaded
        return loaded


def open_segment(segment: Segment, threads: int) -> tuple[ort.InferenceSession, Arrays]:
    """A session for a segment and its weights, which are inputs."""
    return _session(segment, threads), {name: np.ascontiguousarray(tensor.numpy()) for name, tensor in segment.weights.items()}


def _session(segment: Segment, threads: int) -> ort.InferenceSession:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    model = ir.to_proto(segment.model)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
