"""The command line: arguments → configuration → `calstack.api`. The only reader of the environment."""

from __future__ import annotations

from calstack.cli.app import main

__all__ = ["main"]
