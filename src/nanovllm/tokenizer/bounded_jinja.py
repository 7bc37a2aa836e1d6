"""Jinja's immutable sandbox with bounds on time and memory, for templates that nobody has read.

Every operation whose result may be larger than its operands is counted before it runs: in bytes, against one budget of a render. So the
budget bounds all strings and lists that a template makes, and the time of a single operation. Loops, calls, filters and comparisons of
lists check a deadline.
"""

import json
import operator
import re
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from datetime import datetime
from functools import partial, reduce, wraps
from itertools import chain
from time import monotonic, thread_time
from types import BuiltinMethodType, MethodType
from typing import Any

from jinja2 import TemplateError, Undefined, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace
from markupsafe import Markup

MAX_BYTES = 32 << 20  # that a render may make, at 4 bytes a character and 64 an element; large variables add to it
MAX_SECONDS = 0.25  # after as much time on the wall, of the thread's own time
MAX_BITS = 1 << 16  # of an integer
SCALARS = frozenset({str, int, float, bool, type(None), Undefined})
CHANGED = frozenset({"upper", "lower", "title", "capitalize", "casefold", "swapcase"})  # a character may become three
PIECES = frozenset({"strip", "lstrip", "rstrip", "removeprefix", "removesuffix", "partition", "rpartition"})
OF_DICT = frozenset(dir(dict))
ASKED = frozenset({"count", "find", "rfind", "index", "rindex", "startswith", "endswith"})
ASKED |= {
    f"is{what}" for what in ("alnum", "alpha", "ascii", "decimal", "digit", "lower", "numeric", "printable", "space", "title", "upper")
}
OF_OTHERS = frozenset({"get", "items", "keys", "values", "copy", "index", "count", "is_integer", "bit_length"})
BREAKS = "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
DIRECTIVE = re.compile(r"%(?:\([^)]*\))?[#0\- +]*(\*|\d*)(?:\.(\*|\d*))?")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The settings, filters and functions that transformers gives to chat templates, with bounds. Not for two renders at a time."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self) -> None:
        self.code_generator_class = _Generator
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.concat = self._concat  # pyright: ignore[reportAttributeAccessIssue]
        self._bound_filters()
        self._bound_tests()
        self.begin({})

    def _generate(self, *args: Any, **kwargs: Any) -> str:
        first, rest = super()._generate(*args, **kwargs).split("\n", 1)
        return f"{first}; from time import monotonic; str = environment.text\n{rest}"  # outputs are calls of `str`

    # The budget

    def begin(self, variables: Mapping[str, Any]) -> None:
        """Start the budget and the clock of a render, or of a compilation."""
        self.left, self.variables = MAX_BYTES, variables
        self.deadline, self.started = monotonic() + MAX_SECONDS, None

    def charge(self, size: int) -> None:
        """Count `size` bytes that are about to be made."""
        self.left -= size
        if self.left < 0:
            self._refuse()

    def require(self, size: int) -> None:
        """Raise unless `size` bytes are left."""
        self.charge(size)
        self.left += size

    def _refuse(self) -> None:
        if self.variables:  # long conversations are not the template's fault
            self.left += 64 * _num_characters(self.variables)
            self.variables = {}
        if self.left < 0:
            raise SecurityError(f"its strings and lists exceed {MAX_BYTES} bytes")

    def tick(self, size: int = 0) -> None:
        """Count `size` bytes, and check the deadline."""
        self.left -= size
        if self.left < 0:
            self._refuse()
        if monotonic() > self.deadline:
            # Another thread may have had the processor, so the thread's own time decides from here on.
            now = thread_time()
            if self.started is None:
                self.started = now
            elif now - self.started > MAX_SECONDS:
                raise SecurityError(f"it exceeds {MAX_SECONDS} seconds")
            self.deadline = monotonic() + MAX_SECONDS / 8

    def extent(self, value: Any, *, per_node: int = 0, per_level: int = 0) -> int:
        """An upper bound of the bytes of `value` as text. Raises if the budget is smaller, so a shared list may occur often in it."""
        total, stack = 0, [iter((value,))]
        while stack:
            for item in stack[-1]:
                kind = type(item)
                total += 64 + per_node + per_level * len(stack)
                if kind is str:
                    total += (24 if item.isascii() else 48) * len(item)
                elif kind not in SCALARS or kind is int:
                    inner = _elements(item)
                    if inner is not None:
                        total += 128
                        stack.append(inner)
                        break
                    total += 2 * item.bit_length() if isinstance(item, int) else 24 * len(item) if isinstance(item, str | bytes) else 64
                if total > self.left:
                    self.require(total)
            else:
                stack.pop()
            if total > self.left:
                self.require(total)
        self.tick()
        return total

    # What generated code calls

    def text(self, value: Any) -> str:
        """`str(value)`."""
        kind = type(value)
        if kind is str:
            return value
        if kind not in SCALARS:
            self.charge(self.extent(value))
        return str(value)

    def add(self, *parts: Any) -> Any:
        """The sum of at least two values, from left to right."""
        try:
            self.left -= 64 + 4 * sum(map(len, parts))
            if self.left < 0:
                self._refuse()
            return "".join(parts)
        except TypeError:  # not all are strings
            return self.fold(*parts)

    def fold(self, *parts: Any) -> Any:
        """As `add`, for values of any type."""
        return reduce(partial(self.call_binop, None, "+"), parts)

    def joined(self, *parts: Any) -> str:
        """The texts of some values in a row: the operator `~`."""
        return self._concat([self.text(part) for part in parts])

    def _concat(self, pieces: Sequence[str]) -> str:
        self.charge(64 + 4 * sum(map(len, pieces)))
        return "".join(pieces)

    def cut(self, value: Any, where: slice) -> Any:
        """`value[where]`."""
        self.tick(_size(value))
        return value[where]

    def plain(self, value: Any) -> Any:
        """`value`, after a check that comparing or hashing it takes little time."""
        kind = type(value)
        if kind not in SCALARS:
            self.extent(value)
        elif kind is str and len(value) > 1 << 16:
            self.tick()
        return value

    def holder(self, value: Any) -> Any:
        """`value`, after a check that looking for something in it takes little time."""
        return value if type(value) is dict else self.plain(value)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """The result of an arithmetic operator."""
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > MAX_BITS:
                many = f"an integer of {left.bit_length()} bits {operator} one of {right.bit_length()} bits"
                raise SecurityError(f"{many} is too large: more than {MAX_BITS} bits")
        elif operator == "%" and isinstance(left, str):
            self.charge(self._percent(left, right))
        elif operator == "*":
            for times, repeated in ((left, right), (right, left)):
                if isinstance(times, int) and isinstance(repeated, str | bytes | list | tuple) and times > 0:
                    self.charge(64 + times * _size(repeated))
        elif operator == "+":
            self.charge((6 if isinstance(left, Markup) or isinstance(right, Markup) else 1) * (_size(left) + _size(right)))
        return self.binop_table[operator](left, right)

    def _percent(self, form: str, values: Any) -> int:
        numbers = [number for found in DIRECTIVE.findall(form) for number in found]
        if "*" in numbers:
            raise SecurityError("a width * in a format is not supported")
        widths = sum(int(number) for number in numbers if number)
        return 4 * (len(form) + widths) + len(numbers) * (2000 + self.extent(values))

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The result of a call."""
        if type(obj) is BuiltinMethodType:
            owner = obj.__self__
            if type(owner) is str:
                kwargs.pop("_loop_vars", None)  # of Jinja's own
                kwargs.pop("_block_vars", None)
                return self._call_of_text(owner, obj.__name__, obj, args, kwargs)
            if isinstance(owner, str | bytes | list | tuple | dict | set | frozenset | int | float | type):
                if isinstance(owner, str | bytes | type) or obj.__name__ not in OF_OTHERS:
                    raise SecurityError(f"the method {obj.__name__} of {type(owner).__name__} is not supported")
                kwargs.pop("_loop_vars", None)
                kwargs.pop("_block_vars", None)
                for value in args:
                    self.plain(value)
                self.extent(owner) if obj.__name__ in ("index", "count") else self.charge(_size(owner) if obj.__name__ == "copy" else 0)
                return obj(*args, **kwargs)
        elif obj is dict or obj is Namespace or type(obj) is MethodType:
            if isinstance(owner := getattr(obj, "__self__", None), Markup):
                if obj.__name__ not in PIECES | ASKED | {"split"}:
                    raise SecurityError(f"the method {obj.__name__} of safe text is not supported")
                self.charge(64 * len(owner))
            for value in (*args, *kwargs.values()):
                self.charge(self.extent(value) if obj is dict else 0)
                self.plain(value)
        self.tick(64)
        return super().call(context, obj, *args, **kwargs)

    def _call_of_text(self, owner: str, name: str, method: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if name in PIECES:
            self.charge(64 + 4 * len(owner))
        elif name in CHANGED:
            self.charge(64 + 12 * len(owner))
        elif name in ("split", "rsplit"):
            self.charge(64 + 4 * len(owner) + 64 * self._num_pieces(owner, *args, **kwargs))
        elif name == "splitlines":
            self.charge(64 + 4 * len(owner) + 64 * sum(map(owner.count, BREAKS)))
        elif name == "replace":
            self.charge(_replaced(owner, *args))
        elif name == "join":
            return self.join_all(*args, d=owner)
        elif name in ("center", "ljust", "rjust", "zfill"):
            self.charge(64 + 4 * max(len(owner), operator.index(args[0]) if args else 0))
        elif name == "expandtabs":
            size = operator.index(next(iter((*args, *kwargs.values())), 8))
            self.charge(64 + 4 * (len(owner) + owner.count("\t") * max(0, size)))
        elif name not in ASKED:
            raise SecurityError(f"the method {name} of str is not supported")
        elif len(owner) > 1 << 16:
            self.tick()
        return method(*args, **kwargs)

    def _num_pieces(self, text: str, sep: str | None = None, maxsplit: int = -1) -> int:
        found = text.count(sep) if sep else len(text) // 2
        if not sep and 64 * found > self.left:  # a long text: count its words
            found = sum(1 for _ in re.finditer(r"\s+", text))
        return found if maxsplit < 0 else min(found, maxsplit)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """The bounded form of `str.format` and `str.format_map`; None for any other value."""
        if not isinstance(value, MethodType | BuiltinMethodType) or value.__name__ not in ("format", "format_map"):
            return None
        form, mapped = value.__self__, value.__name__ == "format_map"
        if not isinstance(form, str):
            return None

        def formatted(*args: Any, **kwargs: Any) -> str:
            self.tick(4 * len(form))
            return _Formatter(self).vformat(form, () if mapped else args, args[0] if mapped else kwargs)

        return formatted

    def call_filter(self, *args: Any, **kwargs: Any) -> Any:
        """A filter's result for one element of `map`."""
        self.tick(64)
        return super().call_filter(*args, **kwargs)

    def call_test(self, *args: Any, **kwargs: Any) -> Any:
        """A test's result for one element of `select` or `reject`."""
        self.tick()
        return super().call_test(*args, **kwargs)

    # Filters and tests

    def elements(self, value: Iterable[Any]) -> list[Any]:
        """The elements of any iterable as a list."""
        kept = []
        for item in value:
            self.tick(64)
            kept.append(item)
        return kept

    def join_all(self, value: Iterable[Any], d: Any = "", attribute: Any = None) -> str:
        """The filter `join`, and the method."""
        if attribute is not None:
            value = map(make_attrgetter(self, attribute), value)
        texts, between = [self.text(item) for item in self.elements(value)], self.text(d)
        self.charge(64 + 4 * (sum(map(len, texts)) + len(between) * len(texts)))
        return between.join(texts)

    def _bound_filters(self) -> None:
        given = self.filters
        text, same = self.text, ("abs", "attr", "count", "d", "default", "first", "float", "int", "items", "last", "length", "map")
        self.filters = {name: given[name] for name in (*same, "reject", "rejectattr", "select", "selectattr")}
        for name in ("capitalize", "lower", "upper", "title", "escape", "e"):
            self.filters[name] = partial(self._changed, given[name])
        for name in ("min", "max", "sort", "unique", "groupby"):
            self.filters[name] = self._ordered(given[name])
        self.filters |= {
            "center": lambda value, width=80: self._call_of_text(text(value), "center", text(value).center, (width,), {}),
            "dictsort": lambda value, *args, **kwargs: (self.charge(4 * self.extent(value)), given["dictsort"](value, *args, **kwargs))[1],
            "format": lambda value, *args, **kwargs: self.call_binop(None, "%", text(value), kwargs or args),
            "indent": self._indent,
            "join": self.join_all,
            "list": self.elements,
            "replace": self._replace,
            "reverse": lambda value: self.cut(value, slice(None, None, -1)) if isinstance(value, str) else reversed(self.elements(value)),
            "round": self._round,
            "safe": lambda value: Markup(self.joined(value)),
            "string": lambda value: value if isinstance(value, str) else text(value),
            "sum": self._sum,
            "tojson": self._tojson,
            "trim": self._trim,
            "truncate": self._ordered(given["truncate"], materialise=False),
        }

    def _changed(self, change: Callable[[Any], Any], value: Any) -> Any:
        value = value if isinstance(value, str) else self.text(value)
        self.tick(64 + 24 * len(value))
        return change(value)

    def _ordered(self, given: Callable[..., Any], *, materialise: bool = True) -> Callable[..., Any]:
        @wraps(given)
        def run(first: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            if materialise and not isinstance(value, str):
                value = self.elements(value)
            self.charge(4 * self.extent(value))
            return given(first, value, *args, **kwargs)

        return run

    def _trim(self, value: Any, chars: str | None = None) -> str:
        value = value if isinstance(value, str) else self.text(value)
        self.left -= 64 + 4 * len(value)
        if self.left < 0:
            self._refuse()
        return value.strip(chars)

    def _replace(self, value: Any, old: Any, new: Any, count: int | None = None) -> str:
        value, old, new = self.text(value), self.text(old), self.text(new)
        return self._call_of_text(value, "replace", value.replace, (old, new, -1 if count is None else count), {})

    def _indent(self, value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        lines = 2 + sum(map(value.count, BREAKS))
        self.tick(64 + 4 * (lines * ((len(width) if isinstance(width, str) else max(0, width)) + 20) + 2 * len(value)))
        indention, [start, *rest] = width if isinstance(width, str) else " " * width, f"{value}\n".splitlines()
        text = "\n".join([start, *(indention + line if line or blank else line for line in rest)])
        return indention + text if first else text

    def _round(self, value: float, precision: int = 0, method: str = "common") -> float:
        if abs(precision) > 400:
            raise SecurityError(f"a precision of {precision} digits exceeds 400")
        if method == "common":
            return round(value, precision)
        power = 10**precision
        return {"ceil": lambda x: -(-x // 1), "floor": lambda x: x // 1}[method](value * power) / power

    def _sum(self, value: Iterable[Any], attribute: Any = None, start: Any = 0) -> Any:
        if attribute is not None:
            value = map(make_attrgetter(self, attribute), value)
        for item in value:
            start = self.call_binop(None, "+", start, item)
        return start

    # Jinja's own filter escapes HTML, which a prompt must not.
    def _tojson(self, value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
        level = 0 if indent is None else len(indent) if isinstance(indent, str) else indent
        self.extent(value, per_node=4 * sum(map(len, separators or ())), per_level=4 * max(0, level))
        result = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        self.charge(64 + 4 * len(result))
        return result

    def _bound_tests(self) -> None:
        compared = {name: test for name, test in self.tests.items() if getattr(test, "__module__", "") == "_operator"}
        self.tests |= {name: partial(self._compared, test) for name, test in compared.items()}
        self.tests["in"] = lambda value, seq: self.plain(value) in self.holder(seq)
        self.tests["lower"] = lambda value: self.text(value).islower()
        self.tests["upper"] = lambda value: self.text(value).isupper()

    def _compared(self, test: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
        return test(left, self.plain(right))


class _Generation(Extension):
    """`{% generation %}`, which marks the assistant's text for training. Its body is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Generator(CodeGenerator):
    """Generates calls of `BoundedEnvironment` for what Jinja writes as plain Python."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.repeated: dict[int, int] = {}  # bytes that each run of a body may make, by the identity of its list
        self.no_markup, self.depth = True, 0
        self.checks: dict[int, str] = {}  # calls around expressions, by the identity of their nodes

    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:
        for kind in (nodes.EvalContextModifier, nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends):
            if (found := node.find(kind)) is not None:
                self.fail(f"{kind.__name__} is not supported in a chat template", found.lineno)
        self.no_markup = not any(each.name in ("safe", "e", "escape") for each in node.find_all(nodes.Filter))
        # The bodies that may run more than once.
        bodies = node.find_all((nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block))
        self.repeated = {id(each.body): _weight(each) for each in bodies}
        super().visit_Template(node, frame)

    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Frame) -> None:
        if id(nodes) in self.repeated:
            self.writeline(f"environment.left -= {self.repeated[id(nodes)]}")
            self.writeline("if environment.left < 0 or monotonic() > environment.deadline: environment.tick()")
        super().blockvisit(nodes, frame)

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        self.depth += 1
        if self.depth > 20:
            self.fail("more than 20 loops in one another", node.lineno)
        super().visit_For(node, frame)
        self.depth -= 1

    def visit_Add(self, node: nodes.Add, frame: Frame) -> None:
        parts: list[nodes.Expr] = []
        left: nodes.Expr = node
        while isinstance(left, nodes.Add):
            parts.insert(0, left.right)
            left = left.left
        self._call("add" if self.no_markup else "fold", [left, *parts], frame)

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        if not _is_text(node):
            super()._output_child_pre(node, frame, finalize)

    def _output_child_post(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        if not _is_text(node):
            super()._output_child_post(node, frame, finalize)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self._call("joined", node.nodes, frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if not isinstance(node.arg, nodes.Slice):
            self._check(node.arg, "plain")
            key = node.arg.value if isinstance(node.arg, nodes.Const) and isinstance(node.arg.value, str) else None
            self._quick(key, node.node, frame, super().visit_Getitem, node)
            return
        self.write("environment.cut(")
        self.visit(node.node, frame)
        self.write(", slice(")
        for bound in (node.arg.start, node.arg.stop, node.arg.step):
            self.write("None") if bound is None else self.visit(bound, frame)
            self.write(", ")
        self.write("))")

    def visit_Getattr(self, node: nodes.Getattr, frame: Frame) -> None:
        self._quick(None if node.attr in OF_DICT else node.attr, node.node, frame, super().visit_Getattr, node)

    def _quick(self, key: str | None, holder: nodes.Expr, frame: Frame, usual: Callable[..., None], node: nodes.Expr) -> None:
        """The usual lookup, after a quick one for a variable that is a dict with this key."""
        name = frame.symbols.find_ref(holder.name) if key is not None and isinstance(holder, nodes.Name) else None
        if name is None or self.parameter_is_undeclared(name):
            usual(node, frame)
            return
        self.write(f"({name}[{key!r}] if type({name}) is dict and {key!r} in {name} else ")
        usual(node, frame)
        self.write(")")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        for pair in node.items:
            self._check(pair.key, "plain")
        super().visit_Dict(node, frame)

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        left = node.expr
        for op in node.ops:
            if op.op in ("in", "notin"):
                self._check(left, "plain")
                self._check(op.expr, "holder")
            elif not _is_small(left):
                self._check(op.expr, "plain")
            left = op.expr
        super().visit_Compare(node, frame)

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        method = self.checks.get(id(node))
        if method is not None:
            self.write(f"environment.{method}(")
        super().visit(node, *args, **kwargs)
        if method is not None:
            self.write(")")

    def _check(self, node: nodes.Expr, method: str) -> None:
        if not _is_small(node):
            self.checks[id(node)] = method

    def _call(self, method: str, args: Iterable[nodes.Expr], frame: Frame) -> None:
        self.write(f"environment.{method}(")
        for arg in args:
            self.visit(arg, frame)
            self.write(", ")
        self.write(")")


class _Formatter(SandboxedFormatter):
    """Formats within the budget of an environment."""

    def __init__(self, env: BoundedEnvironment) -> None:
        super().__init__(env)
        self.bounds = env

    def format_field(self, value: Any, format_spec: str) -> str:
        self.bounds.tick(4 * sum(int(number) for number in re.findall(r"\d+", format_spec)))
        self.bounds.charge(self.bounds.extent(value))
        return super().format_field(value, format_spec)

    def convert_field(self, value: Any, conversion: Any) -> Any:
        self.bounds.charge(self.bounds.extent(value))
        return super().convert_field(value, conversion)


def _is_small(node: nodes.Node) -> bool:
    """Whether an expression is a constant of the source, so that comparing it takes little time."""
    return isinstance(node, nodes.Const) or (isinstance(node, nodes.List | nodes.Tuple) and all(map(_is_small, node.items)))


def _is_text(node: nodes.Node) -> bool:
    """Whether an expression is a string if it has a value at all."""
    if isinstance(node, nodes.Add):
        return _is_text(node.left) or _is_text(node.right)
    return isinstance(node, nodes.Concat) or (isinstance(node, nodes.Const) and isinstance(node.value, str))


def _weight(node: nodes.Node) -> int:
    """The bytes that each run of a body may make without a call: references to pieces of output, and lists and dicts of the source."""
    literals = sum(64 + 64 * len(each.items) for each in node.find_all((nodes.List, nodes.Tuple, nodes.Dict)))
    return 16 + 16 * sum(1 for _ in node.find_all((nodes.Output, nodes.TemplateData))) + literals


def _size(value: Any) -> int:
    """The bytes of a string at 4 a character, or of a list without its elements."""
    if isinstance(value, str | bytes):
        return 64 + 4 * len(value)
    return 64 + 64 * len(value) if isinstance(value, list | tuple | dict | set | frozenset) else 64


def _replaced(text: str, old: str, new: str, count: int = -1) -> int:
    found = text.count(old)
    return 64 + 4 * (len(text) + len(new) * (found if count < 0 else min(found, count)))


def _elements(value: Any) -> Iterator[Any] | None:
    """The elements that are part of a value's text; None if it is no container."""
    if isinstance(value, list | tuple | set | frozenset | KeysView | ValuesView | ItemsView):
        return iter(value)
    if isinstance(value, Mapping):
        return chain.from_iterable(value.items())
    if isinstance(value, Namespace):
        return iter(object.__getattribute__(value, "_Namespace__attrs").values())
    return None


def _num_characters(value: Any) -> int:
    """The characters of all strings in the caller's variables."""
    total, waiting, seen = 0, [value], 0
    while waiting and seen < 10_000_000:
        item, seen = waiting.pop(), seen + 1
        total += len(item) + 16 if isinstance(item, str) else 16
        waiting.extend(_elements(item) or ())
    return total


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    if len(pattern) > 1000:
        raise SecurityError(f"a date format of {len(pattern)} characters exceeds 1000")
    return datetime.now().strftime(pattern)
