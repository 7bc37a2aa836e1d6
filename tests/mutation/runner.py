"""Plant small bugs one at a time in a copy of the package, and run the tests that should find them.

Run some by name, or all without a name: `python -m tests.mutation "an eviction goes on past its count"`.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from tests.mutation.mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "nanovllm"
TIMEOUT = 600  # seconds for the tests of one mutant
WORKERS = 2


class Verdict(Enum):
    """The result of the tests with one mutant planted. Only a test that fails finds a mutant."""

    FOUND = "found"
    SURVIVED = "survived"
    TIMED_OUT = "timed out"
    BROKEN = "broken: the tests could not run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The verdict on one mutant, and the end of the tests' output."""

    mutant: Mutant
    verdict: Verdict
    output: str


def copied(folder: Path) -> Path:
    """A copy of the package in `folder`, without compiled files; returns the folder to put on `PYTHONPATH`."""
    shutil.copytree(PACKAGE, folder / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def plant(mutant: Mutant, folder: Path) -> None:
    """Write the mutant into a copy of the package. Raises `ValueError` unless its old text occurs exactly once."""
    file = folder / PACKAGE.name / mutant.file
    text = file.read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.name}: its old text occurs {text.count(mutant.old)} times in {mutant.file}, not once")
    file.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")


def run_tests(folder: Path, tests: Iterable[str], timeout: float) -> subprocess.CompletedProcess[str]:
    """Run tests on the package in `folder`, up to the first that fails. Raises `subprocess.TimeoutExpired`."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    own = {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "HYPOTHESIS_PROFILE": "ci"}
    passed_on = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}  # of a pytest that runs this one
    return subprocess.run(command, cwd=ROOT, env=passed_on | own, capture_output=True, text=True, timeout=timeout, check=False)


def judge(mutant: Mutant) -> Outcome:
    """Plant one mutant and run its tests."""
    with tempfile.TemporaryDirectory(prefix="nanovllm-mutant-") as made:
        folder = copied(Path(made))
        plant(mutant, folder)
        try:
            done = run_tests(folder, mutant.tests, TIMEOUT)
        except subprocess.TimeoutExpired as error:
            return Outcome(mutant=mutant, verdict=Verdict.TIMED_OUT, output=str(error))
    verdict = {0: Verdict.SURVIVED, 1: Verdict.FOUND}.get(done.returncode, Verdict.BROKEN)
    return Outcome(mutant=mutant, verdict=verdict, output=(done.stdout + done.stderr)[-2000:])


def judged(mutants: Sequence[Mutant]) -> Iterator[Outcome]:
    """The outcome of each mutant, in order, a few at a time."""
    with ThreadPoolExecutor(WORKERS) as pool:
        yield from pool.map(judge, mutants)


def fails_without_mutants() -> str | None:
    """The output of all selected tests on the package as it is, where one of them fails; None where all pass."""
    tests = dict.fromkeys(test for mutant in MUTANTS for test in mutant.tests)
    with tempfile.TemporaryDirectory(prefix="nanovllm-mutant-") as made:
        done = run_tests(copied(Path(made)), tests, 10 * TIMEOUT)
    return (done.stdout + done.stderr)[-4000:] if done.returncode else None


def main(names: Sequence[str]) -> int:
    """Judge the named mutants, or all; returns how many were not found."""
    known = {mutant.name: mutant for mutant in MUTANTS}
    if unknown := [name for name in names if name not in known]:
        print(f"no mutant is called {unknown[0]!r}; there are: {', '.join(known)}", file=sys.stderr)
        return 2
    missed = 0
    for outcome in judged([known[name] for name in names] or MUTANTS):
        missed += outcome.verdict is not Verdict.FOUND
        print(f"{outcome.verdict.value:10} {outcome.mutant.name}", flush=True)
        if names:
            print(outcome.output)
    print(f"{missed} of {len(names) or len(MUTANTS)} were not found")
    return min(missed, 1)
