"""`Program`: the calls of a failing example, read from Hypothesis's lines, as code that runs without Hypothesis."""

import ast
import builtins
import re
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from hypothesis.stateful import INVARIANT_MARKER, RULE_MARKER

from nanovllm.testing.draws import Draws
from nanovllm.testing.fuzz.hunt import COUNTED, Machine

DRAW = re.compile(r"Draw \d+(?: \(.*?\))?: (.*)", re.S)
DATA = ast.dump(ast.parse("data(...)", mode="eval").body)  # how Hypothesis writes `st.data()`
Import = tuple[str, str]  # a module and a name


class UnwrittenError(Exception):
    """A line of Hypothesis's that is no code: for example, a rule drew an object that has no literal."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a rule, an invariant or `teardown`: the method's name, and the call as code on a machine `state`."""

    name: str
    code: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A run that failed: the index of the call that raised, the error, and from which strategies each call drew."""

    at: int
    error: Exception
    drew: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The calls of an example in order, and what the names in their arguments are imported from."""

    calls: Sequence[Call]
    imports: frozenset[Import]

    def run(self, machine: Machine) -> Ran | None:
        """Run the calls on a fresh machine. Returns None if none raised, or if a rule could not be called where it is."""
        drew = list[list[str]]()

        class Noted(Draws):
            def draw(self, strategy: Any, label: Any = None) -> Any:
                drew[-1].append(repr(strategy))
                return super().draw(strategy, label)

        names: dict[str, Any] = {}
        exec("\n".join(import_lines(self.imports)), names)
        state = machine()
        names |= {"state": state, "Draws": Noted}
        for at, call in enumerate(self.calls):
            rule = getattr(getattr(machine, call.name), RULE_MARKER, None)
            if rule is not None and not all(holds(state) for holds in rule.preconditions):
                return None
            drew.append([])
            try:
                exec(call.code, names)
            except Exception as error:
                with suppress(Exception):
                    state.teardown()
                return Ran(at=at, error=error, drew=drew)
        return None

    def smaller(self, machine: Machine, ran: Ran) -> tuple["Program", Ran]:
        """The program without each call of a rule that the failure does not need, and its run.

        Hypothesis leaves some in. The remaining calls may be made: they draw from the same strategies as before.
        """
        program, starts = self, [i for i, call in enumerate(self.calls) if getattr(getattr(machine, call.name), RULE_MARKER, None)]
        for start in reversed(starts):
            end = next((i for i in range(start + 1, len(program.calls)) if not is_check(machine, program.calls[i].name)), start + 1)
            kept = [i for i in range(len(program.calls)) if not start <= i < end]
            rest = replace(program, calls=[program.calls[i] for i in kept])
            again = rest.run(machine)
            if again is None or type(again.error) is not type(ran.error) or rest.calls[again.at] != program.calls[ran.at]:
                continue
            if list(again.drew) == [ran.drew[i] for i in kept if i < len(ran.drew)]:
                program, ran = rest, again
        return program, ran


def is_check(machine: Machine, name: str) -> bool:
    """Whether a method is an invariant."""
    return getattr(getattr(machine, name), INVARIANT_MARKER, None) is not None


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
