"""A tree of frozen dataclasses as settings: its leaves are options, variables, keys of a TOML file, and rows of the reference page.

Precedence: option > variable > file > default. The file and the variables are held to the tree: what it does not know is refused.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import tomllib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from calstack.cli.params import Bytes
from calstack.errors import UsageError

__all__ = ["Leaf", "build_config", "check_variables", "leaves", "option_of", "read_file", "reference_page"]

_FILE_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One value of the tree; `path` as in `listen.port`. The option's name is the last part, or (`long`) the whole path."""

    path: str
    kind: Any
    default: Any
    text: str
    long: bool = False

    @property
    def parameter(self) -> str:
        """The option's Python name."""
        return (self.path.replace(".", "_") if self.long else self.path.rsplit(".", 1)[-1]).replace("-", "_")

    @property
    def option(self) -> str:
        """The option on the command line."""
        return f"--{self.parameter.replace('_', '-')}"

    @property
    def is_size(self) -> bool:
        """Whether the value is a number of bytes, which may be written as 512M."""
        return self.path.endswith(("_memory", "_bytes"))

    @property
    def plain(self) -> Any:
        """The kind without None."""
        if isinstance(self.kind, types.UnionType):
            return next(k for k in typing.get_args(self.kind) if k is not type(None))
        return self.kind


def leaves(tree: type, prefix: str = "") -> list[Leaf]:
    """Every value below a tree of dataclasses that has a default, in order of declaration.

    A class may name fields in `with_section`: their options are called after the whole path.
    """
    hints, texts, found = typing.get_type_hints(tree), _field_texts(tree), list[Leaf]()
    for field in dataclasses.fields(tree):
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind):
            found += leaves(typing.cast("type", kind), f"{prefix}{field.name}.")
        elif field.default is not dataclasses.MISSING:
            found.append(
                Leaf(prefix + field.name, kind, field.default, texts.get(field.name, "").replace("\n", " "), _is_long(tree, field))
            )
    return found


def build_config(tree: type, values: Mapping[str, Any], prefix: str = "") -> Any:
    """A configuration tree out of option values by parameter name."""
    arguments: dict[str, Any] = {}
    for field in dataclasses.fields(tree):
        kind = typing.get_type_hints(tree)[field.name]
        if dataclasses.is_dataclass(kind):
            arguments[field.name] = build_config(typing.cast("type", kind), values, f"{prefix}{field.name}.")
        else:
            value = values[Leaf(prefix + field.name, kind, None, "", _is_long(tree, field)).parameter]
            arguments[field.name] = tuple(value) if isinstance(value, list) else value
    return tree(**arguments)


def option_of(leaf: Leaf) -> click.Option:
    """The option of a leaf."""
    kind, multiple = _option_type(leaf)
    shown = leaf.default not in ("", None, ())
    default = list(leaf.default) if multiple else leaf.default
    name = f"{leaf.option}/--no-{leaf.option[2:]}" if leaf.kind is bool else leaf.option
    return click.Option([name, leaf.parameter], type=kind, default=default, multiple=multiple, show_default=shown, help=leaf.text)


def read_file(path: Path, tree: type, *, also: Iterable[str] = ()) -> dict[str, Any]:
    """Values of a TOML file by parameter name. `also`: keys at the top that are no leaves.

    Raises:
        UsageError: when the file cannot be read, or a key is unknown or of a wrong type.
    """
    try:
        with path.open("rb") as file:
            text = file.read(_FILE_BYTES + 1).decode()
        if len(text) > _FILE_BYTES:
            raise UsageError(f"is larger than {_FILE_BYTES} bytes", where=str(path), remedy="give a TOML file of settings")
        table = tomllib.loads(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"cannot be read: {error}", where=str(path), remedy="give a TOML file of settings") from error
    known = {leaf.path: leaf for leaf in leaves(tree)} | {name: Leaf(name, Path, None, "") for name in also}
    sections = {path.rsplit(".", 1)[0] for path in known if "." in path}
    return {known[key].parameter: _checked(known[key], value, path) for key, value in _flat(table, known, sections, path)}


