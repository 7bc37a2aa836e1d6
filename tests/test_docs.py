"""The documents: paths and links lead somewhere, programs do what the pages say, and command lines are understood by the parser."""

import argparse
import contextlib
import io
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import nanovllm as nv
from nanovllm.entrypoints.cli.main import build_parser

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
DOCUMENTS = [*(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG", "SECURITY")), *PAGES]
NAMED = re.compile(r"`([\w./-]+\.(?:py|md|json|toml|txt|yml|safetensors)|[\w.-]+(?:/[\w.-]+)*/)`")
LINKED = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
OF_CHECKPOINTS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")
OF_CALLERS = (*OF_CHECKPOINTS, "README.md", "prompts.txt", "KEY.safetensors", ".nanovllm-store.json", "_plan.json")
CREATED = re.compile(r"[Cc]reate `([\w/.]+)`")  # by who follows the page
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```", re.S | re.M)
INDENTED = re.compile(r"^ +```\w*\n.*?^ +```", re.S | re.M)  # in a list, as in CONTRIBUTING.md
SHOWN = re.compile(r"```\nIt prints\n```\n(.*?)```", re.S)
NOT_RUN = re.compile(r"<!-- not run: (.+) -->$")  # on the line above a block


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block of a page. `shown` is the output that the page claims, None if it claims none."""

    language: str
    code: str
    line: int
    shown: str | None
    reason: str  # why it is not run; empty: it is

    @property
    def runs(self) -> bool:
        return not self.reason


@cache
def text_of(document: Path) -> str:
    return document.read_text(encoding="utf-8")


def name_of(document: Path) -> str:
    return document.relative_to(ROOT).as_posix()


def blocks(document: Path, language: str) -> list[Block]:
    text, found = text_of(document), []
    for match in FENCE.finditer(text):
        if match[1].strip() == language:
            shown = SHOWN.match(text, match.end() - 3)
            above = text[: match.start()].rstrip("\n").rpartition("\n")[2]
            line = text.count("\n", 0, match.start()) + 1
            why = NOT_RUN.match(above)
            found.append(
                Block(language=language, code=match[2], line=line, shown=shown[1] if shown else None, reason=why[1] if why else "")
            )
    return found


@cache
def sources() -> tuple[str, ...]:
    return tuple(path.read_text(encoding="utf-8") for path in (ROOT / "src/nanovllm").rglob("*.py"))


def quoted(code: str) -> bool:
    """Whether a block is a piece of the package's sources, which imports nothing and is not run by itself."""
    return not re.search(r"^(import|from) ", code, re.M) and any(code in source for source in sources())


def programs(document: Path) -> list[Block]:
    return [block for block in blocks(document, "python") if block.runs and not quoted(block.code)]


def anchors(document: Path) -> set[str]:
    """The anchors of a page's headings, which GitHub and the site make alike from plain words."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text_of(document)), re.M)
    plain = (re.sub(r"[`*]|\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_paths_and_links_exist(document: Path) -> None:
    text = FENCE.sub("", text_of(document))
    places = (ROOT, ROOT / "src/nanovllm", document.parent, *((ROOT / "tools/tiny_model",) if document.name == "tiny-model.md" else ()))
    known = {*OF_CALLERS, *CREATED.findall(text), *(path.partition("src/nanovllm/")[2] for path in CREATED.findall(text))}
    for name in NAMED.findall(text):
        assert name in known or any((place / name).exists() for place in places), f"{document.name} names {name}"
    for link, anchor in LINKED.findall(text):
        if "://" in link or link.startswith("mailto:"):
            continue
        target = document.parent / link if link else document
        assert target.exists(), f"{document.name} links to {link}"
        assert not anchor or target.suffix != ".md" or anchor in anchors(target), f"{document.name} links to {link}#{anchor}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_blocks_are_closed_and_outputs_belong_to_programs(document: Path) -> None:
    text = text_of(document)
    assert len(re.findall(r"^ *```", text, re.M)) % 2 == 0, "a block is not closed"
    assert text.count("\nIt prints\n") == sum(block.shown is not None for block in blocks(document, "python"))


def unnamed(structure: str, package: Path) -> list[str]:
    """The files that the page names neither by themselves nor, in the tables of files, by their folder."""
    overview, tables = structure.split("## Which file")
    top = {path.name for path in package.glob("*.py")} & set(NAMED.findall(overview))
    named = {*NAMED.findall(tables), *top}
    files = [path.relative_to(package) for path in package.rglob("*.py") if path.name != "__init__.py"]
    return [file.as_posix() for file in files if not {file.as_posix(), f"{file.parent.as_posix()}/"} & named]


def test_the_structure_names_every_file() -> None:
    assert unnamed(text_of(ROOT / "docs/structure.md"), ROOT / "src/nanovllm") == []


def test_a_file_that_the_structure_does_not_name_is_found(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "ops/moe").mkdir(parents=True)
    for name in ("types.py", "files.py", "engine/step.py", "engine/skip.py", "ops/moe/route.py"):
        (tmp_path / name).touch()
    overview, tables = "| `engine/`, `types.py` | requests |\n", "| `engine/step.py` | `step` |\n| `ops/moe/` | experts |\n"
    assert sorted(unnamed(f"{overview}## Which file\n{tables}", tmp_path)) == ["engine/skip.py", "files.py"]


@pytest.mark.parametrize("document", PAGES, ids=name_of)
def test_blocks_that_are_not_run_are_pieces_of_the_sources_or_say_why(document: Path) -> None:
    for block in blocks(document, "python"):
        if not block.runs:
            says_why = "quoted" not in block.reason and len(block.reason.split()) > 2
            assert quoted(block.code) or (says_why and compile(block.code, str(document), "exec")), f"{name_of(document)}, {block.line}"


def test_the_page_on_models_quotes_sources() -> None:
    assert sum(quoted(block.code) for block in blocks(ROOT / "docs/how-to/add-a-model.md", "python")) >= 4


original = nv.load_model
tiny = cache(original)


def load_model(path: Any, *arguments: Any, **options: Any) -> nv.Model:
    """The packaged model is loaded once for all programs of a process: a model is a value, which no program can change."""
    plain = path == "tiny" and not arguments and options in ({}, {"device": "cpu"})
    return tiny(path) if plain else original(path, *arguments, **options)


def cases() -> Iterator[Any]:
    """The sections of the README and the pages: the programs of one share a folder, so that the second may read what the first saved."""
    for document in DOCUMENTS:
        found = programs(document)
        if document.name == "README.md":
            starts = [text_of(document).count("\n", 0, match.start()) for match in re.finditer(r"^## ", text_of(document), re.M)]
            groups = [[b for b in found if low < b.line <= high] for low, high in zip([0, *starts], [*starts, 1 << 30], strict=True)]
        else:
            groups = [found]
        for group in filter(None, groups):
            compiles = any(re.search(r"^[^#]*torch\.compile\(", block.code, re.M) for block in group)
            marks = [pytest.mark.compile] if compiles else []
            yield pytest.param(document, group, id=f"{name_of(document)}:{group[0].line}", marks=marks)


@pytest.mark.parametrize(("document", "group"), list(cases()))
def test_programs_run_and_print_what_the_pages_say(document: Path, group: list[Block], tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(nv, "load_model", load_model)
    for block in group:
        out = io.StringIO()
        code = "\n" * block.line + block.code  # so that a traceback has the page's lines
        with contextlib.redirect_stdout(out):
            exec(compile(code, str(document), "exec"), {"__name__": "__main__"})
        assert block.shown is None or out.getvalue() == block.shown, f"{name_of(document)}, line {block.line}"


def test_the_functional_example_is_short_and_shown() -> None:
    section = text_of(ROOT / "README.md").split("\n## Fork a context\n")[1]
    (code, *_), (shown, *_) = re.findall(r"```python\n(.*?)```", section, re.S), SHOWN.findall(section)
    assert len(code.strip().splitlines()) <= 12 and shown


def command_lines(document: Path) -> list[str]:
    """The `nanovllm ...` lines of blocks without a language, and the commands among code in the text."""
    lines = [line for language in ("", "sh", "bash", "console") for block in blocks(document, language) for line in block.code.splitlines()]
    commands = [line.removeprefix("$ ") for line in lines if line.removeprefix("$ ").startswith("nanovllm ")]
    inline = re.findall(r"(?<!`)`(nanovllm [^`]+)`", INDENTED.sub("", FENCE.sub("", text_of(document))))
    return [*commands, *(command for command in inline if not re.search(r"[=…(]|\.\.\.", command))]


def arguments_of(line: str) -> list[str]:
    """What a shell gives to `nanovllm`: without comments, redirections and what a pipe leads to."""
    words = shlex.split(line, comments=True)
    end = next((i for i, word in enumerate(words) if word in (">", ">>", "<", "|", "2>", "&&", ";")), len(words))
    return words[1:end]


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if command_lines(d)], ids=name_of)
def test_command_lines_are_understood(document: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = build_parser()
    for line in command_lines(document):
        arguments = arguments_of(line)
        try:
            options = parser.parse_args(arguments, argparse.Namespace())
        except SystemExit as end:
            error = capsys.readouterr().err
            named = f"`{line}`" in text_of(document) and re.search("arguments are required|expected one argument", error)
            assert end.code == 0 or named, f"{name_of(document)}: {line}: {error}"
        else:
            assert callable(options.run), line


def test_the_readme_is_short() -> None:
    assert len(text_of(ROOT / "README.md").splitlines()) <= 180


def test_the_feature_table_has_the_figures_that_were_measured() -> None:
    ours = json.loads((ROOT / "benchmarks/results/h200-bench.json").read_text())
    peers = json.loads((ROOT / "benchmarks/results/h200-peers.json").read_text())["models"][ours["model"]]
    text = text_of(ROOT / "README.md")
    for key, words in (("b1_decode_tok_s", "1 sequence"), ("b64_decode_tok_s", "64 sequences")):
        figures = [ours[key], peers["vLLM 0.26.0"][key], peers["nano-vllm"][key]]
        mine, vllm, nano = (f"{figure:,.0f}" for figure in figures)
        assert re.search(rf"^\| tokens/s, {words}, .*\| {mine} \| {vllm} \| not measured \| {nano} \|$", text, re.M)
    assert f"commit {ours['commit']}" in text


def test_the_start_page_lists_every_example() -> None:
    listed = re.findall(r"^\| \[(\w+\.py)\]", text_of(ROOT / "docs/index.md"), re.M)
    assert sorted(listed) == sorted(path.name for path in (ROOT / "examples").glob("*.py"))
