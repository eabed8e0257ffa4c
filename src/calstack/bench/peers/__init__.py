"""Peers to measure against, each an optional extra."""

from __future__ import annotations

from pathlib import Path

from calstack.bench.subject import Subject
from calstack.errors import UsageError

__all__ = ["PEERS", "open_peer"]

PEERS = ("llama.cpp", "openvino")


def open_peer(name: str, model: Path, *, threads: int, context: int, lanes: int) -> Subject:
    """The peer `name` with the model file loaded.

    Raises:
        UsageError: for an unknown name or when its package is not installed.
    """
    try:
        if name == "llama.cpp":
            from calstack.bench.peers.llama_cpp import LlamaCpp

            return LlamaCpp(model, threads=threads, context=context, lanes=lanes)
        if name == "openvino":
            from calstack.bench.peers.openvino import OpenVino

            return OpenVino(model, threads=threads, context=context, lanes=lanes)
    except ImportError as error:
        raise UsageError(f"the peer {name} is not installed", where=str(error), remedy="pip install 'calstack[peers]'") from error
    raise UsageError(f"unknown peer {name}", remedy=f"one of {', '.join(PEERS)}")
