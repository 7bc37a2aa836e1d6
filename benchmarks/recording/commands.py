"""A part as a process: the words of its command, the files that it writes, and the cards that it sees."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.recording.choose import Part
from benchmarks.recording.process import Processes

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_cards(count: int) -> list[str]:
    """What `CUDA_VISIBLE_DEVICES` calls the cards: the names that it has already, or else numbers up to `count`."""
    named = os.environ.get(VISIBLE)
    return [str(card) for card in range(count)] if named is None else named.split(",")


@dataclass(frozen=True)
class Commands:
    """How parts are started.

    Attributes:
        out: The folder of the results.
        card: What the names of files with figures begin with.
        commit: The commit to record, or None for that which git reports.
        cards: What `CUDA_VISIBLE_DEVICES` calls each card.
    """

    out: Path
    card: str = "gpu"
    commit: str | None = None
    cards: Sequence[str] = ()

    def figures(self, part: Part) -> Path:
        """The file of a part's figures.

        Example:
            >>> Commands(Path("out"), card="h200").figures(Part("8b-x2", (), 60, cards=2)).name
            'h200x2-8b.json'
        """
        many = f"x{part.cards}" if part.cards > 1 else ""
        return self.out / f"{self.card}{many}-{part.name.removesuffix('-' + many)}.json"

    def outcomes(self, part: Part) -> Path:
        """The file to which the tests of a part write their outcomes."""
        return self.out / f"gpu-{part.name}.jsonl"

    def words(self, part: Part) -> list[str]:
        """The words of a part's command."""
        words = [word.replace("OUT", str(self.out)) for word in part.command]
        if part.figures:
            words += ["--output", str(self.figures(part))]
            words += ["--commit", self.commit] if self.commit else []
        return words

    def launch(self, part: Part, cards: Sequence[int], seconds: float) -> Processes:
        """Start a part on these cards for so many seconds. The files of an older run are removed first."""
        for old in (self.outcomes(part), *([self.figures(part)] if part.figures else [])):
            old.unlink(missing_ok=True)
        visible = {VISIBLE: ",".join(self.cards[card] for card in cards)}
        return Processes(self.words(part), self.out / f"gpu-{part.name}.log", {**os.environ, **dict(part.environment), **visible}, seconds)
