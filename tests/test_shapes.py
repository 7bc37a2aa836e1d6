"""Shapes in annotations: jaxtyping can check an axis such as `B+1` in an argument only if an argument before it binds `B`.

The import hook finds this when a function is called, but it is off where Triton's interpreter runs the GPU's kernels.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src/nanovllm"
FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


def shapes(annotation: ast.expr | None) -> Iterator[str]:
    """The shapes of an annotation such as `Float[Tensor, "B M"] | None`."""
    for node in ast.walk(annotation) if annotation is not None else ():
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple) and len(node.slice.elts) == 2:
            shape = node.slice.elts[1]
            if isinstance(shape, ast.Constant) and isinstance(shape.value, str):
                yield shape.value


def unbound(source: str) -> list[str]:
    """The axes of arguments that are expressions of a name which no argument before them binds."""
    found = []
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        bound, args = set[str](), function.args
        for argument in (*args.posonlyargs, *args.args, *args.kwonlyargs):
            axes = [axis for shape in shapes(argument.annotation) for axis in shape.split()]
            for axis in axes:
                names = set(re.findall(r"[A-Za-z_]\w*", axis))
                if not axis.isidentifier() and not axis.isdecimal() and not axis.startswith(("*", "...")) and not names <= bound:
                    found.append(f"line {function.lineno}, {function.name}({argument.arg}): {axis}")
            bound.update(axis for axis in axes if axis.isidentifier())
    return found


@pytest.mark.parametrize("file", FILES)
def test_expressions_use_axes_that_are_known(file: str) -> None:
    assert unbound((PACKAGE / file).read_text(encoding="utf-8")) == []


def test_an_unknown_axis_is_found() -> None:
    source = 'def f(x: Float[Tensor, "B 2*N"], starts: Int32[Tensor, "B+1"] | None, y: Float[Tensor, "N 2"]) -> None: ...'
    assert unbound(source) == ["line 1, f(x): 2*N"]
