"""Jinja for untrusted templates: sandboxed, and bounded in loops, calls, sizes and time.

A chat template comes with a model's files and is written in a whole language. Each of its steps is kept small here (no operator or filter
makes something large), and their number and time are counted, so it can neither run away nor fill memory.
"""

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_OUTPUT_CHARS = 4 << 20
_MAX_STEPS = 400_000  # loop turns and calls of one rendering
_MAX_SECONDS = 1.0  # of the thread's CPU: a busy machine is not the template's fault
_MAX_ITEMS = 100_000  # of a list that an operator makes
_MAX_BITS = 4_096  # of a whole number that an operator makes
_MAX_WIDTH = 1_000  # characters of padding

# fmt: off
_STRING_METHODS = frozenset((
    "capitalize", "count", "endswith", "find", "index", "isalnum", "isalpha", "isdigit", "islower", "isnumeric", "isspace",
    "istitle", "isupper", "join", "lower", "lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex",
    "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "swapcase", "title", "upper",
))
# fmt: on
# fmt: off
_FILTERS = frozenset((
    "abs", "attr", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "forceescape", "groupby",
    "int", "items", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "reverse", "round", "safe",
    "select", "selectattr", "sort", "string", "title", "trim", "truncate", "unique", "upper", "wordcount",
))
# fmt: on


class TemplateRefusal(jinja2.TemplateError):
    """The template's own raise_exception: about the conversation, in words for its author."""


class TemplateLimit(Exception):
    """A rendering did too much."""


@dataclass
class _Budget:
    """What one rendering may still do."""

    deadline: float
    steps: int = _MAX_STEPS

    def spend(self) -> None:
        self.steps -= 1
        if self.steps < 0:
            raise TemplateLimit(f"takes more than {_MAX_STEPS} steps")
        if time.thread_time() > self.deadline:
            raise TemplateLimit(f"takes more than {_MAX_SECONDS:g} s")


_budget: ContextVar[_Budget] = ContextVar("template_budget")


@contextmanager
def bounded() -> Iterator[None]:
    """What is rendered inside shares one budget of steps and seconds."""
    token = _budget.set(_Budget(time.thread_time() + _MAX_SECONDS))
    try:
        yield
    finally:
        _budget.reset(token)


class _CountingGenerator(CodeGenerator):
    """Sends `~` through the environment, as other operators are."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat((")
        for part in node.nodes:
            self.write("environment.text(")
            self.visit(part, frame)
            self.write("), ")
        self.write("))")


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja as chat templates expect it (trimmed blocks, loop controls), with every loop, call, operator and filter bounded."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))
    code_generator_class = _CountingGenerator

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # constant folding would run operators while the template is read
            finalize=self.text,
            extensions=[_GenerationTag, LoopControlExtension],
        )
        self.concat = _joined  # type: ignore[method-assign]  # of output, blocks and macros
        own = {"tojson": _to_json, "join": _join, "replace": _replace, "indent": _indent, "sum": _sum, "string": self.text}
        self.filters = {name: self.filters[name] for name in _FILTERS} | own
        self.globals = {
            "range": _range,
            "dict": dict,
            "namespace": self.globals["namespace"],
            "joiner": self.globals["joiner"],
            "cycler": self.globals["cycler"],
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Puts every loop's items through `counted`."""
        template = super()._parse(source, name, filename)
        for loop in template.find_all(nodes.For):
            counted = nodes.EnvironmentAttribute("counted", lineno=loop.lineno)
            loop.iter = nodes.Call(counted, [loop.iter], [], None, None, lineno=loop.lineno)
        return template

    @staticmethod
    def counted(items: Iterable[Any]) -> Iterable[Any]:
        """The items of a loop, each a step. Sized ones stay sized: loops ask for their length."""
        return _Counted(items) if hasattr(items, "__len__") else _count(items)

    @staticmethod
    def text(value: object) -> object:
        """A value as output shows it; containers within bounds, since parts may be shared many times over."""
        if isinstance(value, str) or value is None or isinstance(value, bool | int | float | jinja2.Undefined):
            return value
        return _repr(value)

    def call(self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # jinja's own names
        """A call is a step; of what is callable, methods of strings are those that make nothing large."""
        _budget.get().spend()
        if __obj in (str.replace, str.join):
            raise SecurityError(f"{__obj} isn't offered")
        owner, method = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str) and method == "replace":
            return _replace(owner, *args, **kwargs)
        if isinstance(owner, str) and method == "join":
            return _join(args[0] if args else (), owner)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> None:
        """str.format pads to any width: it is no method of a template's strings."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """As the sandbox has it, and of strings only the methods that templates need."""
        if isinstance(obj, str) and attr not in _STRING_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An operator whose result stays small."""
        _budget.get().spend()
        _check_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)