def check_variables(names: Iterable[str], prefix: str, parameters: Iterable[str]) -> None:
    """Refuse variables that begin with `prefix` and name none of `parameters`. Raises UsageError with the nearest name."""
    known = [prefix + name.upper() for name in parameters]
    for name in sorted(names):
        if name.startswith(prefix) and name not in known:
            raise UsageError("is not a setting", where=name, remedy=_nearest(name, known))


def reference_page(tree: type, prefix: str, title: str, intro: str) -> str:
    """The tree as a page: a table per section with key, option, default and meaning. `prefix`: of the variables' names."""
    parts, section = [f"# {title}", intro], None
    rows: list[str] = []
    for leaf in leaves(tree):
        name = leaf.path.rpartition(".")[0]
        if name != section:
            parts += ["\n".join(rows)] if rows else []
            rows = [f"## {f'[{name}]' if name else 'At the top'}", "", "| key | option | variable | default | |", "|---|---|---|---|---|"]
            section = name
        key, variable = leaf.path.rpartition(".")[2], prefix + leaf.parameter.upper()
        rows.append(f"| `{key}` | `{leaf.option}` | `{variable}` | {_shown(leaf)} | {_escaped(leaf.text)} |")
    return "\n\n".join([*parts, "\n".join(rows)]) + "\n"


def _is_long(tree: type, field: dataclasses.Field[Any]) -> bool:
    return field.name in getattr(tree, "with_section", ())


def _flat(
    table: Mapping[str, Any], known: Mapping[str, Leaf], sections: set[str], file: Path, prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        key = prefix + name
        if key in known:
            yield key, value
        elif key in sections and isinstance(value, dict):
            yield from _flat(value, known, sections, file, f"{key}.")
        elif key in sections:
            raise UsageError("is a section, not a value", where=f"{file}: {key}", remedy=f"write [{key}] and its keys below")
        else:
            raise UsageError("is not a setting", where=f"{file}: {key}", remedy=_nearest(key, [*known, *sections]))


def _checked(leaf: Leaf, value: Any, file: Path) -> Any:
    """`value` when TOML gave it in the type that the leaf has; texts of sizes and choices are converted as on the command line."""
    kind, plain = typing.get_origin(leaf.plain) or leaf.plain, leaf.plain
    good = {
        bool: isinstance(value, bool),
        int: (isinstance(value, int) and not isinstance(value, bool)) or (leaf.is_size and isinstance(value, str)),
        float: isinstance(value, (int, float)) and not isinstance(value, bool),
        tuple: isinstance(value, list) and all(isinstance(part, str) for part in value),
        typing.Literal: value in typing.get_args(plain),
    }.get(kind, isinstance(value, str))
    if not good:
        raise UsageError(f"must be {_kind_text(leaf)}", where=f"{file}: {leaf.path}", remedy="see docs/reference/configuration.md")
    return value


def _kind_text(leaf: Leaf) -> str:
    plain = leaf.plain
    if typing.get_origin(plain) is typing.Literal:
        return f"one of {', '.join(typing.get_args(plain))}"
    if typing.get_origin(plain) is tuple:
        return "a list of texts"
    if leaf.is_size:
        return 'a number of bytes or a text such as "512M"'
    return {bool: "true or false", int: "a whole number", float: "a number"}.get(plain, "a text")


def _nearest(name: str, known: Sequence[str]) -> str:
    tails, last = {full.rsplit(".", 1)[-1]: full for full in reversed(known)}, name.rsplit(".", 1)[-1]
    close = [tails[last]] if last in tails else difflib.get_close_matches(name, known, 1, 0.6)
    close = close or [tails[tail] for tail in difflib.get_close_matches(last, tails, 1, 0.6)]
    return f"did you mean {close[0]}?" if close else "see docs/reference/configuration.md"


def _option_type(leaf: Leaf) -> tuple[Any, bool]:
    kind = leaf.plain
    if leaf.is_size:
        return Bytes(), False
    if typing.get_origin(kind) is typing.Literal:
        return click.Choice(typing.get_args(kind)), False
    if typing.get_origin(kind) is tuple:
        return typing.get_args(kind)[0], True
    return (click.Path(path_type=Path) if kind is Path else kind), False


def _shown(leaf: Leaf) -> str:
    if leaf.default in ("", None, ()):
        return ""
    return f"`{str(leaf.default).lower() if leaf.kind is bool else leaf.default}`"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


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
