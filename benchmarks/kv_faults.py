"""Hurt servers that keep KV on disk: kill them while they write, damage their files, fill their disk. Then ask the next server.

    python -m benchmarks.kv_faults --output benchmarks/results/cpu-kv-faults.json

Each server is a process with the packaged model, with pages and named chunks in a folder (`short_lives.py`). All replies, before a fault
and after it, are compared with those of an engine that keeps nothing (`kv_fault_lives.py`).

- `crash`: a server is killed (SIGKILL) at the calls by which it changes files: before each, and in the middle of each write. Others are
  killed at random times. Then a new server starts in the folder. It deletes temporary files that are older than a minute, so those of the
  killed server are made two minutes old.
- `corruption`: a file of a folder is damaged, and a new server starts in it.
- `full_disk`: a server goes on in a folder while writes fail, because files may not become larger (`RLIMIT_FSIZE`) or because a number of
  bytes has been written (a planted `ENOSPC`). Then a new server starts, whose writes do not fail.

The figures count what must not be:

- `wrong`: replies with other tokens;
- `crashes`: processes that ended by an unknown error or did not end, and requests that failed;
- `lost`: chunks that are missing though a call to save them was answered;
- `stale`: chunks that are there though a call that replaces or deletes them was answered;
- `unnoticed`: damages to pages and chunks that neither a digest nor a header told.

The exit status is 1 if one of these is not 0. All cases take some nine minutes of processor time; `--every N` takes one of N.
"""

import argparse
import json
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

import nanovllm as nv
from benchmarks import kv_fault_lives as lives
from benchmarks.kv_fault_lives import BAD, BEFORE, KING, PROMPTS, Act, Right, judged, summed
from benchmarks.short_lives import PAGE, Full, Points, lived
from nanovllm.entrypoints.arguments import positive
from nanovllm.entrypoints.cli.bench.environment import record
from nanovllm.executor.page_file import HEADER_BYTES
from nanovllm.state.prefix_keys import keys_from

