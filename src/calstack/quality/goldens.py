"""Golden cases: two short token sequences, what the reference says after them, and the digest of the bits every device must give.

A golden file holds, per case c: `c.input_ids` [n] i32, and for its last rows `c.rows` [r] i32, `c.top_ids` [r, 64] i32,
`c.top_logits` [r, 64] f32, `c.lse` [r] f64 (log Σ exp over all of the reference's logits). Values come from onnxruntime on the
exported graph; `bits` in the manifest is the sha256 of the logits (f32, rows of case 0, then of case 1) that the scalar
reference kernels give. Every submodel computes the same cases, so all of them share the bits.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from calstack.errors import ArtifactError
from calstack.quality.metrics import kl_of_top, log_sum_exp
from calstack.quality.tensors import load_tensors, save_tensors
from calstack.specs import KVDType, WeightFormat

if TYPE_CHECKING:
    import numpy.typing as npt

    from calstack.calbin.manifest import Manifest, Submodel
    from calstack.graph.evaluate import Oracle
    from calstack.quality.feed import Feeder

    Floats = npt.NDArray[np.float32]

__all__ = [
    "DEFAULT_KL",
    "Case",
    "case_ids",
    "digest",
    "is_float",
    "kl_errors",
    "make_cases",
    "read_cases",
    "relative_errors",
    "run_cases",
    "write_cases",
]

TOP = 64
LENGTHS = (9, 21)  # tokens: a tail of every tile width
ROWS = 8  # last rows of a case that are compared
DEFAULT_KL = 0.25  # bound where no quality was measured: catches a broken program, not a coarse format


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One golden sequence and the reference's answer after its `rows`."""

    input_ids: npt.NDArray[np.int32]
    rows: npt.NDArray[np.int32]
    top_ids: npt.NDArray[np.int32]
    top_logits: npt.NDArray[np.float32]
    lse: npt.NDArray[np.float64]


def case_ids(ids: Sequence[int]) -> list[list[int]]:
    """The two sequences, cut from consecutive ids of a text."""
    starts = np.cumsum((0, *LENGTHS))
    return [list(ids[start : start + length]) for start, length in zip(starts, LENGTHS, strict=False)]


def make_cases(oracle: Oracle, sequences: Sequence[Sequence[int]]) -> list[Case]:
    """Ask the reference."""
    return [_case(oracle.logits(ids), ids) for ids in sequences]


def _case(logits: Floats, ids: Sequence[int]) -> Case:
    rows = np.arange(max(len(ids) - ROWS, 0), len(ids))
    kept = logits[rows]
    top = np.argsort(-kept, axis=1, kind="stable")[:, :TOP]
    values = np.take_along_axis(kept, top, axis=1)
    return Case(np.asarray(ids, np.int32), rows.astype(np.int32), top.astype(np.int32), values, log_sum_exp(kept))


def write_cases(cases: Sequence[Case]) -> bytes:
    """A golden file."""
    return save_tensors({f"{index}.{f.name}": getattr(case, f.name) for index, case in enumerate(cases) for f in dataclasses.fields(Case)})


def read_cases(data: bytes, name: str, vocab: int) -> list[Case]:
    """Cases of a golden file.

    Raises:
        ArtifactError: when it is damaged.
    """
    tensors = load_tensors(data, name)
    count = len({key.partition(".")[0] for key in tensors})
    try:
        cases = [Case(**{f.name: tensors[f"{index}.{f.name}"] for f in dataclasses.fields(Case)}) for index in range(count)]
    except KeyError as error:
        raise ArtifactError(f"has no tensor {error}", where=name, remedy="compile the model again") from error
    if not cases or not all(_sound(case, vocab) for case in cases):
        raise ArtifactError("shapes or values of its cases are out of range", where=name, remedy="compile the model again")
    return cases


def _sound(case: Case, vocab: int) -> bool:
    n, r = len(case.input_ids), len(case.rows)
    kinds = [array.dtype.kind for array in (case.input_ids, case.rows, case.top_ids, case.top_logits, case.lse)]
    shapes = case.top_ids.shape == case.top_logits.shape == (r, min(TOP, vocab)) and case.lse.shape == (r,)
    if kinds != ["i", "i", "i", "f", "f"] or not shapes or not 0 < n <= 1024 or r < 1 or case.input_ids.ndim != 1 or case.rows.ndim != 1:
        return False
    ids = np.concatenate([case.input_ids, case.top_ids.reshape(-1)])
    consecutive = bool((np.diff(case.rows) == 1).all()) and case.rows[-1] == n - 1 and case.rows[0] >= 0
    return consecutive and ids.min() >= 0 and ids.max() < vocab


def run_cases(feeder: Feeder, submodel: Submodel, cases: Sequence[Case]) -> list[list[Floats]]:
    """Logits of every case's rows as this submodel computes them: per lane, all lanes filled, cases in turn. One list per case."""
    lanes: list[list[Floats]] = [[] for _ in cases]
    if submodel.batch == 1:
        groups = [[index] for index in range(len(cases))]
    else:
        whole = submodel.rows // max(LENGTHS) if submodel.q_len >= max(LENGTHS) else submodel.batch
        groups = [[lane % len(cases) for lane in range(min(submodel.batch, max(whole, len(cases))))]]
    for group in groups:
        first = min(int(cases[index].rows[0]) for index in group)
        for index, logits in zip(group, feeder.run(submodel, [cases[i].input_ids.tolist() for i in group], first=first), strict=True):
            lanes[index].append(logits[int(cases[index].rows[0]) - first :])
    return lanes


def digest(logits: Sequence[Floats]) -> str:
    """sha256 of logits of the cases in order, little-endian f32."""
    total = hashlib.sha256()
    for rows in logits:
        total.update(np.ascontiguousarray(rows, "<f4").tobytes())
    return total.hexdigest()


def is_float(manifest: Manifest) -> bool:
    """Whether nothing in the calbin is rounded below f32: then logits are compared, not distributions."""
    return manifest.kv.dtype is KVDType.F32 and all(q.format is WeightFormat.F32 for q in manifest.quant)


def relative_errors(case: Case, logits: Floats) -> float:
    """Largest |difference| on the reference's top ids, over the largest |reference|."""
    ours = np.take_along_axis(logits, case.top_ids.astype(np.int64), axis=1)
    return float(np.abs(ours - case.top_logits).max() / max(float(np.abs(case.top_logits).max()), 1e-30))


def kl_errors(case: Case, logits: Floats) -> float:
    """Mean KL over the case's rows."""
    return float(kl_of_top(logits, case.top_ids, case.top_logits, case.lse).mean())
