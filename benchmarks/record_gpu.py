"""Everything that needs GPUs, in one call: the tests, and the figures of benchmarks/results that name a GPU.

    python -m benchmarks.record_gpu                                  # all cards of the host, for an hour at most
    python -m benchmarks.record_gpu --parts tests,serving --limit 9  # as much of these as ends within nine minutes
    python -m benchmarks.record_gpu --parts x4 --card h200           # the figures of four cards: benchmarks/out/h200x4-8b.json and others

Parts run side by side, each on cards of its own (`CUDA_VISIBLE_DEVICES`). They start in the order of `--parts`. A part that measures the
host is quiet: it runs when nothing else does. A part has a limit of its own, at which all its processes are ended. One that fails does not
stop the others. A part that needs more cards than there are is skipped.

`gpu-NAME.log` has what a part printed, and `summary.json` what became of all, also while they run. The exit code is 1 if a part failed,
was ended at a limit or was not started.
"""

import argparse
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from benchmarks.recording import summary
from benchmarks.recording.choose import Part
from benchmarks.recording.commands import VISIBLE, Commands, visible_cards
from benchmarks.recording.machine import Machine
from benchmarks.recording.outcomes import Outcomes, read
from benchmarks.recording.parts import GROUPS, PARTS
from benchmarks.recording.process import end_orphans
from benchmarks.recording.side_by_side import RUNNING, Row, SideBySide

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def say(text: str) -> None:
    """Print a line. Parts go on, and are ended, also where nobody reads it any more."""
    with suppress(OSError):
        print(text, flush=True)


def chosen_parts(text: str) -> list[Part]:
    """The parts that `--parts` names, each once.

    Args:
        text: Names of parts and of groups of parts, separated by commas.

    Raises:
        argparse.ArgumentTypeError: A name is unknown.
    """
    names = dict.fromkeys(name for word in text.split(",") for name in GROUPS.get(word, (word,)))
    if unknown := names.keys() - PARTS.keys():
        raise argparse.ArgumentTypeError(f"unknown part {', '.join(sorted(unknown))}; choose from {', '.join((*PARTS, *GROUPS))}")
    return [PARTS[name] for name in names]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts that were asked for. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    named = ", ".join(name for name, part in PARTS.items() if part.by_name)
    groups = f"{', '.join(GROUPS)} stand for the figures of so many cards, or of one of so many ranks"
    names = f"of {', '.join(PARTS)}; {groups} (default: all but {named})"
    parser.add_argument("--parts", type=chosen_parts, metavar="NAME,...", help=names)
    parser.add_argument("--cards", type=int, metavar="N", help="GPUs to use (default: all that torch sees)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/out"), metavar="FOLDER", help="for results (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=60.0, metavar="MINUTES", help="of all parts together (default: %(default)s)")
    parser.add_argument("--card", default="gpu", metavar="NAME", help="what names of files with figures begin with (default: %(default)s)")
    parser.add_argument("--commit", help="commit to record (default: the commit that git reports)")
    parser.add_argument("--dry-run", action="store_true", help="only print the commands")
    options = parser.parse_args(arguments)
    if options.cards is not None and options.cards < 1:
        parser.error(f"--cards {options.cards}: give at least 1")
    parts = options.parts or [part for part in PARTS.values() if not part.by_name]
    if options.dry_run:
        for part in parts:
            needs = f"{part.cards} card{'s' * (part.cards > 1)}{', quiet' * part.quiet}, at most {part.limit:g} s"
            print(f"{part.name} ({needs}): {' '.join(Commands(options.out, options.card, options.commit).words(part))}")
        return 0
    machine = Machine()
    count = options.cards or max(1, len(machine.told(wait=True).get("gpus", ())))
    cards = visible_cards(count)
    if len(cards) < count:
        parser.error(f"--cards {count}: {VISIBLE}={','.join(cards)} names fewer")
    options.out.mkdir(parents=True, exist_ok=True)
    end_orphans()
    return run(parts, Commands(options.out, options.card, options.commit, cards[:count]), 60 * options.limit, machine)


def run(parts: Sequence[Part], commands: Commands, seconds: float, machine: Machine) -> int:
    """Run parts side by side for so many seconds, print what becomes of them, and write the summary. Returns the exit code."""

    def tests_by_part() -> dict[str, Outcomes]:
        started = [row.part for row in runs.rows if row.cards]  # others may have files of an older run
        return {part.name: tests for part in started if (tests := read(commands.outcomes(part))) is not None}

    def note(*, wait: bool = False) -> None:
        about = {"command": " ".join(("python -m benchmarks.record_gpu", *sys.argv[1:])), **machine.told(wait=wait)}
        about |= {"commit": commands.commit} if commands.commit else {}
        try:
            summary.write(commands.out / "summary.json", about, runs.rows, tests_by_part())
        except OSError as error:  # the parts go on
            say(f"the summary cannot be written: {error}")

    def tell(row: Row) -> None:
        if row.result == RUNNING:
            say(f"{row.part.name} on {','.join(map(str, row.cards))}: {' '.join(commands.words(row.part))}")
        else:
            say(f"{row.part.name}: {row.result}" + (f" after {row.seconds:.0f} s" if row.cards else ""))
        note()

    runs = SideBySide(parts, len(commands.cards), commands.launch, tell)
    with handled(runs.stop) as numbers:
        runs.run(seconds)
        note(wait=not numbers)
    say(summary.table(runs.rows, tests_by_part()))
    return 128 + numbers[0] if numbers else 0 if all(row.fine for row in runs.rows) else 1


@contextmanager
def handled(stop: Callable[[], None]) -> Iterator[list[int]]:
    """Call `stop` for each signal that would end this process. Yields the numbers of the signals that came."""
    numbers = list[int]()

    def handler(number: int, _: object) -> None:
        numbers.append(number)
        stop()

    before = {number: signal.getsignal(number) for number in SIGNALS}
    ours = [number for number in SIGNALS if before[number] is not signal.SIG_IGN]  # nohup ignores SIGHUP
    for number in ours:
        signal.signal(number, handler)
    try:
        yield numbers
    finally:
        for number in ours:
            signal.signal(number, before[number])


if __name__ == "__main__":
    sys.exit(main())
