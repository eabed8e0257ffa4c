"""`mistral`: as llama, with a window that attention of every layer may be limited to. GGUF files call it llama."""

from __future__ import annotations

from calstack.frontends.arch.family import Family

__all__ = ["FAMILY"]

FAMILY = Family(model_type="mistral", gguf_arch="llama", gguf_interleaved_qk=True, sliding=True)