def _check_operator(operator: str, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        bits = {"**": left.bit_length() * max(right, 0), "*": left.bit_length() + right.bit_length()}
        if bits.get(operator, 0) > _MAX_BITS:
            raise TemplateLimit("makes too large a number")
    elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
        _check_size(left, len(left) + len(right))
    elif operator == "*" and (hasattr(left, "__len__") or hasattr(right, "__len__")):
        items, times = (left, right) if hasattr(left, "__len__") else (right, left)
        _check_size(items, len(items) * max(int(times), 0))
    elif operator == "%" and isinstance(left, str) and (len(left) > _MAX_WIDTH or any(char.isdigit() or char == "*" for char in left)):
        raise TemplateLimit("formats with widths")


def _check_size(value: object, size: int) -> None:
    if size > (MAX_OUTPUT_CHARS if isinstance(value, str) else _MAX_ITEMS):
        raise TemplateLimit(f"makes something of {size} parts")


class _Counted(Sequence[Any]):
    def __init__(self, items: Any) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: Any) -> Any:
        return self._items[index]

    def __iter__(self) -> Iterator[Any]:
        return _count(self._items)


def _count(items: Iterable[Any]) -> Iterator[Any]:
    budget = _budget.get()
    for item in items:
        budget.spend()
        yield item


def _joined(parts: Iterable[Any]) -> str:
    """All of them as one string, within the output's bounds."""
    pieces: list[str] = []
    size = 0
    for part in parts:
        piece = str(part)
        size += len(piece)
        if size > MAX_OUTPUT_CHARS:
            raise TemplateLimit(f"renders to more than {MAX_OUTPUT_CHARS} characters")
        pieces.append(piece)
    return "".join(pieces)


def _repr(value: object) -> str:
    """str() of a container, counting as it goes."""
    budget = _budget.get()

    def pieces(item: object) -> Iterator[str]:
        budget.spend()
        if isinstance(item, Mapping):
            yield "{"
            for index, (key, entry) in enumerate(item.items()):
                yield f"{', ' if index else ''}{key!r}: "
                yield from pieces(entry)
            yield "}"
        elif isinstance(item, list | tuple):
            yield "[" if isinstance(item, list) else "("
            for index, entry in enumerate(item):
                yield ", " if index else ""
                yield from pieces(entry)
            yield "]" if isinstance(item, list) else ",)" if len(item) == 1 else ")"
        else:
            yield repr(item)

    return _joined(pieces(value)) if isinstance(value, Mapping | list | tuple) else str(value)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    """As transformers has it: plain JSON, without HTML escapes."""
    if isinstance(indent, int) and indent > 16:
        raise TemplateLimit("indents by more than 16")
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return _joined(_count(encoder.iterencode(value)))


def _join(value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    def parts() -> Iterator[Any]:
        for index, item in enumerate(_count(value)):
            if index:
                yield d
            if isinstance(attribute, str):
                item = item.get(attribute, "") if isinstance(item, Mapping) else ""
            elif attribute is not None:
                item = item[attribute]
            yield _Environment.text(item)

    return _joined(parts())


def _replace(value: object, old: str, new: str, count: int | None = -1) -> str:
    text, times = str(value), -1 if count is None else count
    found = text.count(old) if times < 0 else min(times, text.count(old))
    _check_size(text, len(text) + found * len(new))
    return text.replace(old, new, times)


def _indent(value: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    margin = width if isinstance(width, str) else " " * min(max(width, 0), _MAX_WIDTH)
    if len(margin) > _MAX_WIDTH:
        raise TemplateLimit(f"indents by more than {_MAX_WIDTH}")
    lines = str(value).split("\n")
    _check_size("", len(value) + len(lines) * len(margin))
    return "\n".join(margin + line if (first if number == 0 else blank or line) else line for number, line in enumerate(lines))


def _sum(iterable: Iterable[Any], attribute: str | None = None, start: float = 0) -> float:
    """Of numbers only: lists would add up to anything."""
    numbers = [item.get(attribute, 0) if attribute else item for item in _count(iterable)]
    return sum(numbers, start) if all(isinstance(number, int | float) for number in (start, *numbers)) else 0


def _range(*bounds: int) -> range:
    numbers = range(*bounds)
    if len(numbers) > _MAX_ITEMS:
        raise TemplateLimit(f"counts to more than {_MAX_ITEMS}")
    return numbers


def _raise_exception(message: object = "") -> NoReturn:
    raise TemplateRefusal(str(message)[:1000])


def _strftime_now(form: str) -> str:
    _check_size("", len(form) * 64)
    return datetime.now().astimezone().strftime(form)


class _GenerationTag(Extension):
    """{% generation %}: marks what training looks at; here only its content counts."""

    tags = {"generation"}  # noqa: RUF012  # as jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


ENVIRONMENT = _Environment()
