"""`Program`: the calls of a failing example, read from Hypothesis's lines, as code that runs without Hypothesis."""

import ast
import builtins
import re
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from nanovllm.testing.fuzz.hunt import COUNTED, Machine

DRAW = re.compile(r"Draw \d+(?: \(.*?\))?: (.*)", re.S)
DATA = ast.dump(ast.parse("data(...)", mode="eval").body)  # how Hypothesis writes `st.data()`
Import = tuple[str, str]  # a module and a name
PLACE = "<program>"  # stands for a file name in tracebacks


class UnwrittenError(Exception):
    """A line of Hypothesis's that is no code: for example, a rule drew an object that has no literal."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a rule, an invariant or `teardown`: the method's name, and the call as code on a machine `state`."""

    name: str
    code: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The calls of an example in order, and what the names in their arguments are imported from."""

    calls: Sequence[Call]
    imports: frozenset[Import]

    def run(self, machine: Machine) -> tuple[int, Exception] | None:
        """Run the calls on a fresh machine. Returns the index of the call that raised, and the error; None if none did."""
        names: dict[str, Any] = {}
        exec("\n".join(import_lines(self.imports)), names)
        names["state"] = machine()
        code = compile("\n".join(call.code for call in self.calls), PLACE, "exec")  # a call is one line
        try:
            exec(code, names)
        except Exception as error:
            with suppress(Exception):
                names["state"].teardown()
            lines, trace = [], error.__traceback__
            while trace is not None:
                lines += [trace.tb_lineno] if trace.tb_frame.f_code is code else []
                trace = trace.tb_next
            return lines[0] - 1, error
        return None


def program_of(machine: Machine, notes: Iterable[str]) -> Program:
    """Read the calls of an example.

    Args:
        machine: The machine that ran the example.
        notes: Hypothesis's lines: the calls as code, and before each call what it drew.

    Raises:
        UnwrittenError: A line cannot be written as code.
    """
    calls, imports, drawn, known = list[Call](), set[Import](), list[ast.expr](), {"state"}
    for note in notes:
        if draw := DRAW.fullmatch(note):
            drawn.append(_parsed(draw[1]).body)
            continue
        call = _call_of(note, drawn)
        if call is None or call.name == COUNTED:
            continue
        for node in ast.walk(ast.parse(call.code)):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                known.add(node.id)
            elif isinstance(node, ast.Name) and node.id not in known and node.id not in vars(builtins):
                imports.add(("nanovllm.testing", "Draws") if node.id == "Draws" else (_module_of(machine, node.id), node.id))
        calls.append(call)
        drawn = []
    return Program(calls=calls, imports=frozenset(imports))


def import_lines(imports: Iterable[Import]) -> list[str]:
    """The statements for these imports, one for each module."""
    names: dict[str, list[str]] = {}
    for module, name in sorted(imports):
        names.setdefault(module, []).append(name)
    return [f"from {module} import {', '.join(each)}" for module, each in names.items()]


def _parsed(text: str) -> ast.Expression:
    try:
        return ast.parse(text, mode="eval")
    except SyntaxError:
        raise UnwrittenError(f"{text} is no code") from None


def _call_of(note: str, drawn: list[ast.expr]) -> Call | None:
    """The call of one line, on one line and with its draws as arguments; None if the line is no call of the machine."""
    try:
        tree = ast.parse(note)
    except SyntaxError:
        if "state." in note:
            raise UnwrittenError(f"{note} is no code") from None
        return None
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("state.")]
    if not found or not isinstance(found[0].func, ast.Attribute):
        return None
    for keyword in found[0].keywords:
        if ast.dump(keyword.value) == DATA:
            keyword.value = ast.Call(ast.Name("Draws", ast.Load()), drawn, [])
    return Call(found[0].func.attr, "; ".join(ast.unparse(statement) for statement in tree.body))


def _module_of(machine: Machine, name: str) -> str:
    """The module to import a class from whose name the modules of the machine, or of its base classes, know."""
    for kind in machine.__mro__:
        value = vars(sys.modules[kind.__module__]).get(name)
        if isinstance(value, type) and value.__qualname__ == name:
            return value.__module__
    raise UnwrittenError(f"{name} is no class that the machine's modules know")
