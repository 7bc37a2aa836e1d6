"""The numbered invariants: one list, which `check`, the machines and docs/explanation/invariants.md quote."""

import ast
import re
from pathlib import Path

import pytest

import nanovllm
import nanovllm.testing
from nanovllm.state import invariants
from nanovllm.testing.shadows.memory import ShadowMismatchError, expect

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/explanation/invariants.md").read_text(encoding="utf-8")
PACKAGE = Path(nanovllm.__file__).parent


def calls(path: Path, name: str) -> list[ast.Call]:
    """The calls of a function of this name in a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name]


def quoted_by_machines() -> dict[int, list[str]]:
    """The files of `nanovllm.testing` that name each number."""
    found: dict[int, list[str]] = {}
    for path in sorted((PACKAGE / "testing").rglob("*.py")):
        for call in calls(path, "expect"):
            for keyword in call.keywords:
                if keyword.arg == "invariant":
                    assert isinstance(keyword.value, ast.Constant) and isinstance(keyword.value.value, int)
                    found.setdefault(keyword.value.value, []).append(path.name)
    return found


def test_the_page_has_every_invariant_word_for_word():
    sections = re.findall(r"^## (\d+)\. .+\n+(.+)$", PAGE, re.M)
    assert {int(number): sentence for number, sentence in sections} == dict(invariants.INVARIANTS)
    assert [int(number) for number, _ in sections] == list(range(1, len(invariants.INVARIANTS) + 1))


def test_the_page_names_machines_that_exist():
    named = set(re.findall(r"`(\w+Machine)`", PAGE))
    assert named and named <= set(nanovllm.testing.__all__)


def test_every_name_that_check_gives_has_a_number():
    given = {call.args[1].value for call in calls(Path(invariants.__file__), "_require")}  # type: ignore[attr-defined]
    assert given == set(invariants.NUMBERS)
    assert set(invariants.NUMBERS.values()) <= set(invariants.INVARIANTS)
    for name in given:
        assert f"`{name}`" in PAGE, f"the page does not say what '{name}' is"


def test_machines_quote_the_list():
    assert set(quoted_by_machines()) <= set(invariants.INVARIANTS)
    for path in (PACKAGE / "testing").rglob("*.py"):
        assert not re.search(r"[\"']invariant \d", path.read_text(encoding="utf-8")), f"{path.name} words an invariant itself"


def test_every_invariant_is_looked_for():
    """By `check`, by a machine, or by a test whose name says so."""
    tests = {int(n) for path in (ROOT / "tests").rglob("*.py") for n in re.findall(r"def test_invariant_(\d+)", path.read_text("utf-8"))}
    looked_for = set(invariants.NUMBERS.values()) | set(quoted_by_machines()) | tests
    assert looked_for == set(invariants.INVARIANTS)


def test_messages_have_number_values_and_sentence():
    assert invariants.broken(2, "page 3 is free and held", "partition") == (
        f"invariant 2, 'partition': page 3 is free and held. It says: {invariants.INVARIANTS[2]}"
    )
    with pytest.raises(ShadowMismatchError, match=r"invariant 9: 3 tokens of 4. It says: Tokens run plus"):
        expect(False, "3 tokens of 4", invariant=9)
    with pytest.raises(ShadowMismatchError, match=r"^3 tokens of 4$"):
        expect(False, "3 tokens of 4")
    expect(True, "nothing", invariant=9)


def test_no_other_list_of_invariants_is_in_the_machines():
    for path in sorted((PACKAGE / "testing").rglob("*.py")):
        assert not re.search(r"^\d+\. ", ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "", re.M), path
