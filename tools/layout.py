"""The layout of the package measured: its files, the order of its folders, and every import that breaks that order.

`python tools/layout.py [FOLDER]` prints the figures of a package; `tests/test_layout.py` holds this one to `ORDER`.
"""

import ast
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "nanovllm"

# From the top down. A room imports from its own folder and from rooms of later lines, never from its own line or from earlier ones.
ORDER = (
    ("__init__", "__main__"),
    ("entrypoints",),
    ("testing",),
    ("chunks",),
    ("engine",),
    ("executor", "loading"),
    ("models",),
    ("state",),
    ("sampling",),
    ("ops",),
    ("tokenizer",),
    ("files", "config", "operator_lines"),
    ("types",),
    ("errors",),
)


@dataclass(frozen=True, slots=True, order=True)
class Import:
    """`line` of file `source` imports file `target`; both are paths relative to the package. `lazy`: inside of a function."""

    source: str
    line: int
    target: str
    lazy: bool

    @property
    def rooms(self) -> tuple[str, str]:
        """The rooms of both ends: a folder or a file at the top of the package."""
        return room_of(self.source), room_of(self.target)


def room_of(file: str) -> str:
    """The folder, or the file without its suffix, at the top of the package."""
    return file.split("/", maxsplit=1)[0].removesuffix(".py")


def read_imports(package: Path) -> list[Import]:
    """Every import of one file of the package by another, those inside of functions and of `TYPE_CHECKING` included."""
    found = []
    for path in sorted(package.rglob("*.py")):
        file = path.relative_to(package).as_posix()
        tree = ast.parse(path.read_text(), str(path))
        lazy = {id(node) for function in ast.walk(tree) if isinstance(function, ast.FunctionDef) for node in ast.walk(function)}
        for node in ast.walk(tree):
            for target in _targets(node, file, package):
                if target != file:
                    found.append(Import(file, node.lineno, target, id(node) in lazy))
    return sorted(set(found))


def _targets(node: ast.AST, file: str, package: Path) -> Iterator[str]:
    """The files of the package that a statement imports."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            parts = alias.name.split(".")
            if parts[0] == package.name:
                yield from _file(package, parts[1:])
    elif isinstance(node, ast.ImportFrom):
        stem = (node.module or "").split(".") if node.module else []
        if node.level:
            folder = file.split("/")[:-1]
            stem = folder[: len(folder) - node.level + 1] + stem
        elif stem[:1] == [package.name]:
            stem = stem[1:]
        else:
            return
        for alias in node.names:
            yield from _file(package, [*stem, alias.name]) or _file(package, stem)


def _file(package: Path, parts: list[str]) -> list[str]:
    path = "/".join(parts)
    return [name for name in (f"{path}.py", f"{path}/__init__.py".lstrip("/")) if (package / name).is_file()][:1]


def upward(imports: Iterable[Import], order: tuple[tuple[str, ...], ...] = ORDER) -> list[Import]:
    """The imports that run up, or sideways between rooms of one line. Raises `KeyError` for a room that has no place in the order."""
    floor = {room: place for place, rooms in enumerate(order) for room in rooms}
    return [i for i in imports if i.rooms[0] != i.rooms[1] and floor[i.rooms[0]] >= floor[i.rooms[1]]]


def circles(edges: Iterable[tuple[str, str]]) -> list[list[str]]:
    """The groups of nodes that import one another, directly or by way of others (Tarjan, 1972)."""
    after: dict[str, list[str]] = {}
    for a, b in edges:
        after.setdefault(a, []).append(b)
        after.setdefault(b, [])
    number, low, stack, found = dict[str, int](), dict[str, int](), list[str](), list[list[str]]()

    def visit(node: str) -> None:
        number[node] = low[node] = len(number)
        stack.append(node)
        for other in after[node]:
            if other not in number:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == number[node]:
            group = [stack.pop()]
            while group[-1] != node:
                group.append(stack.pop())
            if len(group) > 1:
                found.append(sorted(group))

    for node in sorted(after):
        if node not in number:
            visit(node)
    return sorted(found)


def levels(edges: Iterable[tuple[str, str]]) -> int:
    """How many rooms the longest way down passes; rooms of a circle count as one."""
    edges = set(edges)
    group = {node: circle[0] for circle in circles(edges) for node in circle}
    after: dict[str, set[str]] = {}
    for ends in edges:
        a, b = (group.get(node, node) for node in ends)
        if a != b:
            after.setdefault(a, set()).add(b)

    @cache
    def depth(node: str) -> int:
        return 1 + max((depth(other) for other in after.get(node, ())), default=0)

    return max((depth(node) for node in list(after)), default=0)


def fewest_broken(edges: Mapping[tuple[str, str], int]) -> int:
    """How many imports run up in the best order of rooms that a greedy search finds (Eades, Lin and Smyth, 1993)."""
    left, head, tail = {node for edge in edges for node in edge}, list[str](), list[str]()
    while left:
        out, into = Counter[str](), Counter[str]()
        for (a, b), count in edges.items():
            if a in left and b in left:
                out[a] += count
                into[b] += count
        if sinks := [node for node in left if not out[node]]:
            tail.append(min(sinks))
        elif sources := [node for node in left if not into[node]]:
            head.append(min(sources))
        else:
            head.append(max(left, key=lambda node: (out[node] - into[node], node)))
        left -= {*head, *tail}
    place = {node: at for at, node in enumerate([*head, *reversed(tail)])}
    return sum(count for (a, b), count in edges.items() if place[a] > place[b])


def figures(package: Path) -> dict[str, int]:
    """The layout of a package in numbers."""
    imports = read_imports(package)
    between = Counter(i.rooms for i in imports if i.rooms[0] != i.rooms[1])
    rooms = {pair for pair in between if "__init__" not in pair}
    top = [path.stem for path in package.glob("*.py")]
    known = {room for line in ORDER for room in line}
    ordered = {room for pair in between for room in pair} <= known
    return {
        "files at the top of the package": len(top),
        "folders at the top of the package": len({path.parent.relative_to(package).parts[0] for path in package.glob("*/**/*.py")}),
        "levels of rooms": levels(rooms),
        "imports between rooms": sum(between.values()),
        "imports that run up": len(upward(imports)) if ordered else fewest_broken(between),
        "circles of files": len(circles((i.source, i.target) for i in imports)),
        "files in circles": sum(map(len, circles((i.source, i.target) for i in imports))),
        "knots of rooms": len(circles(rooms)),
        "rooms in knots": sum(map(len, circles(rooms))),
    }


def main() -> None:
    """Print the figures, and where this package breaks its order."""
    package = Path(sys.argv[1]).resolve() if sys.argv[1:] else PACKAGE
    for name, number in figures(package).items():
        print(f"{number:6}  {name}")
    imports = read_imports(package)
    if {room_of(i.source) for i in imports} <= {room for line in ORDER for room in line}:
        for i in upward(imports):
            print(f"up: {i.source}:{i.line} imports {i.target}")
    for circle in circles((i.source, i.target) for i in imports):
        print("circle: " + ", ".join(circle))


if __name__ == "__main__":
    main()
