"""What a release would hold: `python -m build` makes an sdist and, from it, a wheel that runs in a fresh environment."""

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.long


def run(*command: str | Path, cwd: Path) -> str:
    hidden = {"PYTHONPATH", "PYTEST_CURRENT_TEST"}
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PIP_CONSTRAINT": str(ROOT / "constraints.txt")}
    environment |= {"PIP_BUILD_CONSTRAINT": environment["PIP_CONSTRAINT"], "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist and the wheel; without arguments `build` makes the wheel from the sdist, not from the tree."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", out, ROOT, cwd=out)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


def tracked(*folders: str) -> set[str]:
    """The files that git tracks in these folders, or all files where there is no repository."""
    listed = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True, check=False)
    return set(listed.stdout.splitlines())


def test_the_sdist_holds_what_is_tracked(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = tracked("src", "tests", "examples", "docs", "tools", "bench", "benchmarks", "*.md", "*.yml", "*.toml", "*.txt", "Makefile")
    assert wanted | {"LICENSE", "CITATION.cff"} <= names, sorted(wanted - names)[:8]


def test_the_wheel_holds_the_package_and_nothing_else(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[1]) as archive:
        names = set(archive.namelist())
        metadata = next(archive.read(name).decode() for name in names if name.endswith(".dist-info/METADATA"))
    wanted = {name.removeprefix("src/") for name in tracked("src")}
    assert wanted <= names, sorted(wanted - names)[:8]
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"nanovllm"}
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    assert "License-Expression: Apache-2.0" in metadata and "Project-URL: Source, " in metadata


@pytest.fixture(scope="module")
def installed(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel; torch and the other dependencies are those of this process, which would be gigabytes again."""
    home = tmp_path_factory.mktemp("fresh")
    venv.create(home / "venv", with_pip=True)
    run(home / "venv/bin/python", "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", built[1], cwd=home)
    outer = [path for path in sys.path if path.endswith("site-packages")]
    (site,) = (home / "venv").glob("lib/python*/site-packages")
    (site / "outer.pth").write_text("\n".join(outer) + "\n")
    return home


def test_the_wheel_generates_text(installed: Path) -> None:
    command = "import nanovllm; print(nanovllm.__file__)"
    assert run(installed / "venv/bin/python", "-c", command, cwd=installed).startswith(str(installed / "venv"))
    assert "Velmora" in run(
        installed / "venv/bin/nanovllm", "generate", "--temperature", "0", "--max-tokens", "8",
        "The capital of Aistonia is Velmora. The capital of Aistonia is", cwd=installed,
    )  # fmt: skip


def test_the_wheel_has_its_testing_helpers_and_commands(installed: Path) -> None:
    run(installed / "venv/bin/python", "-c", "import nanovllm.testing", cwd=installed)
    for command in ("generate", "chat", "memory", "models", "check", "tune", "bench", "profile", "eval-reuse"):
        assert "usage: nanovllm " in run(installed / "venv/bin/nanovllm", command, "--help", cwd=installed)
