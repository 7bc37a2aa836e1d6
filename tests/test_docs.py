"""The documents: the paths they name exist, their links lead somewhere, and the programs in the README do what it says."""

import inspect
import re
from pathlib import Path

import pytest

import nanovllm
from nanovllm.llm import LLM
from nanovllm.sampling_params import SamplingParams

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMED = re.compile(r"`([\w./-]+\.(?:py|md|json|toml|txt|safetensors)|[\w.-]+(?:/[\w.-]+)*/)`")
LINKED = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")
OF_CHECKPOINTS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")
FOREIGN = (*OF_CHECKPOINTS, "README.md", "prompts.txt")  # and of callers
README = (ROOT / "README.md").read_text(encoding="utf-8")
FOUND = {section.split("\n")[0]: re.findall(r"```python\n(.*?)```", section, re.S) for section in README.split("\n## ")}
PROGRAMS = {title: programs for title, programs in FOUND.items() if programs}


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


def test_quoted_sources_stand_there():
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "src/nanovllm/models").glob("*.py")]
    quoted = re.findall(r"```python\n(.*?)```", (ROOT / "docs/how-to/add-a-model.md").read_text(encoding="utf-8"), re.S)
    assert len(quoted) == 4
    for code in quoted:
        assert any(code in source for source in sources), code


@pytest.mark.parametrize("title", PROGRAMS)
def test_programs_run_and_print_what_the_readme_says(title, capsys, tmp_path, monkeypatch):
    """Those of a section share a folder: the second may read what the first saved."""
    monkeypatch.chdir(tmp_path)
    for code in PROGRAMS[title]:
        exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
        out = capsys.readouterr().out
        at = README.index(code) + len(code)
        shown = re.match(r"```\nIt prints\n```\n(.*?)```", README[at:], re.S)
        if shown:
            assert out == shown[1]


def test_the_functional_example_is_short_and_shown():
    assert len(PROGRAMS["The state is a value"][0].strip().splitlines()) <= 12
    assert "It prints" in README


def test_every_exported_name_is_listed_with_the_arguments_it_takes():
    section = README.split("\n## All names\n")[1].split("\n## ")[0]
    assert set(nanovllm.__all__) <= set(re.findall(r"`(\w+)", section))
    for name, arguments in re.findall(r"^- `(\w+)\((.*?)\)`", section, re.M):
        takes = inspect.signature(getattr(nanovllm, name)).parameters
        given = [argument.split("=")[0] for argument in arguments.split(", ")]
        assert given == [key for key in takes if key in given], name
        assert all(key in given for key, value in takes.items() if value.default is value.empty), name


def test_the_tables_name_every_option():
    options = set(re.findall(r"`(\w+)`", " ".join(line.split("|")[1] for line in README.splitlines() if line.startswith("| `"))))
    engine = set(inspect.signature(LLM).parameters) - {"model"}
    assert options == engine | set(SamplingParams.__dataclass_fields__)
