"""Requantise a GGUF file to pure Q4_0 through llama.cpp's own quantiser: the file its fastest kernels run.

Usage: python tools/make_q4_0.py SOURCE.gguf TARGET.gguf   (needs llama-cpp-python)
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import llama_cpp


def requantise(source: Path, target: Path) -> None:
    """Write `target` with every matrix in Q4_0 (embedding and head too), from whatever `source` holds."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0
    params.allow_requantize = True
    params.pure = True
    code = llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params))
    if code:
        raise SystemExit(f"llama.cpp could not requantise {source} (code {code})")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    requantise(Path(sys.argv[1]), Path(sys.argv[2]))
