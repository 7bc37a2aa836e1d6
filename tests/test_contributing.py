"""CONTRIBUTING.md alone is enough to add an op, an architecture and a command: its steps are taken in a copy of the repository."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
BLOCK = r"   ```python\n(.*?)   ```\n"
CREATED = re.compile(rf"Create `([\w/]+\.py)`:\n{BLOCK}", re.S)
EDITED = re.compile(rf"In `([\w/]+\.py)`,[^`]*(?:`(\w+)`[^`]*)?below\n{BLOCK}   add[^\n]*\n{BLOCK}", re.S)
RUN = re.compile(r"   ```\n   (OMP_NUM_THREADS=1 python -m pytest .*?)\n   ```\n")
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository with everything that the page says to create and to add."""
    home = tmp_path_factory.mktemp("copy") / "nanovllm"
    ignored = shutil.ignore_patterns("__pycache__", ".*", "build", "dist")
    for name in ("src", "tests", "tools", "benchmarks", "docs", "examples", "deploy", "integrations"):
        shutil.copytree(ROOT / name, home / name, ignore=ignored)
    for file in ROOT.iterdir():
        if file.is_file() and not file.name.startswith("."):
            shutil.copy(file, home / file.name)
    created, edited = CREATED.findall(PAGE), EDITED.findall(PAGE)
    assert len(created) == 5 and len(edited) == 3
    for name, code in created:
        assert not (home / name).exists()
        (home / name).write_text(textwrap.dedent(code))
    for name, imported, below, added in edited:
        text, place = (home / name).read_text(), re.sub("^ {3}", "", below, flags=re.M)
        assert text.count(place) == 1, place
        text = text.replace(place, place + re.sub("^ {3}", "", added, flags=re.M))
        if imported:
            found = re.search(r"^from nanovllm\.[\w.]+ import ([a-z0-9_]+(?:, [a-z0-9_]+)+)$", text, re.M)
            assert found
            text = text.replace(found[1], ", ".join(sorted([*found[1].split(", "), imported])))
        (home / name).write_text(text)
    structure = home / "docs/structure.md"
    before, known = structure.read_text(), "`entrypoints/cli/memory.py`, "
    assert before.count(known) == 1
    structure.write_text(before.replace(known, known + "`entrypoints/cli/count.py`, "))
    run(home, "tools/write_reference.py")
    return home


def run(home: Path, *arguments: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(home / "src"), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, *arguments], cwd=home, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_the_commands_of_the_page_pass(copy: Path) -> None:
    commands = RUN.findall(PAGE)
    assert len(commands) == 5
    for command in commands:
        passed = re.search(r"(\d+) passed", run(copy, *shlex.split(command)[2:]))
        assert passed and int(passed[1]) >= 2, command


def test_what_was_added_is_in_the_style(copy: Path) -> None:
    run(copy, "-m", "ruff", "check", "src", "tests")
    run(copy, "-m", "pytest", "-q", "tests/test_layout.py")


def test_the_new_architecture_is_listed_and_runs(copy: Path) -> None:
    assert "ToyForCausalLM" in run(copy, "-m", "nanovllm", "models")
    (block,) = re.findall(r"See it run from .*?```\n(.*?)   ```", PAGE, re.S)
    for line in block.strip().splitlines():
        program, *arguments = shlex.split(line)
        run(copy, *(["-m", program] if program == "nanovllm" else []), *arguments)
