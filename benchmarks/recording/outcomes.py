"""A plugin of pytest that writes each test's outcome to a file as it comes, and what the file says of a run that was ended.

    python -m pytest -p benchmarks.recording.outcomes --outcomes FILE.jsonl

The lines are JSON objects: how many tests there are, which test has started, and how a test went, with the reason of a failure.
"""

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--outcomes`."""
    parser.addoption("--outcomes", type=Path, metavar="FILE.jsonl", help="write each test's outcome to this file as it comes")


def pytest_configure(config: pytest.Config) -> None:
    """Write in the process that hears of all tests: with pytest-xdist, workers tell it."""
    path = config.getoption("--outcomes")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Writer(path), "outcomes-writer")


class Writer:
    """Writes the lines."""

    def __init__(self, path: Path) -> None:
        """Begin the file."""
        self._file, self._collected = path.open("w", encoding="utf-8"), 0

    def _write(self, **line: Any) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def _count(self, collected: int) -> None:
        if collected > self._collected:  # every worker of pytest-xdist collects the same tests
            self._collected = collected
            self._write(collected=collected)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Write how many tests there are."""
        self._count(len(session.items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """Write how many tests there are, if workers collect them."""
        self._count(len(ids))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Write that a file cannot be collected."""
        if report.failed:
            self._write(test=report.nodeid, outcome="failed", why=report.longreprtext)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Write that a test has started."""
        self._write(started=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write how a test went."""
        if report.when == "call" or not report.passed:
            why = {"why": report.longreprtext} if report.failed else {}
            self._write(test=report.nodeid, outcome=report.outcome, seconds=round(report.duration, 3), **why)


@dataclass(frozen=True)
class Outcomes:
    """What is known of a run of tests.

    Attributes:
        collected: How many tests there are.
        passed: How many passed.
        skipped: How many were skipped.
        failed: Those that failed, and files that could not be collected.
        unfinished: Those that had started and have no outcome.
    """

    collected: int
    passed: int
    skipped: int
    failed: tuple[str, ...]
    unfinished: tuple[str, ...]

    def __str__(self) -> str:
        """The numbers in words."""
        ran = self.passed + len(self.failed)
        told = f"{len(self.failed)} failed, {ran} of {self.collected} tests ran, {self.skipped} skipped"
        return told + (f", {len(self.unfinished)} unfinished" if self.unfinished else "")


def read(path: Path) -> Outcomes | None:
    """Read a file that `Writer` wrote, or None if there is none. Its last line may be cut off."""
    if not path.is_file():
        return None
    collected, started, outcomes = 0, dict[str, None](), dict[str, str]()
    for text in path.read_text(encoding="utf-8").splitlines():
        with suppress(json.JSONDecodeError):
            line = json.loads(text)
            collected = line.get("collected", collected)
            if "started" in line:
                started[line["started"]] = None
            if "test" in line:  # the last counts: a test may pass, and fail when it is torn down
                outcomes[line["test"]] = line["outcome"]
    passed, skipped, failed = (
        tuple(test for test, outcome in outcomes.items() if outcome == wanted) for wanted in ("passed", "skipped", "failed")
    )
    return Outcomes(collected, len(passed), len(skipped), failed, tuple(test for test in started if test not in outcomes))
