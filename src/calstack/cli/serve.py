"""`calstack serve`: its options are the leaves of `server.config.ServeConfig`, so that none can be forgotten."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import types
import typing
from pathlib import Path
from typing import Any

import click

from calstack.cli.params import CALBIN, Bytes
from calstack.server.config import ServeConfig

__all__ = ["config_options", "serve"]

# leaf → option, where the leaf's own name would not say enough
NAMES = {"log.level": "log-level", "engine.command": "engine-command"}


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One value of the configuration tree; `path` as in `listen.port`."""

    path: str
    kind: Any
    default: Any
    text: str

    @property
    def parameter(self) -> str:
        """The option's Python name."""
        return NAMES.get(self.path, self.path.rsplit(".", 1)[-1]).replace("-", "_")


def leaves(tree: type, prefix: str = "") -> list[Leaf]:
    """Every value below a tree of dataclasses that has a default, in order of declaration."""
    hints, texts, found = typing.get_type_hints(tree), _field_texts(tree), list[Leaf]()
    for field in dataclasses.fields(tree):
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind):
            found += leaves(typing.cast("type", kind), f"{prefix}{field.name}.")
        elif field.default is not dataclasses.MISSING:
            found.append(Leaf(prefix + field.name, kind, field.default, texts.get(field.name, "")))
    return found


def config_options(command: click.Command) -> click.Command:
    """Add an option per leaf of ServeConfig."""
    for leaf in leaves(ServeConfig):
        option = f"--{leaf.parameter.replace('_', '-')}"
        shown = leaf.default not in ("", None, ())
        kind, multiple = _option_type(leaf)
        default = list(leaf.default) if multiple else leaf.default
        text = leaf.text.replace("\n", " ")
        command.params.append(
            click.Option([option, leaf.parameter], type=kind, default=default, multiple=multiple, show_default=shown, help=text)
        )
    return command


def build_config(tree: type, values: dict[str, Any], prefix: str = "") -> Any:
    """A configuration tree out of option values by parameter name."""
    arguments: dict[str, Any] = {}
    for field in dataclasses.fields(tree):
        kind = typing.get_type_hints(tree)[field.name]
        if dataclasses.is_dataclass(kind):
            arguments[field.name] = build_config(typing.cast("type", kind), values, f"{prefix}{field.name}.")
        else:
            leaf = Leaf(prefix + field.name, kind, None, "")
            value = values[leaf.parameter]
            arguments[field.name] = tuple(value) if isinstance(value, list) else value
    return tree(**arguments)


def _option_type(leaf: Leaf) -> tuple[Any, bool]:
    kind = leaf.kind
    if leaf.path.endswith(("_memory", "_bytes")):
        return Bytes(), False
    if typing.get_origin(kind) is typing.Literal:
        return click.Choice(typing.get_args(kind)), False
    if isinstance(kind, types.UnionType):
        kind = next(k for k in typing.get_args(kind) if k is not type(None))
    if typing.get_origin(kind) is tuple:
        return typing.get_args(kind)[0], True
    return (click.Path(path_type=Path) if kind is Path else kind), False


def _field_texts(tree: type) -> dict[str, str]:
    """The string that stands below each field in the source."""
    body = ast.parse(inspect.getsource(tree)).body[0]
    texts: dict[str, str] = {}
    name = ""
    for node in body.body if isinstance(body, ast.ClassDef) else ():
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and name:
            texts[name] = str(node.value.value)
    return texts


@config_options
@click.command(epilog="Example: calstack serve m.calbin --port 8080 --max-queued-requests 64")
@click.argument("calbin", type=CALBIN)
def serve(**values: Any) -> None:
    """Serve CALBIN over HTTP with OpenAI's routes, until SIGINT or SIGTERM."""
    config = build_config(ServeConfig, values)
    config.check()
    from calstack.server.main import serve as run_server

    run_server(config)