NEVER = 1 << 40
NOTHING = "nothing is refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One fault.

    Attributes:
        template: The folder with which it begins; None: an empty one.
        act: What the server does that is hurt.
        at: At which call of the system it is killed.
        seconds: After how many seconds it is killed.
        most: The size that files may have.
        free: The bytes that may be written.
        name: The name of a file that is damaged.
        damage: The kind of damage, and its place in the file.
        whole: How many tokens the next server reads without a damage.
    """

    template: Path | None
    act: Act = lives.begun
    at: int | None = None
    seconds: float | None = None
    most: int | None = None
    free: int | None = None
    name: str = ""
    damage: tuple[str, int] = ("", 0)
    whole: int = 0


class Tester:
    """Runs cases in several processes, each of which starts servers in processes of their own.

    Args:
        model: The model.
        jobs: How many processes.
    """

    model: nv.Model
    right: Right

    def __init__(self, model: nv.Model, jobs: int) -> None:
        Tester.model, Tester.right = model, lives.right_replies(model)  # forked processes have them
        self._pool = multiprocessing.get_context("fork").Pool(jobs)

    def run(self, function: Callable[[Case], dict[str, Any]], cases: list[Case]) -> list[dict[str, Any]]:
        """What a function finds for each case, in the order of the cases."""
        return self._pool.map(function, cases, 1)

    def close(self) -> None:
        """End the processes."""
        self._pool.terminate()


def copied(template: Path | None, made: str) -> Path:
    """A copy of a folder, or an empty one."""
    folder = Path(made) / "kv"
    if template is None:
        folder.mkdir()
    else:
        shutil.copytree(template, folder)
    return folder


def hurt(case: Case) -> dict[str, Any]:
    """Let one server be killed, or find its disk full, and start the next one."""
    with tempfile.TemporaryDirectory() as made:
        folder = copied(case.template, made)
        fault = partial(Full, case.most, case.free) if case.at is None else partial(Points, folder, case.at)
        ended = lived(partial(lives.life, Tester.model, case.act, folder, fault), kill_after=case.seconds)
        if ended.code and not ended.killed:
            return {"crashes": 1, "says": ended.errors, "told": ended.told}
        before = BEFORE if case.act in (lives.later, lives.busy) else []
        known: dict[Act, list[list[int]]] = {
            lives.begun: PROMPTS[:1],
            lives.first: PROMPTS[:2],
            lives.later: PROMPTS[:4],
            lives.busy: PROMPTS,
        }
        row = judged(Tester.model, Tester.right, folder, [*before, *ended.told], known[case.act])
        return row | {"killed": ended.killed, "told": ended.told}


def template(model: nv.Model, act: Act, before: Path | None, folder: Path) -> Path:
    """The folder that a server leaves which ends orderly."""
    if before is None:
        folder.mkdir()
    else:
        shutil.copytree(before, folder)
    ended = lived(partial(lives.life, model, act, folder, lambda: None))
    if ended.code:
        raise SystemExit(ended.errors)
    return folder


# Crashes


def crashes(tester: Tester, started: Path, filled: Path, every: int) -> dict[str, Any]:
    """The figures of servers that are killed."""
    found, draw, cases = dict[str, Any](), random.Random(1), dict[str, list[Case]]()
    lived_to_the_end = {
        "while the folder is made": Case(template=None, act=lives.begun, at=NEVER),
        "while the first pages and chunks are written": Case(template=started, act=lives.first, at=NEVER),
        "while files are replaced and deleted": Case(template=filled, act=lives.later, at=NEVER),
    }
    counts = [dict(row["told"][-1:])["points"] for row in tester.run(hurt, [*lived_to_the_end.values()])]
    for (name, case), count in zip(lived_to_the_end.items(), counts, strict=True):
        step = 8 if case.template is None else 1  # most calls that make a folder write pages to measure the disk, all in the same way
        cases[name] = [replace(case, at=at) for at in range(0, count, step * every)]
        found[name] = {"calls": count}
    times = [draw.uniform(0.0, 1.2) for _ in range(max(1, 40 // every))]
    cases["at random times"] = [Case(template=filled, act=lives.busy, seconds=seconds) for seconds in times]
    rows = iter(tester.run(hurt, [case for of_name in cases.values() for case in of_name]))
    for name, of_name in cases.items():
        own = [*islice(rows, len(of_name))]
        found[name] = {**found.get(name, {}), "kills": sum(row.get("killed", 0) for row in own), **summed(own)}
    return found


# Corruption


def files(folder: Path) -> dict[str, tuple[Path, range]]:
    """The files of a folder that are damaged, each with the range of its bytes that are."""
    keys = [*keys_from(np.array(PROMPTS[0], np.int32), 0, PAGE, 0)]
    (page,) = folder.rglob(f"{keys[1].hex()}.kv")
    chunk = max(folder.rglob("*.safetensors"), key=lambda path: path.stat().st_size)
    head = 8 + int.from_bytes(chunk.read_bytes()[:8], "little") + 8 * KING
    found = {"page, header": (page, range(HEADER_BYTES)), "page, KV": (page, range(HEADER_BYTES, page.stat().st_size))}
    found |= {"chunk, head": (chunk, range(head)), "chunk, KV": (chunk, range(head, chunk.stat().st_size))}
    small = {"chunk, its name": chunk.with_suffix(".name"), "chunk, its label": chunk.with_suffix(".label")}
    small |= {name: next(folder.rglob(name)) for name in ("about.json", "rates.json", ".nanovllm-kv.lock")}
    return found | {name: (file, range(file.stat().st_size)) for name, file in small.items()}


def damages(name: str, places: range) -> list[tuple[str, int]]:
    """The damages of a part of a file: their kinds, each with its place."""
    bits, cuts = (24, 12) if name.startswith(("page", "chunk, head", "chunk, KV")) else (6, 3)
    found = [("one bit", places[at * len(places) // bits]) for at in range(bits)]
    found += [("cut", place) for at in range(cuts) if (place := places[at * len(places) // cuts])]
    whole = (
        () if name in ("page, KV", "chunk, KV") else ("emptied", "longer", "missing", "another's", "a link to itself", "a folder", "a pipe")
    )
    return [*found, *((kind, 0) for kind in whole)]


def damage(folder: Path, path: Path, kind: str, place: int) -> None:
    """Damage a file."""
    data = bytearray(path.read_bytes())
    match kind:
        case "one bit":
            data[place] ^= 1 << place % 8
        case "cut":
            del data[place:]
        case "emptied":
            data.clear()
        case "longer":
            data.append(0)
        case "another's":
            others = [each for each in sorted(folder.rglob(f"*{path.suffix}")) if each != path and each.is_file()]
            data = (others or [*folder.rglob("*.kv")])[0].read_bytes()
        case "a link to itself":
            path.unlink()
            path.symlink_to(path.name)
        case _:
            path.unlink()
            if kind == "a folder":
                path.mkdir()
            elif kind == "a pipe":
                os.mkfifo(path)
            return
    if kind != "a link to itself":
        path.write_bytes(data)


def damaged(case: Case) -> dict[str, Any]:
    """Damage a file of a folder, and start a server in it."""
    with tempfile.TemporaryDirectory() as made:
        folder, (kind, place) = copied(case.template, made), case.damage
        damage(folder, files(folder)[case.name][0], kind, place)
        told = [["is", *each[1:]] for each in BEFORE]
        row = judged(Tester.model, Tester.right, folder, told, PROMPTS[:2])
        row["how"] = how(row, case)
        swapped = kind == "another's" and case.name.startswith("chunk")
        row["stale"] = 0 if swapped else row["stale"]  # the file of a chunk does not tell its name
        row["unnoticed"] = int(
            row["how"] == NOTHING and case.name in ("page, header", "page, KV", "chunk, head", "chunk, KV") and not swapped
        )
        return row


def how(row: dict[str, Any], case: Case) -> str:
    """How the damage to a file was found."""
    if "refused" in row:
        return f"no start: {row['refused'].split(':')[0]}"
    if not row["restarts"]:
        return "crash"
    if code := row["refusals"]["king"]:
        return f"in use, `{code}`"
    if "king" not in row["chunks"]:
        return "at the start, stderr" if "not loaded again" in row["says"] else "at the start"
    if row["counts"]["pages_damaged"]:
        return "when it is read"
    if row["counts"]["errors"]:
        return "when it is read, an error is counted"
    return NOTHING if row["read_tokens"] >= case.whole else "the page is missing"


def corruption(tester: Tester, filled: Path, every: int) -> dict[str, Any]:
    """The figures of damaged files, by file."""
    bare = judged(tester.model, tester.right, filled, BEFORE, PROMPTS[:2])
    cases = [
        Case(template=filled, name=name, damage=each, whole=bare["read_tokens"])
        for name, (_, places) in files(filled).items()
        for each in damages(name, places)
    ][::every]
    rows, found = tester.run(damaged, cases), {"none": {"tried": 1, **summed([bare])}}
    for name in dict.fromkeys(case.name for case in cases):
        own = [(case.damage[0], row) for case, row in zip(cases, rows, strict=True) if case.name == name]
        told = dict(Counter(row["how"] for _, row in own))
        by_kind = {kind: dict(Counter(row["how"] for each, row in own if each == kind)) for kind in dict.fromkeys(kind for kind, _ in own)}
        found[name] = {"tried": len(own), "how": told, "by_damage": by_kind, **summed([row for _, row in own])}
    return found


# Full disks


def full_disk(tester: Tester, filled: Path, every: int) -> dict[str, Any]:
    """The figures of servers whose writes fail."""
    found, limits = dict[str, Any](), [0, 16, 100, 1 << 10, 1 << 14, 65_631, 65_632, 1 << 17, 1 << 18, 370_000]
    later = Case(template=filled, act=lives.later)
    plans = {
        "files may not become larger": [replace(later, most=most) for most in limits],
        "no space after some bytes": [replace(later, free=free) for free in range(0, 1_500_000, 75_000)],
        "the same in an empty folder": [Case(template=None, act=lives.first, free=free) for free in (0, 16, 1000, 70_000, 400_000)],
    }
    every_row = iter(tester.run(hurt, [case for cases in plans.values() for case in cases[::every]]))
    for name, cases in plans.items():
        rows = [*islice(every_row, len(cases[::every]))]
        told = [each for row in rows for each in row["told"]]
        counts = Counter(each[2] for each in told if each[0] == "refused")
        counts.update(f"no start: {each[1].split(':')[0]}" for each in told if each[0] == "no start")
        errors = sum(each[1] for each in told if each[0] == "errors")
        meanwhile = sum(each[0] == "reply" for each in told)
        found[name] = {"tried": len(rows), "replies_meanwhile": meanwhile, "errors": errors, "refused": dict(counts), **summed(rows)}
    return found


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=positive, default=1, metavar="N", help="take one of N cases (default: %(default)s)")
    parser.add_argument("--jobs", type=positive, default=2, metavar="N", help="servers at the same time (default: %(default)s)")
    parser.add_argument("--commit", metavar="C", help="the commit that is recorded")
    parser.add_argument("--output", type=Path, metavar="FILE", help="a file for the result, besides stdout")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # before any operation: a process that is forked later has no threads of these
    model = nv.load_model("tiny", device="cpu")
    tester, figures = Tester(model, options.jobs), dict[str, Any]()
    with tempfile.TemporaryDirectory() as made:
        started = template(model, lives.begun, None, Path(made) / "started")
        filled = template(model, lives.first, started, Path(made) / "filled")
        for name, found in (
            ("corruption", lambda: corruption(tester, filled, options.every)),
            ("full_disk", lambda: full_disk(tester, filled, options.every)),
            ("crash", lambda: crashes(tester, started, filled, options.every)),
        ):
            figures[name] = found()
            print(name, json.dumps(figures[name]), file=sys.stderr, flush=True)
    tester.close()
    command = "python -m benchmarks.kv_faults" + (f" --every {options.every}" if options.every > 1 else "")
    text = json.dumps(record(model, figures, command, options.commit), indent=1)
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n")
    if any(row.get(bad) for rows in figures.values() for row in rows.values() for bad in BAD):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
