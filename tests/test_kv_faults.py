"""`benchmarks/kv_faults.py` kills servers while they write, damages their files and fills their disk, and counts what went wrong."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.kv_faults import damage, damages
from benchmarks.short_lives import Full, Points, Tell, lived

pytestmark = pytest.mark.unhooked  # it measures
ROOT = Path(__file__).resolve().parents[1]


def test_the_figures(tmp_path: Path) -> None:
    output = tmp_path / "faults.json"
    command = [sys.executable, "-m", "benchmarks.kv_faults", "--every", "1000", "--jobs", "4", "--commit", "abc", "--output", str(output)]
    ended = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    told = json.loads(output.read_text())
    assert told["commit"] == "abc" and "--every 1000" in told["command"]
    assert [*told["crash"]][-1] == "at random times" and all(row["kills"] == 1 for row in told["crash"].values())
    assert told["corruption"]["page, header"]["how"] == {"when it is read": 1}
    assert told["corruption"]["none"]["read_tokens"] == 64
    for row in (*told["crash"].values(), *told["full_disk"].values(), told["corruption"]["page, header"]):
        assert row["replies"] == row["right"] > 0 and not row["wrong"] and not row["crashes"]


def test_a_process_is_killed_at_each_call_that_changes_a_file(tmp_path: Path) -> None:
    def work(last: int, tell: Tell) -> None:
        folder = tmp_path / str(last)
        folder.mkdir()
        points = Points(folder, last)
        fd = os.open(folder / "new", os.O_WRONLY | os.O_CREAT)
        os.pwrite(fd, b"1234", 0)
        os.replace(folder / "new", folder / "old")
        tell(points.count)

    left = []
    for last in range(4):
        ended = lived(lambda tell, last=last: work(last, tell))
        assert ended.killed and not ended.told and ended.code == -9
        left.append({path.name: path.read_bytes() for path in (tmp_path / str(last)).iterdir()})
    assert left == [{}, {"new": b""}, {"new": b"12"}, {"new": b"1234"}]
    ended = lived(lambda tell: work(4, tell))
    assert ended.told == [4] and ended.code == 0 and not ended.killed


def test_a_process_that_fails_is_no_killed_one(tmp_path: Path) -> None:
    def full(tell: Tell) -> None:
        Full(None, 5)
        fd = os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT)
        tell([os.pwrite(fd, b"1234", 0), os.pwrite(fd, b"56", 4), os.pwrite(fd, b"12345", 0)])
        try:
            os.pwrite(fd, b"6", 5)
        except OSError as error:
            tell(error.errno)
        raise ValueError("planted")

    ended = lived(full)
    assert ended.told == [[4, 1, 5], errno.ENOSPC] and ended.code == 1 and not ended.killed and "planted" in ended.errors
    slow = lived(lambda tell: (tell(1), os.read(os.pipe()[0], 1), None)[2], kill_after=0.05)
    assert slow.killed and slow.told == [1]


def test_each_kind_of_damage_changes_a_file(tmp_path: Path) -> None:
    kinds = [*dict.fromkeys(kind for kind, _ in damages("page, header", range(8)))]
    assert len(kinds) == 9
    for kind in kinds:
        folder = tmp_path / kind
        folder.mkdir()
        path = folder / "a.kv"
        path.write_bytes(b"12345678")
        (folder / "b.kv").write_bytes(b"other")
        damage(folder, path, kind, 3)
        assert not path.is_file() or path.read_bytes() != b"12345678"
