"""The jinja2 environment chat templates run in: no attribute tricks, bounded time, bounded output, bounded intermediate strings."""

from __future__ import annotations

import datetime as dt
import json
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from jinja2.runtime import Context

from calstack.errors import RequestError

__all__ = ["OUTPUT_LIMIT", "ChatEnvironment", "TemplateRaised"]

OUTPUT_LIMIT = 8 << 20  # characters of a rendered prompt, or of any string made on the way
_BIG = 1 << 20  # no number a template computes with needs to be larger as an argument
# Filters that make strings of a size of their choice, or draw random numbers.
_DENIED_FILTERS = ("center", "format", "wordwrap", "xmlattr", "urlize", "pprint", "filesizeformat", "random")


class TemplateRaised(RequestError):
    """The template called raise_exception, or its time or output ran out."""


class _Loud(jinja2.compiler.CodeGenerator):
    """Sends `a ~ b` through the environment, so that doubling a string in a loop is bounded too."""

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: jinja2.compiler.Frame) -> None:  # noqa: N802
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks training text; for a prompt it is transparent."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """One per rendering: it carries the deadline.

    Args:
        seconds: time after which the template is stopped at its next attribute, item, call or output.
        now: local time for strftime_now.
    """

    code_generator_class = _Loud
    intercepted_binops = frozenset(["*", "**", "+", "%"])

    def __init__(self, seconds: float, now: Callable[[], dt.datetime] | None = None) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag], cache_size=0)
        self._deadline = time.monotonic() + seconds
        self._now = now or (lambda: dt.datetime.now().astimezone())
        for name in _DENIED_FILTERS:
            self.filters.pop(name, None)
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = lambda form: self._now().strftime(form)

    def check_time(self) -> None:
        """Raise TemplateRaised when the time is over."""
        if time.monotonic() > self._deadline:
            raise TemplateRaised("the chat template takes too long", remedy="send fewer messages", param="messages")

    def joined(self, parts: tuple[Any, ...]) -> str:
        """What `~` gives."""
        self.check_time()
        text = "".join(map(str, parts))
        _check_size(text)
        return text

    def getattr(self, obj: Any, attribute: str) -> Any:
        self.check_time()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.check_time()
        return super().getitem(obj, argument)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.check_time()
        if any(isinstance(arg, int) and abs(arg) > _BIG for arg in (*args, *kwargs.values())):
            raise TemplateRaised("the chat template calls with too large a number", param="messages")
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            raise TemplateRaised("the chat template formats with %, which is not allowed", param="messages")
        if operator in {"*", "**"} and not _small(operator, left, right):
            raise TemplateRaised("the chat template makes too large a value", param="messages")
        value = super().call_binop(context, operator, left, right)
        _check_size(value)
        return value

    def bounded_output(self, pieces: Iterator[str]) -> str:
        """Join what a template yields.

        Raises:
            TemplateRaised: when it is too long or takes too long.
        """
        out, size = [], 0
        for piece in pieces:
            self.check_time()
            size += len(piece)
            if size > OUTPUT_LIMIT:
                raise TemplateRaised("the chat template gives too long a prompt", remedy="send less", param="messages")
            out.append(piece)
        return "".join(out)


def _small(operator: str, left: Any, right: Any) -> bool:
    numbers = [value for value in (left, right) if isinstance(value, (int, float))]
    if operator == "**":
        return len(numbers) == 2 and abs(left) <= 1024 and abs(right) <= 64
    sizes = [len(value) for value in (left, right) if hasattr(value, "__len__")]
    return all(size * max(1, abs(number)) <= OUTPUT_LIMIT for size in sizes for number in numbers)


def _check_size(value: Any) -> None:
    if hasattr(value, "__len__") and len(value) > OUTPUT_LIMIT:
        raise TemplateRaised("the chat template makes too large a value", param="messages")


def _raise(message: object) -> NoReturn:
    raise TemplateRaised(str(message), where="chat template", param="messages")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers writes it in templates: no HTML escapes, non-ASCII kept."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
