"""Frontends: model sources in, a GraphBundle out (docs/concepts/architecture.md, sections 2 and 4)."""

from __future__ import annotations

from calstack.frontends.source import open_source, peek_spec

__all__ = ["open_source", "peek_spec"]
