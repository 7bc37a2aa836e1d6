"""Parts of a recording run side by side: none shares a card, quiet ones are alone, wide ones get cards, and limits end all processes."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.recording import outcomes, process, side_by_side
from benchmarks.recording.choose import Part, choose
from benchmarks.recording.commands import Commands
from benchmarks.recording.process import Processes
from benchmarks.recording.side_by_side import DONE, RUNNING, Row, SideBySide

ROOT = Path(__file__).parents[1]


def alive(pid: int) -> bool:
    """Whether a process runs. One that has ended and that nobody waits for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def until(true: Callable[[], Any], seconds: float = 60.0) -> None:
    """Wait until something is so."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it was waited for too long"
        time.sleep(0.01)


NEEDS = st.lists(st.tuples(st.integers(1, 4), st.booleans()), max_size=12)


@given(needs=NEEDS, num_cards=st.integers(1, 4), ends=st.randoms(use_true_random=False))
def test_any_parts_in_any_order(needs: list[tuple[int, bool]], num_cards: int, ends: Any) -> None:
    """The choice is right at every moment of a recording, whichever parts end first. In the end all parts have run."""
    parts = [Part(f"{at}", (), 60, min(cards, num_cards), quiet) for at, (cards, quiet) in enumerate(needs)]
    waiting, running = list(parts), dict[Part, tuple[int, ...]]()
    while waiting or running:
        free = sorted(set(range(num_cards)) - {card for cards in running.values() for card in cards})
        chosen = choose(free, waiting, list(running))
        starting, taken = [part for part, _ in chosen], [card for _, cards in chosen for card in cards]
        assert len(set(taken)) == len(taken) and set(taken) <= set(free), "a card has one part"
        assert all(len(cards) == part.cards for part, cards in chosen)
        assert starting == [part for part in waiting if part in starting], "in the order given"
        now = [*running, *starting]
        assert len(now) == 1 or not any(part.quiet for part in now), "a quiet part is alone"
        assert running or starting[0] is waiting[0], "if nothing runs, all fit, and the first starts"
        oldest = next((part for part in waiting if not part.quiet), None)
        if oldest not in starting:
            assert all(part.quiet for part in starting), "nothing takes the cards for which the oldest part waits"
        left = len(free) - len(taken)
        if oldest in starting:
            assert not any(part.cards <= left for part in waiting if part not in now and not part.quiet), "no card is idle without need"
        waiting = [part for part in waiting if part not in starting]
        running |= dict(chosen)
        if not starting or ends.random() < 0.5:
            del running[ends.choice(list(running))]


# A part holds a file for each of its cards, and fails if another holds it. A quiet part also fails if it sees another's.
HOLDS = """
import os, pathlib, sys, time
folder, cards = pathlib.Path(sys.argv[1]), os.environ["CUDA_VISIBLE_DEVICES"].split(",")
assert len(cards) == int(sys.argv[2])
files = {folder / card for card in cards}
for file in files: file.touch(exist_ok=False)
for _ in range(5):
    assert sys.argv[3] == "False" or set(folder.iterdir()) == files
    time.sleep(0.01)
for file in files: file.unlink()
"""


def holds(name: str, folder: Path, cards: int = 1, quiet: bool = False) -> Part:
    command = (sys.executable, "-S", "-c", HOLDS, str(folder), str(cards), str(quiet))
    return Part(name, command, 60, cards, quiet, figures=False)


def run_parts(parts: Sequence[Part], num_cards: int, out: Path) -> tuple[list[Row], list[tuple[str, str]]]:
    """Run parts. Returns their rows and, in the order of time, their names and results."""
    events = list[tuple[str, str]]()
    commands = Commands(out, cards=[str(card) for card in range(num_cards)])
    runs = SideBySide(parts, num_cards, commands.launch, lambda row: events.append((row.part.name, row.result)))
    runs.run(120)
    return runs.rows, events


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look often, and send SIGKILL early, but not before a process of a busy machine has heard SIGTERM."""
    monkeypatch.setattr(side_by_side, "POLL", 0.01)
    monkeypatch.setattr(process, "GRACE", 5.0)


@pytest.mark.usefixtures("soon")
def test_no_card_is_shared_and_quiet_parts_are_alone(tmp_path: Path) -> None:
    folder = tmp_path / "cards"
    folder.mkdir()
    needs = [(1, False), (2, False), (1, True), (1, False), (4, False), (2, False), (2, True), (1, False), (3, False)]
    parts = [holds(f"{at}", folder, *need) for at, need in enumerate(needs)]
    rows, events = run_parts(parts, 4, tmp_path)
    assert [row.result for row in rows] == [DONE] * len(parts), [path.read_text() for path in tmp_path.glob("*.log")]
    running, most = set[str](), 0
    for name, result in events:
        (running.add if result == RUNNING else running.remove)(name)
        most = max(most, len(running))
        assert len(running) == 1 or not any(parts[int(each)].quiet for each in running)
    assert most >= 3


