"""The layout of the package: imports run down through its folders, no files import each other in a circle, and few files lie at the top."""

import ast
from pathlib import Path

import pytest

from tools.layout import ORDER, PACKAGE, circles, figures, read_imports, room_of, upward


def test_imports_run_downward() -> None:
    assert [f"{i.source}:{i.line} imports {i.target}" for i in upward(read_imports(PACKAGE))] == []


def test_every_room_has_a_place_in_the_order() -> None:
    rooms = {room_of(path.relative_to(PACKAGE).as_posix()) for path in PACKAGE.rglob("*.py")}
    assert rooms == {room for line in ORDER for room in line}


def test_no_files_import_each_other() -> None:
    assert circles((i.source, i.target) for i in read_imports(PACKAGE)) == []


def test_no_rooms_inside_of_a_folder_import_each_other_in_a_circle() -> None:
    inside = [(i.source.split("/"), i.target.split("/")) for i in read_imports(PACKAGE)]
    pairs = {(f"{a[0]}/{a[1]}", f"{b[0]}/{b[1]}") for a, b in inside if len(a) > 1 and len(b) > 1 and a[0] == b[0] and a[1] != b[1]}
    assert circles(pairs) == []


def test_few_files_lie_at_the_top() -> None:
    assert figures(PACKAGE)["files at the top of the package"] <= 8


def test_packages_hold_a_docstring_alone() -> None:
    hand_on = {PACKAGE / name / "__init__.py" for name in (".", "ops", "models", "testing")}
    for path in PACKAGE.rglob("__init__.py"):
        body = ast.parse(path.read_text()).body
        assert ast.get_docstring(ast.Module(body, [])) and (len(body) == 1 or path in hand_on), path


PLANTED = {
    "errors.py": "",
    "types.py": "from nanovllm.errors import A\n",
    "state/pool.py": "from nanovllm.types import B\nfrom . import pages\n",
    "state/pages.py": "def later():\n    from nanovllm.state.pool import C\n",
    "ops/__init__.py": "from nanovllm.ops.draw import draw\n",
    "ops/draw.py": "import torch\nfrom nanovllm import types\nfrom nanovllm.state import pool\n",
    "loading/hub.py": "if True:\n    import nanovllm.executor.batch\n",
    "executor/batch.py": "",
}


def test_what_breaks_the_order_is_named(tmp_path: Path) -> None:
    package = tmp_path / "nanovllm"
    for name, text in PLANTED.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    imports = read_imports(package)
    assert [(i.source, i.line, i.target) for i in upward(imports)] == [
        ("loading/hub.py", 2, "executor/batch.py"),
        ("ops/draw.py", 3, "state/pool.py"),
    ]
    assert circles((i.source, i.target) for i in imports) == [["state/pages.py", "state/pool.py"]]
    assert {(i.source, i.target) for i in imports if i.lazy} == {("state/pages.py", "state/pool.py")}
    (package / "cellar.py").write_text("from nanovllm.errors import A\n")
    with pytest.raises(KeyError, match="cellar"):
        upward(read_imports(package))
