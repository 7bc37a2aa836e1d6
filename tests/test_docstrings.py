"""The docstrings of the public API: every name has one, its sections are whole, and its examples print the lines that they show."""

import builtins
import dataclasses
import doctest
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import nanovllm as nv
from nanovllm import errors

SECTION = re.compile(r"(Args|Attributes|Returns|Yields|Raises|Examples|Note|References):")
ENTRY = re.compile(r"    \*{0,2}([\w.]+)(?: \([^)]*\))?:(?: |$)")
FLAGS = doctest.ELLIPSIS


def written(function: Any) -> bool:
    """Whether a function has a source line in the package; those that `dataclass` or `NamedTuple` make have none."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code is not None and "nanovllm" in Path(code.co_filename).parts


def public_names() -> Iterator[tuple[str, Any]]:
    """The public names with their values: functions, classes, and the public methods and properties of the classes."""
    for name in nv.__all__:
        value = getattr(nv, name)
        yield name, value
        if inspect.isclass(value):
            for attribute in dir(value):
                member = inspect.getattr_static(value, attribute)
                member = member.__func__ if isinstance(member, staticmethod | classmethod) else member
                shown = not attribute.startswith("_") or attribute == "__init__"
                if shown and (isinstance(member, property) or (inspect.isfunction(member) and written(member))):
                    yield f"{name}.{attribute}", member


PUBLIC = dict(public_names())


def sections_of(text: str) -> dict[str, list[str]]:
    """The lines of a cleaned docstring by section; those before the first section are under the empty name."""
    sections: dict[str, list[str]] = {"": []}
    current = ""
    for line in text.splitlines():
        title = SECTION.fullmatch(line)
        current = title[1] if title else current
        if title:
            sections[current] = []
        else:
            sections[current].append(line)
    return sections


def entries(lines: list[str]) -> list[str]:
    """The names that a section explains: they begin a line that is indented by four spaces, and a colon follows."""
    return [entry[1] for line in lines if (entry := ENTRY.match(line))]


def faults_of(value: Any) -> list[str]:
    """The rules that the docstring of a public name breaks."""
    if not value.__doc__:  # `inspect.getdoc` alone would return an inherited one
        return ["it has no docstring"]
    text = inspect.cleandoc(value.__doc__)
    sections, faults = sections_of(text), []
    if not sections[""] or not sections[""][0].strip():
        faults.append("it has no summary line")
    for name in entries(sections.get("Raises", [])):
        error = getattr(errors, name, None) or getattr(builtins, name, None)
        if not (inspect.isclass(error) and issubclass(error, Exception)):
            faults.append(f"Raises: {name} is not an exception")
    if "Raises" in sections and not entries(sections["Raises"]):
        faults.append("Raises: names no exception")
    if inspect.isclass(value):
        fields = [field.name for field in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else getattr(value, "_fields", ())
        explained = entries([*sections.get("Attributes", []), *sections.get("Args", [])])
        faults += [f"Attributes: {name} is missing" for name in fields if name not in explained]
        faults += [] if has_example(sections) else ["it has no example"]
    if inspect.isfunction(value):
        faults += faults_of_function(value, sections)
    return faults


def has_example(sections: dict[str, list[str]]) -> bool:
    """Whether the section `Examples` has a doctest."""
    return any(line.strip().startswith(">>>") for line in sections.get("Examples", []))


def faults_of_function(function: Callable[..., Any], sections: dict[str, list[str]]) -> list[str]:
    """The rules for sections: parameters, the result and an example."""
    signature, faults = inspect.signature(function), []
    parameters = [name for name in signature.parameters if name not in ("self", "cls")]
    explained = entries(sections.get("Args", []))
    faults += [f"Args: {name} is missing" for name in parameters if name not in explained]
    faults += [f"Args: {name} is not a parameter" for name in explained if name not in parameters]
    returns = signature.return_annotation not in (None, "None", inspect.Signature.empty)
    if parameters and returns and not {"Returns", "Yields"} & set(sections):
        faults.append("it has no Returns")
    if parameters and not has_example(sections):
        faults.append("it has no example")
    return faults


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_docstring_has_its_sections(name):
    assert faults_of(PUBLIC[name]) == []


@pytest.fixture(scope="module")
def model():
    return nv.load_model("tiny", device="cpu")


@pytest.mark.parametrize("name", [name for name, value in PUBLIC.items() if ">>>" in (value.__doc__ or "")])
def test_examples_print_the_lines_that_they_show(name, model, tmp_path, monkeypatch):
    """Each docstring has a new state and an empty folder of its own; all share one model."""
    monkeypatch.chdir(tmp_path)
    names = {"nv": nv, "np": np, "torch": torch, "model": model, "state": nv.init_state(model, num_pages=64)}
    example = doctest.DocTestParser().get_doctest(inspect.cleandoc(PUBLIC[name].__doc__), names, name, None, None)
    report: list[str] = []
    doctest.DocTestRunner(optionflags=FLAGS).run(example, out=report.append)
    assert not report, "".join(report)


def complete(count: int, name: str = "") -> int:
    """Add.

    Args:
        count: a number.
        name (str): a name.

    Returns:
        The number.

    Raises:
        ValueError: never.
        OutOfPagesError: never.

    Examples:
        >>> 1 + 1
        2
    """
    return count + len(name)


def incomplete(count: int, name: str = "") -> int:
    """Add.

    Args:
        count: a number.
        other: a number.

    Raises:
        OutOfPaperError: never.
        path: never.

    Examples:
        Add two numbers.
    """
    return count + len(name)


@dataclasses.dataclass
class Incomplete:
    """A number.

    Attributes:
        count: a number.
    """

    count: int
    name: str


def test_the_rules_find_faults_that_are_planted():
    assert faults_of(complete) == []
    assert faults_of(incomplete) == [
        "Raises: OutOfPaperError is not an exception",
        "Raises: path is not an exception",
        "Args: name is missing",
        "Args: other is not a parameter",
        "it has no Returns",
        "it has no example",
    ]
    assert faults_of(Incomplete) == ["Attributes: name is missing", "it has no example"]
    assert faults_of(lambda: 1) == ["it has no docstring"]


def test_every_public_class_is_looked_into():
    assert {"LLM.__init__", "LLM.generate", "ChunkStore.save", "ChunkStore.size", "MemoryReport.svg", "Chunk.token_ids"} <= PUBLIC.keys()
    assert [name for name in PUBLIC if name.startswith("StepOutput.")] == ["StepOutput.logprobs"]
    assert all(dataclasses.is_dataclass(PUBLIC[name]) for name in ("Generation", "EngineConfig"))
