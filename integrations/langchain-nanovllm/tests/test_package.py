"""The package itself: what it needs and says, without LangChain."""

import re
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1]
PROJECT = tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"]


def test_its_version_is_that_of_nanovllm() -> None:
    whole = tomllib.loads((FOLDER / "../../pyproject.toml").read_text())["project"]
    assert PROJECT["version"] == whole["version"] and PROJECT["requires-python"] == whole["requires-python"]


@pytest.mark.parametrize("name", ["langchain-openai", "langchain-core", "langchain-tests"])
def test_versions_that_were_tested_are_pinned_and_allowed(name: str) -> None:
    needed = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["test"]]
    (least,) = (re.split(r"[>=,]+", each)[1] for each in needed if each.startswith(name))
    (pinned,) = re.findall(rf"^{name}==(.+)$", (FOLDER / "../../constraints.txt").read_text(), re.M)
    assert [*map(int, least.split("."))] <= [*map(int, pinned.split("."))]
    try:
        assert version(name) == pinned
    except PackageNotFoundError:
        pytest.skip(f"{name} is not installed")
