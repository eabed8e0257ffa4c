"""The command line: arguments → configuration → `calstack.api`. The only reader of the environment."""

from __future__ import annotations

import click

__all__ = ["main"]


@click.group()
def main() -> None:
    """Compile language models ahead of time and serve them."""
