"""Run parts side by side on the cards of one host, until all have ended or the time is over."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.recording.choose import Part, choose
from benchmarks.recording.process import Processes

POLL = 0.1  # seconds
WAITING, RUNNING, DONE, SKIPPED = "waiting", "running", "done", "skipped"


@dataclass
class Row:
    """What is known of a part.

    Attributes:
        part: The part.
        result: In words: `WAITING`, `RUNNING`, `DONE`, or why it is not done. A part that needs more cards than there are is `SKIPPED`.
        cards: The numbers of the cards that it has or had.
        seconds: How long it ran.
    """

    part: Part
    result: str = WAITING
    cards: tuple[int, ...] = ()
    seconds: float = 0.0

    @property
    def fine(self) -> bool:
        """Whether it is done or was skipped."""
        return self.result == DONE or self.result.startswith(SKIPPED)


@dataclass(frozen=True)
class Running:
    """A part that runs: its row, its processes, when it started and how many seconds it has."""

    row: Row
    processes: Processes
    started: float
    seconds: float


class SideBySide:
    """Parts that run side by side. Each has its cards to itself, and `choose` says which part starts when.

    Attributes:
        rows: A row for each part.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        num_cards: int,
        launch: Callable[[Part, tuple[int, ...], float], Processes],
        tell: Callable[[Row], None],
    ) -> None:
        """Plan to run parts.

        Args:
            parts: The parts, in the order in which they should start.
            num_cards: The number of cards.
            launch: Starts a part on the cards of these numbers, for so many seconds.
            tell: Called with a row after its result has changed.
        """
        self.rows = [Row(part) for part in parts]
        self._cards, self._launch, self._tell = frozenset(range(num_cards)), launch, tell
        self._running: list[Running] = []
        self._stopped = False

    def stop(self) -> None:
        """End the parts that run, and start no others. A signal handler may call it."""
        self._stopped = True

    def run(self, seconds: float) -> None:
        """Run the parts. After so many seconds those that still run are ended, and no others start."""
        end = time.monotonic() + seconds
        for row in self.rows:
            if row.part.cards > len(self._cards):
                self._change(row, f"{SKIPPED}: needs {row.part.cards} cards")
        try:
            while True:
                self._settle()
                if not self._stopped:
                    self._start(end - time.monotonic())
                if not self._running:
                    break
                time.sleep(POLL)
        finally:
            self._stopped = True
            while self._running:
                self._settle()
                time.sleep(POLL)
            for row in self.rows:
                if row.result == WAITING:
                    self._change(row, "not started")

    def _start(self, seconds: float) -> None:
        """Start the parts whose turn it is, if any of these seconds are left."""
        waiting = {row.part.name: row for row in self.rows if row.result == WAITING}
        free = self._cards - {card for each in self._running for card in each.row.cards}
        starting = choose(sorted(free), [row.part for row in waiting.values()], [each.row.part for each in self._running])
        for part, cards in starting if seconds > 0 else ():
            row, limit = waiting[part.name], min(part.limit, seconds)
            self._running.append(Running(row, self._launch(part, cards, limit), time.monotonic(), limit))
            row.cards = cards
            self._change(row, RUNNING)

    def _settle(self) -> None:
        """Take the parts that have ended from those that run."""
        for each in list(self._running):
            if self._stopped:
                each.processes.end()
            if each.processes.have_ended():
                each.row.seconds = time.monotonic() - each.started
                self._running.remove(each)
                self._change(each.row, self._result(each))

    def _result(self, each: Running) -> str:
        if not each.processes.over:
            return DONE if each.processes.code == 0 else f"exit code {each.processes.code}"
        if self._stopped:
            return "ended from outside"
        limit = each.row.part.limit
        return f"reached its limit of {limit:g} s" if each.seconds == limit else "reached the limit of all parts"

    def _change(self, row: Row, result: str) -> None:
        row.result = result
        self._tell(row)
