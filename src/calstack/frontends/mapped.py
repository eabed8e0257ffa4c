"""Weights that lie in a mapped file."""

from __future__ import annotations

import dataclasses
import mmap
from typing import TYPE_CHECKING

import numpy as np

from calstack.graph.blocks import KINDS, dequantise

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["MappedTensor"]


@dataclasses.dataclass(frozen=True, slots=True)
class MappedTensor:
    """A StoredTensor over a byte range of a mapped file, checked by whoever made it.

    `interleaved_heads` = n: the rows of each of n heads are stored as rotated pairs side by side (0, d/2, 1, d/2 + 1, …)
    and come out in halves order; whole rows move, so block bytes stay as they are.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    map: mmap.mmap
    offset: int
    interleaved_heads: int = 0

    @property
    def nbytes(self) -> int:
        """Stored bytes."""
        rows = int(np.prod(self.shape[:-1], dtype=np.int64))
        return rows * KINDS[self.kind].row_bytes(self.shape[-1])

    def rows(self, name: str, start: int, count: int) -> MappedTensor:
        """`count` rows from `start` as a tensor of their own; rows must lie as they are stored."""
        if self.interleaved_heads or not 0 <= start <= start + count <= self.shape[0]:
            raise ValueError(f"{self.name}: no rows {start}..{start + count}")
        per_row = self.nbytes // self.shape[0]
        return dataclasses.replace(self, name=name, shape=(count, *self.shape[1:]), offset=self.offset + start * per_row)

    def stored(self) -> npt.NDArray[np.uint8]:
        """[rows, bytes per row], rows in HF order; a read-only view of the file unless rows move."""
        row_bytes = KINDS[self.kind].row_bytes(self.shape[-1])
        rows = np.frombuffer(self.map, np.uint8, self.nbytes, self.offset).reshape(-1, row_bytes)
        if not self.interleaved_heads:
            return rows
        if len(self.shape) == 1:  # a bias: its elements move as rows do
            return rows.reshape(self.shape[0], -1)[self._halves_order()].reshape(1, -1)
        return rows[self._halves_order()]

    def float32(self) -> npt.NDArray[np.float32]:
        """The dequantised value, a new array of `shape`."""
        return dequantise(self.kind, self.stored(), self.shape)

    def _halves_order(self) -> npt.NDArray[np.int64]:
        rows = np.arange(self.shape[0], dtype=np.int64)
        return rows.reshape(self.interleaved_heads, -1, 2).swapaxes(1, 2).reshape(-1)