@pytest.mark.usefixtures("soon")
def test_parts_run_at_the_same_time(tmp_path: Path) -> None:
    """Each part ends only if the other runs."""
    meet = "import pathlib, sys, time; pathlib.Path({!r}).touch()\nwhile not pathlib.Path({!r}).exists(): time.sleep(0.01)"
    paths = str(tmp_path / "first"), str(tmp_path / "second")
    parts = [
        Part(f"{at}", (sys.executable, "-S", "-c", meet.format(*each)), 60, figures=False) for at, each in enumerate((paths, paths[::-1]))
    ]
    assert [row.result for row in run_parts(parts, 2, tmp_path)[0]] == [DONE, DONE]


@pytest.mark.usefixtures("soon")
def test_a_wide_part_gets_its_cards(tmp_path: Path) -> None:
    folder = tmp_path / "cards"
    folder.mkdir()
    parts = [holds("first", folder), holds("wide", folder, 2), *(holds(f"later-{at}", folder) for at in range(4))]
    rows, events = run_parts(parts, 2, tmp_path)
    assert all(row.result == DONE for row in rows)
    assert [name for name, result in events if result == RUNNING][:3] == ["first", "later-0", "wide"]


def test_an_error_ends_what_runs(tmp_path: Path) -> None:
    """An error of the recorder itself, such as a part that cannot be started, leaves no processes."""
    started = list[Processes]()

    def launch(part: Part, cards: tuple[int, ...], seconds: float) -> Processes:
        if started:
            raise OSError("it cannot be started")
        started.append(Processes(part.command, tmp_path / "log", os.environ, seconds))
        return started[0]

    parts = [Part(name, (sys.executable, "-S", "-c", "import time; time.sleep(600)"), 600) for name in ("slow", "bad", "late")]
    runs = SideBySide(parts, 2, launch, lambda row: None)
    with pytest.raises(OSError, match="cannot be started"):
        runs.run(600)
    assert started[0].have_ended() and [row.result for row in runs.rows] == ["ended from outside", "not started", "not started"]


# It starts a process in another session that ignores SIGTERM, as a rank of `torchrun` may be, and ends politely itself.
FAMILY = """
import pathlib, signal, subprocess, sys, time
folder = pathlib.Path(sys.argv[1])
def polite(*_):
    (folder / "polite").touch()
    raise SystemExit(0)
signal.signal(signal.SIGTERM, polite)
code = "import os, pathlib, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
code += "pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(600)"
subprocess.Popen([sys.executable, "-S", "-c", code, str(folder / "pid")], start_new_session=True)
while not ((folder / "pid").exists() and (folder / "pid").read_text()): time.sleep(0.01)
(folder / "ready").touch()
time.sleep(float(sys.argv[2]))
"""


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("over", [True, False], ids=["at its limit", "when it has ended"])
def test_all_processes_end(over: bool, tmp_path: Path) -> None:
    command = [sys.executable, "-S", "-c", FAMILY, str(tmp_path), "600" if over else "0"]
    processes = Processes(command, tmp_path / "log", os.environ, 60)
    until((tmp_path / "ready").exists)
    pid = int((tmp_path / "pid").read_text())
    assert alive(pid)
    if over:
        assert not processes.have_ended()
        processes.end()
    until(processes.have_ended)
    assert not alive(pid) and (processes.over, processes.code) == (over, 0) and (tmp_path / "polite").exists() == over


SUITE = """
import json, os, pathlib, signal, time
import pytest
def test_passes(): pass
def test_fails(): assert [] == ["a reason"]
def test_is_skipped(): pytest.skip("for a reason")
@pytest.fixture
def broken():
    yield
    raise ValueError
def test_breaks_at_its_end(broken): pass
def test_never_ends():
    lines = pathlib.Path(os.environ["OUTCOMES"])
    while "test_never_ends" not in lines.read_text(): time.sleep(0.01)
    os.kill(os.getppid(), signal.SIGKILL)
def test_is_not_reached(): pass
"""


def test_outcomes(tmp_path: Path) -> None:
    """All that is known of a run with pytest-xdist whose first process is killed."""
    lines = tmp_path / "lines.jsonl"
    (tmp_path / "test_suite.py").write_text(SUITE)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "xdist", "-n", "1", "-p", "benchmarks.recording.outcomes"]
    command += ["--outcomes", str(lines), "-c", os.devnull, "--rootdir", str(tmp_path), str(tmp_path)]
    environment = {**os.environ, "OUTCOMES": str(lines), "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert ran.returncode < 0, ran.stdout + ran.stderr
    lines.write_text(lines.read_text() + '{"test": "cut o')
    known = outcomes.read(lines)
    assert known is not None and (known.collected, known.passed, known.skipped) == (6, 1, 1)
    assert [test.partition("::")[2] for test in known.failed] == ["test_fails", "test_breaks_at_its_end"]
    assert [test.partition("::")[2] for test in known.unfinished] == ["test_never_ends"]
    assert str(known) == "2 failed, 3 of 6 tests ran, 1 skipped, 1 unfinished"
    assert "a reason" in lines.read_text() and outcomes.read(tmp_path / "none") is None
