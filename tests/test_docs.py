"""The documents: the paths they name exist, their links lead somewhere, and the programs in the README do what it says."""

import inspect
import re
from pathlib import Path

import pytest

from nanovllm.llm import LLM
from nanovllm.sampling_params import SamplingParams

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMED = re.compile(r"`([\w./-]+\.(?:py|md|json|toml|txt|safetensors)|[\w.-]+(?:/[\w.-]+)*/)`")
LINKED = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")
FOREIGN = ("config.json", "generation_config.json", "model.safetensors", "README.md", "prompts.txt")  # of checkpoints and callers
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, re.S)
PROGRAMS = [code for language, code in BLOCKS if language == "python"]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_paths_and_links_exist(document):
    text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.S)
    places = (ROOT, ROOT / "src/nanovllm", document.parent, *((ROOT / "tools",) if document.name == "tiny-model.md" else ()))
    for name in NAMED.findall(text):
        assert name in FOREIGN or any((place / name).exists() for place in places), f"{document.name} names {name}"
    for link in LINKED.findall(text):
        assert "://" in link or (document.parent / link).exists(), f"{document.name} links to {link}"


def test_the_structure_names_every_file():
    text = (ROOT / "docs/structure.md").read_text(encoding="utf-8")
    package = ROOT / "src/nanovllm"
    named = set(NAMED.findall(text))
    for path in package.rglob("*.py"):
        name = path.relative_to(package).as_posix()
        folders = [f"{parent.as_posix()}/" for parent in path.relative_to(package).parents]
        assert path.name == "__init__.py" or name in named or any(f in named for f in folders), f"docs/structure.md does not name {name}"


@pytest.mark.parametrize("code", PROGRAMS, ids=lambda code: code.split("\n")[2][:30])
def test_programs_run_and_print_what_the_readme_says(code, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # they may save files
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    out = capsys.readouterr().out
    at = README.index(code) + len(code)
    shown = re.match(r"```\nIt prints\n```\n(.*?)```", README[at:], re.S)
    if shown:
        assert out == shown[1]


def test_the_functional_example_is_short_and_shown():
    assert len(PROGRAMS[0].strip().splitlines()) <= 12
    assert "It prints" in README


def test_the_tables_name_every_option():
    options = set(re.findall(r"`(\w+)`", " ".join(line.split("|")[1] for line in README.splitlines() if line.startswith("| `"))))
    engine = set(inspect.signature(LLM).parameters) - {"model"}
    assert options == engine | set(SamplingParams.__dataclass_fields__)
